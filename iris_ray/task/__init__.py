"""The public API inside a task: its place in its gang, notices of preemption, heartbeats, endpoints, JAX.

May import: `actors.calls`, `actors.protocol`, `model`, `errors`. Imports Ray only where a function needs it.
Start with `job_info.py` and `preemption.py`. `actors/host/task_environment.py` makes a task's environment.
"""
