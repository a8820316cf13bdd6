"""The words: what jobs, tasks, hosts, slices, notices and outcomes are. Frozen data and rules about one of them.

May import: `iris_ray.errors`. No Ray, no clock, no I/O.
Start with `jobs.py` (what a job is) and `constraints.py` (what it may ask of a host).
"""
