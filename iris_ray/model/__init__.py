"""The words of the field: jobs, tasks, hosts, slices, notices and outcomes, as plain data with the rules about one.

May import: `errors`. No Ray, no clock, no I/O.
Start with `job_spec.py` (what a job asks for), `options.py` (the table of the options of a run), `jobs.py` (what
becomes of a job) and `constraints.py` (what a job may ask of a host).
"""
