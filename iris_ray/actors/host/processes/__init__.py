"""The processes of tasks: their trees, the ledger of them on disk, watching them, and ending all of them.

May import: the pure core, `actors.wire`, `actors.host.containers`, `actors.host.directories` and `actors.host.exits`;
never Ray.
Start with `tree.py` and `ledger.py`. `reaper.py` is a program of its own, which ends what a dead actor has left.
"""
