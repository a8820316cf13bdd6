"""Refuses what a page in a browser may send: a front asks for no key, so a page of anybody's could use the models."""

import ipaddress
from urllib.parse import urlsplit

from aiohttp.typedefs import Handler, Middleware
from aiohttp.web import Request, StreamResponse, middleware

from iris_ray.errors import NotPermittedError


def is_loopback(host: str | None) -> bool:
    """Return whether a host name is a loopback address, or ``localhost``. It asks no name server."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def refusing_pages(listens_at: str) -> Middleware:
    """Return a middleware for a front that listens there; it raises a `NotPermittedError`."""

    @middleware
    async def guarded(request: Request, handler: Handler) -> StreamResponse:
        if origin := request.headers.get("Origin"):  # browsers send it with each POST, other clients don't
            raise NotPermittedError(
                f"a web page of {origin[:100]!r} sent this request; HttpFront answers programs only. Have the page's"
                " own server ask, or leave out the header Origin"
            )
        host = request.headers.get("Host")
        if host and is_loopback(listens_at) and not is_loopback(_name(host)):
            raise NotPermittedError(  # a page's own name may be made to lead here
                f"the header Host says {host[:100]!r}, and HttpFront listens for its own machine only. Ask it at"
                " http://localhost, or have it listen at another address: HttpFront(..., host=ADDRESS)"
            )
        return await handler(request)

    return guarded


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
