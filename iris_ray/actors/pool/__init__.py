"""The caller's side: SlicePoolManager reserves slices and runs gangs on them, attempt by attempt.

May import: `actors.host`, `actors.calls`, `actors.protocol` and the pure core.
Start with `slice_pool_manager.py`, then `gang_run.py` and `attempt.py`.
"""
