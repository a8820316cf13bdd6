"""A task's program in a container: how it is started, how it ends, and how it is ended when its task is.

May import: the pure core, `actors.wire` and `actors.host.exits`; never Ray.
Start with `run.py`, which is what the task's process runs, and `record.py`, by which the host ends containers.
"""
