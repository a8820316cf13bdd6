"""How a task ends: a result, an exception or an exit, and the likely cause if its process ended without a word.

May import: the pure core and `actors.wire`.
Start with `result_pickling.py`, for ends that user code reports, and `diagnosis.py`, for all others.
"""
