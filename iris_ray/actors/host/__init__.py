"""One host of a slice: TPUHostActor and the task processes, their environment, output, process trees and chips.

May import: `actors.wire` and the pure core.
Start with `host_actor.py` and `task_process.py`. `task_environment.py` decides which variables a task gets.
"""
