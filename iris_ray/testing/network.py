"""A network for the hosts of a simulated cluster, which can fail: Linux namespaces on a bridge.

It needs root and iproute2. Packets are lost silently, as in a real partition: the sender's kernel is told a hardware
address that no interface has (`ip-neighbour(8)`), so each direction between two machines can be lost by itself.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from itertools import count
from pathlib import Path
from typing import Literal

from iris_ray.errors import InvalidRequestError

Direction = Literal["both", "in", "out"]
"""Which packets of a host are lost: all, those to it, or those from it."""

_RANGE = IPv4Network("198.18.0.0/15")
"""RFC 2544 reserves it for benchmarks of networks."""
_PREFIX = 20
"""The prefix length of one cluster's subnet: 4,000 hosts over its life, since no address is used again."""
_NOBODY = "02:00:00:00:00:01"
_INTERFACE = "net0"


@dataclass(frozen=True, slots=True)
class _Member:
    """A machine in the network.

    Attributes:
        namespace: its network namespace; None: this process's own, as for the head.
        interface: the name of its interface there.
    """

    address: str
    namespace: str | None
    interface: str
    hardware: str


class Network:
    """Machines on one bridge. Each has a network namespace, except the head, which is in this process's own.

    Args:
        record: a file for the names of the namespaces and links that ``janitor.py`` has to remove.

    Raises:
        InvalidRequestError: this process may not make networks, or iproute2 is missing.
    """

    def __init__(self, record: Path) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
            raise InvalidRequestError(
                "networks=True gives every host its own network. That needs root and the programs ip (iproute2)"
                " and nsenter (util-linux). Leave it out: hosts can't be cut off then; all other faults work."
            )
        self._record = record
        self._bridge = f"iris{os.getpid()}"
        self._numbers = count(2)
        self._subnet = _free_subnet()
        self._members: dict[str, _Member] = {}
        self.head = str(self._subnet[1])
        self._note(f"link {self._bridge}")
        _ip("link", "add", self._bridge, "address", _hardware(1), "type", "bridge")
        _ip("address", "add", f"{self.head}/{self._subnet.prefixlen}", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        self._members[self.head] = _Member(self.head, None, self._bridge, _hardware(1))

    def addresses(self) -> Iterator[str]:
        """Yield the IP addresses of new machines; a machine is in the network when its address is yielded."""
        for number in self._numbers:
            yield self._add(number)

    def prefix(self, address: str) -> list[str]:
        """Return the beginning of a command line that runs on a machine."""
        namespace = self._members[address].namespace
        return [] if namespace is None else ["nsenter", f"--net=/run/netns/{namespace}"]

    def lose(self, address: str, others: list[str], direction: Direction) -> None:
        """Lose the packets between a machine and some others until `find`."""
        for one, other in self._pairs(address, others, direction):
            _tell(one, other.address, _NOBODY)

    def find(self, address: str) -> None:
        """Stop losing packets from and to a machine."""
        for one, other in self._pairs(address, [*self._members], "both"):
            _tell(one, other.address, other.hardware)

    def slow_down(self, address: str, bits_per_s: int | None) -> None:
        """Limit the bits that a machine sends in a second, in bursts of 16 KiB; None: no limit."""
        kind = ["noqueue"]
        if bits_per_s is not None:
            kind = ["tbf", "rate", f"{bits_per_s}bit", "burst", "16kb", "latency", "1s"]
        member = self._members[address]
        _run([*self.prefix(address), "tc", "qdisc", "replace", "dev", member.interface, "root", *kind])

    def _add(self, number: int) -> str:
        address, namespace = str(self._subnet[number]), f"{self._bridge}-{number}"
        outside = f"i{os.getpid()}h{number}"
        self._note(f"netns {namespace}")
        self._note(f"link {outside}")  # unsent packets keep a namespace for minutes after its last process
        _ip("netns", "add", namespace)
        member = _Member(address, namespace, _INTERFACE, _hardware(number))
        pair = ["type", "veth", "peer", "name", _INTERFACE, "address", member.hardware, "netns", namespace]
        _ip("link", "add", outside, *pair)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("-n", namespace, "address", "add", f"{address}/{self._subnet.prefixlen}", "dev", _INTERFACE)
        for interface in ("lo", _INTERFACE):
            _ip("-n", namespace, "link", "set", interface, "up")
        self._members[address] = member
        return address

    def _pairs(self, address: str, others: list[str], direction: Direction) -> Iterator[tuple[_Member, _Member]]:
        here = self._members[address]
        for other in (self._members[name] for name in others if name != address):
            if direction != "in":
                yield here, other
            if direction != "out":
                yield other, here

    def _note(self, line: str) -> None:
        with self._record.open("a") as record:
            record.write(f"{line}\n")


def _free_subnet() -> IPv4Network:
    """Return a part of the range in which no interface of this machine has an address."""
    subnets = list(_RANGE.subnets(new_prefix=_PREFIX))
    first = os.getpid() % len(subnets)
    taken = {IPv4Interface(word).ip for word in _ip("-o", "-4", "address", "show").split() if "/" in word}
    for subnet in (*subnets[first:], *subnets[:first]):
        if not any(address in subnet for address in taken):
            return subnet
    raise RuntimeError(f"{len(subnets)} networks of simulated clusters are in use; end some (`ip link` lists iris…)")


def _hardware(number: int) -> str:
    return f"02:00:00:01:{number >> 8:02x}:{number & 255:02x}"


def _tell(member: _Member, address: str, hardware: str) -> None:
    """Have a machine's kernel send the packets for an IP address to a hardware address."""
    where = [] if member.namespace is None else ["-n", member.namespace]
    _ip(*where, "neigh", "replace", address, "lladdr", hardware, "dev", member.interface, "nud", "permanent")


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
