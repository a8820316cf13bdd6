"""The vocabulary of the core: jobs, tasks, hosts, slices, notices and outcomes, as plain data with the rules of each.

May import: `errors`. No Ray, no clock, no I/O.
Start with `job_spec.py` (what a job asks for), `options.py` (the table of the options of a run), `jobs.py` (the
progress of a job) and `constraints.py` (the conditions that a job sets for its hosts).
"""
