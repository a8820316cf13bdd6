"""One host of a slice: TPUHostActor and the task processes, their environment, notices and chips.

May import: `actors.calls`, `actors.protocol` and the pure core.
Start with `host_actor.py` and `task_process.py`. `task_environment.py` decides which variables a task gets, and
`output/` holds what tasks print.
"""
