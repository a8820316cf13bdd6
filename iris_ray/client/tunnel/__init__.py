"""A way to the head of a cluster of which only the dashboard can be reached: commands and connections, both ways.

Ray's dashboard has no such way, so this one is made of what it has. Frames to the head travel as packages of Ray, which
the process at the head's end takes out of the GCS at once. Frames to the person travel as a file in Ray's directory of
logs, which the dashboard follows. `laptop_end.py` is the person's end, `head_end.py` the other, and `frames.py` what
both say.
"""
