"""Asks a host's own metadata server.

Every VM on Google Cloud has one (https://cloud.google.com/compute/docs/metadata/overview); other machines have none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from iris_ray.settings import TEST_METADATA_HOST

HOST_VARIABLES = (TEST_METADATA_HOST, "GCE_METADATA_HOST")
"""Environment variables with the server's ``host`` or ``host:port``; the second one is Google's own name."""
WELL_KNOWN_HOSTS = ("metadata.google.internal", "169.254.169.254")

_FLAVOR = {"Metadata-Flavor": "Google"}


class NoAnswer(Exception):
    """The metadata server can't be reached, or can't answer at the moment."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a metadata server answered; ``etag`` is empty if it sent none."""

    status: int
    body: str
    etag: str


class MetadataClient:
    """Asks metadata servers. Use it as an async context manager.

    Args:
        connect_s: seconds that a connection may take.
    """

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        # No proxy: a metadata server speaks about the host that asks.
        self._session = aiohttp.ClientSession(trust_env=False, headers=_FLAVOR, auto_decompress=False)

    async def __aenter__(self) -> "MetadataClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, host: str, path: str, query: Mapping[str, str], timeout_s: float) -> Answer:
        """Return what a metadata server answers, HTTP errors included.

        Raises:
            NoAnswer: there is no answer in time, or the answer is not from a metadata server.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=self._connect_s)
        url = f"http://{host}{path}"
        try:
            async with self._session.get(url, params=query, timeout=timeout, allow_redirects=False) as response:
                body = await response.read()
                if response.headers.get("Metadata-Flavor") != "Google":
                    raise NoAnswer(f"{host} is no metadata server of Google's")
                return Answer(response.status, body.decode(errors="replace").strip(), response.headers.get("ETag", ""))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise NoAnswer(f"{host} does not answer: {error or type(error).__name__}") from error


def metadata_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return where a process with this environment finds its host's metadata server, the likeliest place first."""
    configured = next((environ[name] for name in HOST_VARIABLES if environ.get(name)), None)
    return (configured,) if configured else WELL_KNOWN_HOSTS


def path_of(key: str) -> str:
    """Return the path of a metadata key."""
    return f"/computeMetadata/v1/{key}"
