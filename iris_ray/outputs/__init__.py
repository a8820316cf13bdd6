"""The service ``outputs``: a directory for the files of each attempt of a task, which outlives the attempt.

A service. May import: everything.
Start with `directory.py`, which bounds and removes such directories; `core.py` decides what goes. `sending.py` lists
and sends them, `client.py` asks for that.
"""
