"""A front for each test."""

from collections.abc import Iterator

import pytest

from iris_ray.slots.front import HttpFront
from tests.support.http_fronts import Client, serve


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def front(client: Client) -> Iterator[HttpFront]:
    with serve(client) as front:
        yield front
