"""Simulations are quiet: on a crowded fleet the planner has a line for every job that waits long."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("iris_ray.scheduler.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
