"""Access to the dashboard: without a token for programs on this machine, with one for other machines."""

import hmac
import math
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import is_loopback
from iris_ray.settings import DASHBOARD_TOKEN

COOKIE = "iris_ray_dashboard"
LEAST_LENGTH = 16
"""Characters of a token."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login", "/static/style.css"})
FOR_PROGRAMS = "/api/"
"""The beginning of the paths whose answers, also errors, are JSON."""

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def require_token(host: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the token that readers need; None if the dashboard is for this machine only.

    Nothing limits how often a token may be guessed: a limit for each address would let one stranger lock out everybody
    behind the same proxy. So a token has to be long.

    Raises:
        InvalidRequestError: other machines could reach it, and there is no token, or a short one.
    """
    if is_loopback(host):
        return None
    token = DASHBOARD_TOKEN.read(environment)
    if token is not None and len(token) < LEAST_LENGTH:
        raise InvalidRequestError(
            f"{DASHBOARD_TOKEN.name} has {len(token)} characters, and could be guessed; give {LEAST_LENGTH} or more."
            " Make one with python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    if token is None:
        raise InvalidRequestError(
            f"--host {host} lets other machines read the dashboard, and there is no token to keep strangers out. Set"
            f" {DASHBOARD_TOKEN.name} to a long secret of the dashboard's own, or leave out --host and reach it through"
            " a tunnel: ssh -L 8267:localhost:8267 THIS-MACHINE"
        )
    return token


MOST_SESSIONS = 1000
SESSION_S = 7 * 24 * 3600.0
"""How long a login lasts."""


class Access:
    """Admits requests that have the token, or the cookie of a session that began with the token.

    Args:
        token: the token; None: every request is admitted.
    """

    def __init__(self, token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._clock = clock
        self._sessions: OrderedDict[str, float] = OrderedDict()

    def login(self, given: object) -> str | None:
        """Return the cookie of a new session; None if that is not the token."""
        if not isinstance(given, str) or not self._is_right(given.strip()):
            return None
        cookie = secrets.token_urlsafe()
        self._sessions[cookie] = self._clock() + SESSION_S
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return cookie

    def allows(self, request: web.Request) -> bool:
        """Return whether a request has the token, or the cookie of a session."""
        if self._token is None or self._sessions.get(request.cookies.get(COOKIE, ""), -math.inf) > self._clock():
            return True
        bearer = request.headers.get("Authorization")
        return bearer is not None and self._is_right(bearer.removeprefix("Bearer "))

    def reader_of(self, request: web.Request) -> str:
        """Return who sends a request: its session, or else its address."""
        session = request.cookies.get(COOKIE, "")
        return session if session in self._sessions else request.remote or ""

    def _is_right(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(_bytes(given), _bytes(self._token))

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests of other sites' pages, without the token, or under a foreign name."""
        refusal = self._refusal(request)
        return await handler(request) if refusal is None else refusal

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        if is_of_another_site(request.headers):
            return _refused(request, 403, "another site's page sent this; open the dashboard itself")
        if self._token is None:
            if is_loopback(request.host.rpartition(":")[0] or request.host):
                return None  # with another name, a stranger's page may have had its name resolve to this machine
            return _refused(request, 403, "this dashboard is for its own machine: open it as http://localhost")
        if request.path in OPEN_PATHS or self.allows(request):
            return None
        if request.path.startswith(FOR_PROGRAMS):
            return _refused(request, 401, "give the token: Authorization: Bearer TOKEN")
        return web.Response(status=303, headers={"Location": "/login"})


def _refused(request: web.Request, status: int, why: str) -> web.Response:
    if request.path.startswith(FOR_PROGRAMS):
        return web.json_response({"error": why}, status=status)
    return web.Response(status=status, text=f"{why}\n")


def is_of_another_site(headers: Mapping[str, str]) -> bool:
    """Return whether a page of another site has its browser send a request; a person who follows a link may.

    Browsers say so. A page can't read the answers, but without this it could have the cluster work on its questions.
    """
    if headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return False
    opens = headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest"), headers.get("Origin")
    return opens != ("navigate", "document", None)  # a form of another site has an origin


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Set the security headers of a response."""
    response.headers.update(HEADERS)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # bytes of a header that are not UTF-8 become surrogates
