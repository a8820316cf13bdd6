"""The scheduler once more, slow and obvious: what `iris_ray.scheduler` has to agree with.

`plan.py` makes the plan. `suitability.py` says what a job asks for, and which workers suit it. Nothing is indexed,
shared or kept up to date.
"""
