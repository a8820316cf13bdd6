"""The caller's side: SlicePoolManager reserves slices and runs gangs on them, attempt by attempt.

May import: `actors.host`, `actors.wire` and the pure core. Knows the Controller through `actors.wire` only.
Start with `slice_pool_manager.py`, then `gang_run.py` and `attempt.py`. `actors/calls/liveness.py` decides
how long a silent host is tolerated.
"""
