"""Free ports of a host, held until a task needs them."""

import errno
import random
import socket
from collections.abc import Collection

# Below Linux' default ephemeral range (32768 and up), where an outgoing connection may take a port at any moment, and
# above Ray's default worker ports (10002-19999).
PORTS = range(20_000, 32_768)
MOST_REFUSALS = 1000
"""Even if 99 of 100 ports are in use or forbidden, a free one is found by then."""


def hold_ports(address: str, count: int, avoid: Collection[int]) -> list[socket.socket]:
    """Return sockets that are bound to unused ports of this address, and do not listen.

    Args:
        address: an IP address of this host.
        count: how many.
        avoid: ports not to use.

    Raises:
        OSError: no port of this address can be bound, such as because it is another host's, or all are forbidden.
    """
    held: list[socket.socket] = []
    refusals = 0
    while len(held) < count:
        port = random.choice(PORTS)
        if port in avoid:
            continue
        candidate = socket.socket()
        try:
            candidate.bind((address, port))
        except OSError as error:
            candidate.close()
            refusals += 1
            passes = error.errno in (errno.EADDRINUSE, errno.EACCES)  # the latter: a rule of this host for this port
            if not passes or refusals == MOST_REFUSALS:
                for one in held:
                    one.close()
                raise
        else:
            held.append(candidate)
    return held
