"""Where the time of jobs went: productive seconds, and the others by cause. Plain arithmetic on recorded times.

May import: nothing of iris_ray. Knows no Ray, no clock and no I/O. Start with `kinds.py` and `measure.py`.
"""
