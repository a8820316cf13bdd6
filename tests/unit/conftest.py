"""Fixtures of several rooms."""

from collections.abc import Iterator

import pytest

from iris_ray.testing.metadata_server import HostMetadata, MetadataServers


@pytest.fixture(scope="module")
def servers() -> Iterator[MetadataServers]:
    """The metadata servers of simulated hosts."""
    servers = MetadataServers()
    yield servers
    servers.close()


@pytest.fixture
def host_metadata(servers: MetadataServers) -> HostMetadata:
    """That of one host."""
    return servers.serve("127.0.0.1", {"project/project-id": "my-project"})
