"""Outer steps: slices that train by themselves average what they have learned, round by round.

May import: what `iris_ray.task` may, NumPy and JAX. Start with `group.py`; `wire.py` carries its messages.
"""
