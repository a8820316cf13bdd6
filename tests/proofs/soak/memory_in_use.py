"""How much of a running process's memory is in use, and how much its allocators keep for later.

    python -m tests.proofs.soak.memory_in_use PID…

The process is only read, through ``/proc/PID/mem``, and not stopped. A heap that changes meanwhile may be unreadable.
Python's pools are laid out as in CPython 3.11 (Objects/obmalloc.c), and the heaps as in glibc 2.36 (malloc/malloc.c and
arena.c) on 64 bits. Chunks in a thread's cache count as in use. Large blocks that glibc maps one by one don't count.
"""

import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ \S+ *(.*)")
_POOL_BYTES, _POOL_HEADER_BYTES, _ALIGNMENT = 16 << 10, 48, 16
_HEAP_BYTES = 64 << 20
_FIRST_CHUNKS = range(0x8A0, 0x8E1, 0x10), range(0x20, 0x41, 0x10)
"""Where the chunks of a heap can begin: after the arena's own data, or in its later heaps after their header."""


@dataclass(frozen=True, slots=True)
class InUse:
    """Bytes in use and kept free, by Python's allocator and by glibc, and of heaps that could not be read."""

    python: int = 0
    python_free: int = 0
    c: int = 0
    c_free: int = 0
    unreadable: int = 0

    def __add__(self, other: "InUse") -> "InUse":
        return InUse(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __str__(self) -> str:
        return ", ".join(f"{name} {getattr(self, name) / 1e6:.2f} MB" for name in self.__slots__)


def in_use(pid: int) -> InUse:
    return sum((_of(name, address, data) for name, address, data in _mappings(pid)), InUse())


def _of(name: str, address: int, data: bytes) -> InUse:
    if name == "[heap]":
        return _chunks(data, 0) or InUse(unreadable=len(data))
    if address % _HEAP_BYTES == 0 and len(data) <= _HEAP_BYTES:
        found = (_chunks(data, first) for firsts in _FIRST_CHUNKS for first in firsts)
        return next((one for one in found if one is not None), InUse(unreadable=len(data)))
    return _pools(address, data)


def _mappings(pid: int) -> Iterator[tuple[str, int, bytes]]:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for found in filter(None, map(_MAPPING.match, Path(f"/proc/{pid}/maps").read_text().splitlines())):
            start, end, name = int(found[1], 16), int(found[2], 16), found[3]
            if name in ("", "[heap]"):
                memory.seek(start)
                yield name, start, memory.read(end - start)


def _pools(address: int, data: bytes) -> InUse:
    """Count the blocks of Python's pools in a mapping; a mapping of anything else has nothing that looks like one."""
    total = InUse()
    for start in range(-address % _POOL_BYTES, len(data) - _POOL_BYTES + 1, _POOL_BYTES):
        count, _, _, _, _, size_index, _, last = struct.unpack_from("<I4xQQQIIII", data, start)
        size = (size_index + 1) * _ALIGNMENT
        blocks = (_POOL_BYTES - _POOL_HEADER_BYTES) // size
        if last == _POOL_BYTES - size and 0 < count <= blocks:
            total += InUse(python=count * size, python_free=(blocks - count) * size)
    return total


def _chunks(data: bytes, at: int) -> InUse | None:
    """Add up a heap's chunks. Return None if there is no chain of chunks from there to the heap's end."""
    used = free = 0
    while at + 16 <= len(data):
        size = struct.unpack_from("<Q", data, at + 8)[0] & ~7
        after = at + size
        if size < 16 or size % 16 or after > len(data) + 16:
            return None
        if after + 16 > len(data):  # the last one, of which the heap grows
            return InUse(c=used, c_free=free + size)
        if struct.unpack_from("<Q", data, after + 8)[0] & 1:  # "the chunk before is in use"
            used += size
        else:
            free += size
        at = after
    return None


if __name__ == "__main__":
    for pid in sys.argv[1:]:
        print(pid, in_use(int(pid)))
