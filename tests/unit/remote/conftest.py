"""A cluster in this process, for tests of the command line, and a dashboard over HTTP that runs nothing."""

from collections.abc import Iterator

import pytest

from tests.support.controller_in_process import bare_cluster, world
from tests.support.dashboard import Dashboard, served

__all__ = ["bare_cluster", "world"]


@pytest.fixture
def dashboard() -> Dashboard:
    return Dashboard()


@pytest.fixture
def url(dashboard: Dashboard) -> Iterator[str]:
    with served(dashboard) as url:
        yield url
