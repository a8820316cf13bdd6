"""API keys of callers, and what each may do."""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil

from aiohttp import web

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import NAME, Holds, Whole, is_texts, require, require_fields

LEAST_LENGTH = 16
"""Characters of a key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key with which programs may use models.

    Args:
        name: the name of its owner, for messages and metrics.
        secret: the key itself, at least 16 ASCII characters. Callers send it as ``Authorization: Bearer SECRET``.
        models: the models that it may use; None: all.
        at_a_time: requests that it may have at a time; None: any number.
        per_minute: requests that it may make at once. As many become available again in each minute; None: no limit.

    Raises:
        InvalidSlotError: a value makes no sense.
    """

    name: str
    secret: str = field(repr=False)
    models: Collection[str] | None = None
    at_a_time: int | None = None
    per_minute: int | None = None

    def __post_init__(self) -> None:
        require("ApiKey: name", self.name, NAME, InvalidSlotError)
        if not (isinstance(self.secret, str) and len(self.secret) >= LEAST_LENGTH and self.secret.isascii()):
            raise InvalidSlotError(
                f"the secret of key {self.name} is not a str of {LEAST_LENGTH} ASCII characters or more; make one with"
                " python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        if self.models is not None:
            given = list(self.models) if not isinstance(self.models, str) else None
            require(f"key {self.name}: models", given, Holds(is_texts, "a list of names"), InvalidSlotError)
        limits = dict.fromkeys(("at_a_time", "per_minute"), Whole(1, or_none=True, exactly=True))
        require_fields(f"key {self.name}: ", self, limits, InvalidSlotError)


@dataclass(slots=True, eq=False)
class KeyUse:
    """What a key has used: its requests that run, and how many it may still begin.

    Attributes:
        left: requests that it may begin now; as many as `ApiKey.per_minute` come back in a minute.
        at: the time for which ``left`` was computed.
    """

    key: ApiKey
    running: int = 0
    left: float = 0.0
    at: float = 0.0

    @contextmanager
    def request(self, now: float) -> Iterator[None]:
        """Count a request while it runs.

        Raises:
            web.HTTPTooManyRequests: the key has no room for it.
        """
        self._take(now)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _take(self, now: float) -> None:
        key = self.key
        if key.at_a_time is not None and self.running >= key.at_a_time:
            raise too_many(f"key {key.name} has {self.running} requests that run, and may have no more", 1)
        if key.per_minute is None:
            return
        self.left = min(key.per_minute, self.left + (now - self.at) * key.per_minute / 60.0)
        self.at = now
        if self.left < 1.0:
            seconds = ceil((1.0 - self.left) * 60.0 / key.per_minute)
            raise too_many(f"key {key.name} may make {key.per_minute} requests a minute, and has made them", seconds)
        self.left -= 1.0


def too_many(words: str, seconds: int) -> web.HTTPTooManyRequests:
    """Return the error for a caller that asks too often."""
    return web.HTTPTooManyRequests(text=f"{words}; come back in {seconds} s", headers={"Retry-After": str(seconds)})


class ApiKeys:
    """The keys of a server.

    Args:
        keys: the keys; none: everybody may use all models.

    Raises:
        InvalidSlotError: two keys have the same name or secret.
    """

    def __init__(self, keys: Sequence[ApiKey] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[bytes, KeyUse] = {}
        self.set(keys)

    def __bool__(self) -> bool:
        return bool(self._uses)

    def set(self, keys: Sequence[ApiKey]) -> None:
        """Replace the keys. A key whose secret was known keeps the counts of its requests."""
        if not (isinstance(keys, (list, tuple)) and all(isinstance(each, ApiKey) for each in keys)):
            raise InvalidSlotError("keys must be a list of ApiKey")  # no values in the message: they may be secret
        if len({key.name for key in keys}) < len(keys) or len({key.secret for key in keys}) < len(keys):
            raise InvalidSlotError("two API keys have the same name or secret; give each its own")
        uses = dict[bytes, KeyUse]()
        for key in keys:
            digest = _digest(key.secret)
            use = self._uses.get(digest) or KeyUse(key, left=key.per_minute or 0, at=self._clock())
            use.key, uses[digest] = key, use
        self._uses = uses

    def use_of(self, request: web.Request) -> KeyUse | None:
        """Return what the key of a request has used; None if no keys are needed.

        Raises:
            web.HTTPUnauthorized: it has no key, or another one.
        """
        if not self._uses:
            return None
        given = request.headers.get("Authorization", "")
        scheme, _, secret = given.partition(" ")
        use = self._uses.get(_digest(secret.strip())) if scheme.lower() == "bearer" else None
        if use is None:
            words = "this API key is not known here" if given else "an API key is needed"
            headers = {"WWW-Authenticate": "Bearer"}
            raise web.HTTPUnauthorized(text=f"{words}; send it as Authorization: Bearer KEY", headers=headers)
        return use

    @property
    def now(self) -> float:
        """The time on the clock of the keys."""
        return self._clock()


def may_use(use: KeyUse | None, model: str) -> bool:
    """Return whether a key, or everybody, may use a model."""
    return use is None or use.key.models is None or model in use.key.models


def _digest(secret: str) -> bytes:
    """Return the digest by which a secret is looked up: the time of a look-up then tells nothing of other secrets."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()
