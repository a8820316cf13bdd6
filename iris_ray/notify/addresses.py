"""Refuses webhooks in private networks: loopback, metadata servers and other machines that trust their neighbours.

The address that was checked is the one to which the connection goes, so a name that resolves differently the next time
does not get past the check.
"""

import ipaddress
import socket
from typing import Final

from yarl import URL

from iris_ray.notify.settings import PrivateHosts

NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_UNICAST: Final = ipaddress.ip_network("2000::/3")
"""All that is assigned of public IPv6 (RFC 4291). Elsewhere are old forms of private networks, such as fec0::/10."""
MOST_URL: Final = 4000

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedAddressError(Exception):
    """A webhook's address is not allowed. The message has no part of the address that may be secret."""


def checked_url(text: str, private: PrivateHosts) -> URL:
    """Return the URL of a webhook.

    Raises:
        RefusedAddressError: it is no URL, it is without TLS, or it names a private address.
    """
    try:
        url = URL(text)
        host, port = url.host, url.port
    except ValueError:
        raise RefusedAddressError("the secret is not the URL of a webhook") from None
    is_plain = text.isprintable() and not any(map(str.isspace, text))
    if url.scheme not in ("https", "http") or not host or port is None or len(text) > MOST_URL or not is_plain:
        raise RefusedAddressError("the secret is not the URL of a webhook, such as https://hooks.example.org/…")
    literal = as_address(host)
    if literal is not None:
        require_public(literal, host, private)
    is_listed = host.lower() in private.names or (literal is not None and any(literal in n for n in private.networks))
    if url.scheme == "http" and not is_listed:
        raise RefusedAddressError("the webhook is not on https, and its host is not in the setting notify_private")
    return url


def as_address(host: str) -> Address | None:
    """Return an address that is written as numbers, also in the old forms that a resolver reads; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.ip_address(socket.inet_aton(host))  # such as 127.1 and 2130706433
    except OSError:
        return None


def require_public(address: Address, host: str, private: PrivateHosts) -> None:
    """Raise RefusedAddressError for an address in a private network that no operator has allowed."""
    found, is_public = [address], True
    if isinstance(address, ipaddress.IPv6Address):
        found += [one for one in (address.ipv4_mapped, address.sixtofour) if one is not None]
        if address in NAT64:
            found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        is_public = address in GLOBAL_UNICAST or address in NAT64
    if host.lower() in private.names or any(one in network for one in found for network in private.networks):
        return
    if not is_public or not all(one.is_global and not one.is_multicast for one in found):
        raise RefusedAddressError(
            "the webhook is at a private address; an operator can allow it:"
            " iris-ray cluster settings set notify_private=HOST"
        )
