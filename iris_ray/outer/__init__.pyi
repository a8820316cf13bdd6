from .group import Group, join

__all__ = ["Group", "join"]
