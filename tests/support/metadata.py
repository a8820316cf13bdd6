"""Real metadata servers for tests of one host, and a client of them."""

import requests

from iris_ray.testing.metadata_server import HostMetadata

FLAVOR = {"Metadata-Flavor": "Google"}


def ask(host: HostMetadata, key: str, headers: dict[str, str] = FLAVOR, **query: str | float) -> requests.Response:
    return requests.get(f"http://{host.address}/computeMetadata/v1/{key}", query, headers=headers, timeout=10)
