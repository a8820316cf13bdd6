"""Slices that train by themselves and average what they have learned, under its public name."""

from iris_ray.task.outer.group import Group, join

__all__ = ["Group", "join"]
