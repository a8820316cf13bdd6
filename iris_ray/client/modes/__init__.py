"""Where a run happens: on a cluster, in local processes (simple, validate), or on a simulated cluster with faults.

Start with `mode.py`, which reads ``mode=`` and ``IRIS_RAY_MODE``, and `local_run.py`, which runs a request here.
"""
