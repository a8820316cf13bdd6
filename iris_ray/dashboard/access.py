"""Who may read the dashboard: programs on this machine without a token, other machines with one."""

import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import is_loopback
from iris_ray.settings import DASHBOARD_TOKEN

RAY_TOKEN, RAY_TOKEN_PATH, RAY_TOKEN_FILE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", ".ray/auth_token"
COOKIE = "iris_ray_dashboard"
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login", "/static/style.css"})

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def token_of(environment: Mapping[str, str]) -> str | None:
    """Return the dashboard's token, or else the Ray cluster's; None if there is none."""
    if token := DASHBOARD_TOKEN.read(environment) or environment.get(RAY_TOKEN):
        return token
    path = environment.get(RAY_TOKEN_PATH) or Path(environment.get("HOME", "/"), RAY_TOKEN_FILE)
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def require_token(host: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the token that readers need; None if the dashboard is for this machine only.

    Raises:
        InvalidRequestError: other machines could reach it, and there is no token.
    """
    if is_loopback(host):
        return None
    token = token_of(environment)
    if token is None:
        raise InvalidRequestError(
            f"--host {host} lets other machines read the dashboard, and there is no token to keep strangers out. Set"
            f" {DASHBOARD_TOKEN.name}, or leave out --host and reach it through a tunnel: ssh -L 8267:localhost:8267"
            " THIS-MACHINE"
        )
    return token


def guard(token: str | None) -> Middleware:
    """Return the middleware that refuses requests without the token, or under a foreign name."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, token)
        return await handler(request) if refusal is None else refusal

    return guarded


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Set the security headers of a response."""
    response.headers.update(HEADERS)


def is_right(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(_bytes(given), _bytes(token))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # bytes of a header that are not UTF-8 become surrogates


def _refusal(request: web.Request, token: str | None) -> web.StreamResponse | None:
    if token is None:
        if is_loopback(request.host.rpartition(":")[0] or request.host):
            return None  # with another name, a stranger's page may have had its name resolve to this machine
        return web.Response(status=403, text="this dashboard is for its own machine: open it as http://localhost\n")
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if request.path in OPEN_PATHS or any(is_right(one, token) for one in (bearer, request.cookies.get(COOKIE))):
        return None
    if request.path.startswith("/api/"):
        return web.json_response({"error": "give the token: Authorization: Bearer TOKEN"}, status=401)
    return web.Response(status=303, headers={"Location": "/login"})
