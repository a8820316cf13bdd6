"""Sends one message to a webhook, once.

aiohttp takes a fifth of a second to import, so the Controller imports this module with the first such message.
"""

import ipaddress
import socket
from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from iris_ray.notify.addresses import RefusedAddressError, checked_url, require_public
from iris_ray.notify.channels import NotSentError, reason_of
from iris_ray.notify.settings import PrivateHosts

HTTP_S: Final = 15.0
MOST_RETRY_AFTER_S: Final = 3600.0
_AGAIN: Final = frozenset({408, 409, 425, 429})


async def post(address: str, body: bytes, headers: Mapping[str, str], private: PrivateHosts) -> None:
    """Send a POST to a webhook, whose address is a secret.

    Raises:
        NotSentError: it was not taken, or is not allowed to go there.
    """
    try:
        url = checked_url(address.strip(), private)
        # a connector for each request: the address is checked at each, and nothing is kept open
        connector = aiohttp.TCPConnector(resolver=PublicResolver(private), force_close=True)
        timeout = aiohttp.ClientTimeout(total=HTTP_S)
        sent = {"content-type": "application/json; charset=utf-8", "user-agent": "iris-ray", **headers}
        async with (
            aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as session,
            session.post(URL(url), data=body, headers=sent, allow_redirects=False) as answer,
        ):
            status, after = answer.status, answer.headers.get("retry-after", "")
    except RefusedAddressError as error:
        raise NotSentError(str(error), again=True) from None  # an operator can mend the secret or the setting
    except TimeoutError:
        raise NotSentError(f"no answer within {HTTP_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NotSentError(_reason(error)) from None
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise NotSentError(f"HTTP {status}; redirects are not followed: store the new address", again=False)
    after_s = float(after) if after.isascii() and after.isdecimal() and len(after) < 9 else 0.0
    again = status >= 500 or status in _AGAIN
    raise NotSentError(f"HTTP {status}", again, min(after_s, MOST_RETRY_AFTER_S) if again else 0.0)


def _reason(error: Exception) -> str:
    """Return what went wrong with a connection. The error's own text may have the URL."""
    refused: BaseException | None = error
    while refused is not None and not isinstance(refused, RefusedAddressError):
        refused = refused.__cause__ or refused.__context__
    return reason_of(error) if refused is None else str(refused)


class PublicResolver(AbstractResolver):
    """Resolves names of hosts to public addresses only.

    Args:
        private: the private hosts that are allowed.
    """

    def __init__(self, private: PrivateHosts) -> None:
        self._private = private
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for one in found:
            require_public(ipaddress.ip_address(one["host"].partition("%")[0]), host, self._private)
        return found

    async def close(self) -> None:
        await self._resolver.close()
