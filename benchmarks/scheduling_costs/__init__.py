"""What the scheduling core costs, one module for each table that `benchmarks/scheduling.py` prints.

Start with `cycles.py`: one scheduling cycle in three states of the indexes. `growth.py` draws how it grows. `events.py`
has one event with all that follows, `large_jobs.py` jobs of many tasks, `long_queues.py` many different jobs, and
`memory.py` what stays in memory. `worlds.py` makes the fleets and the jobs of all of them.
"""
