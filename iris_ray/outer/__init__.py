"""Slices that train by themselves and average what they have learned, under its public name.

A service. May import: everything.
"""

from iris_ray.outer.group import Group, join

__all__ = ["Group", "join"]
