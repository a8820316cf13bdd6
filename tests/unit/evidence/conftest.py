"""A cluster in this process, for tests of the bug report."""

from tests.support.controller_in_process import bare_cluster, world

__all__ = ["bare_cluster", "world"]
