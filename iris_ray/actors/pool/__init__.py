"""The caller's side: SlicePoolManager reserves slices and runs gangs on them, attempt by attempt.

May import: `actors.host`, `actors.calls`, `actors.protocol` and the pure core. The way to the Controller is in
`actors.calls`.
Start with `slice_pool_manager.py`, then `gang_run.py` and `attempt.py`. `actors/calls/liveness.py` decides
how long a silent host is tolerated.
"""
