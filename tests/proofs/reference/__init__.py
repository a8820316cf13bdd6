"""The rules of the queue once more, slow and obvious, by which each plan of `iris_ray.scheduler` is judged.

They were written from docs/sharing-a-cluster.md by somebody who had not read the scheduler, and each function quotes
its sentence. Change a rule on the page first, then here and in the scheduler.

- `rules.py`: which hosts and groups suit a job; time limits; when hosts are expected to be free.
- `referee.py`: the order (bands, gangs that return, shares, age, growth and spares last); all or none; preferences and
  former slices; limits; reservations, their bound and horizon, and lending by `max_runtime`; UNSCHEDULABLE; that every
  waiting job gets a reason.

Not covered, with proofs of their own: evictions and loans to jobs that can be evicted (`test_band_worlds.py`,
`test_borrowers.py`, `windows/`), teams (`test_team_worlds.py`), groups of jobs (`test_group_worlds.py`), and which of
several groups is taken beyond preferences and former slices (`tests/unit/scheduler/`).
"""
