"""The words: what jobs, tasks, hosts, slices, notices and outcomes are. Frozen data and rules about one of them.

May import: `errors`. No Ray, no clock, no I/O.
Start with `job_spec.py` (what a job asks for), `options.py` (the table of what a run may be told), `jobs.py` (what
becomes of a job) and `constraints.py` (what a job may ask of a host).
"""
