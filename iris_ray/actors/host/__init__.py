"""One host of a slice: TPUHostActor and the task processes, their environment, notices, chips and output.

May import: `actors.calls`, `actors.protocol`, `processes` and the pure core.
Start with `host_actor.py` and `task_process.py`.
"""
