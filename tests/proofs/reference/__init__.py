"""The scheduler once more, slow and obvious: what `iris_ray.scheduler` has to agree with.

`plan.py` makes the plan. `jobs.py` says what a job asks for, `workers.py` which workers suit it, `constraints.py`
what constraints mean. Nothing is indexed, shared or kept up to date.
"""
