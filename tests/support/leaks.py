"""Looks for bytes in every place where a cluster of this machine may have left them."""

import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path

import psutil

from iris_ray.actors.calls.ray_internals import ClusterStore

MEMORY = Path("/dev/shm")
_SYSTEM = ("gcs_server", "raylet", "dashboard", "agent", "log_monitor", "monitor.py")
_ZLIB = re.compile(rb"\x78[\x01\x5e\x9c\xda]|\x1f\x8b\x08")
_CHUNK = 16 << 20
_PAGE = os.sysconf("SC_PAGESIZE")


def unpacked(data: bytes) -> Iterator[bytes]:
    """Yield the data, and what is compressed in it: by zlib or gzip, or as members of a ZIP file."""
    yield data
    for found in _ZLIB.finditer(data):
        stream = zlib.decompressobj(32 + zlib.MAX_WBITS)
        try:
            if inner := stream.decompress(data[found.start() :]):
                yield inner
        except zlib.error:
            continue
    if data.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(data)) as package:
            yield from map(package.read, package.namelist())


def places_with(needles: Collection[bytes], root: Path, allowed: Path) -> list[str]:
    """Return the places that have any of these: files, command lines, variables, and what Ray and the Controller keep.

    Of Ray's own processes the memory is searched: of the GCS, which has actors, jobs and their environments, of the
    raylets with the objects that they pass on, and of what serves and follows logs.

    Args:
        needles: what to look for. Each place is read once for all of them, since this takes long.
        root: the directory of the cluster's files: sessions, logs, the disk of its GCS, and those of its hosts.
        allowed: a directory that may have it.
    """
    system = 0
    files = [path for place in (root, MEMORY) for path in place.rglob("*") if allowed not in path.parents]
    found = [str(path) for path in files if _is_in_file(needles, path)]
    for process in psutil.process_iter():
        name, pid = "", process.pid
        for what in ("cmdline", "environ"):
            try:
                if _has(Path(f"/proc/{pid}/{what}").read_bytes(), needles):
                    found.append(f"{what} of process {pid}")
                name = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
        if str(root) in name and any(each in name for each in _SYSTEM):
            system += 1
            if is_in_memory(needles, pid):
                found.append(f"memory of {name[:200]!r}")
    assert system >= 3, "a GCS and raylets"
    kept = ClusterStore().items("")
    assert kept, "the Controller has records"
    found += [f"key {key}" for key, value in kept.items() if any(_has(data, needles) for data in unpacked(value))]
    return found


def _has(data: bytes, needles: Collection[bytes]) -> bool:
    return any(needle in data for needle in needles)


def is_in_memory(needles: Collection[bytes], pid: int) -> bool:
    """Return whether a process has any of these in memory of its own."""
    longest = max(map(len, needles))
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, _, _, inode, *_ = line.split()
            if "r" not in rights or "p" not in rights or inode != "0" or "[v" in line:
                continue
            before = b""
            for start, end in _touched(pid, *(int(part, 16) for part in span.split("-"))):
                for at in range(start, end, _CHUNK):
                    try:
                        data = os.pread(memory.fileno(), min(_CHUNK, end - at), at)
                    except OSError:  # not there any more
                        break
                    if _has(before + data, needles):
                        return True
                    before = data[-longest:]
    return False


def _touched(pid: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a mapping that the process has written or read: the rest, most of an arena, holds zeros.

    The bits are those of Linux's Documentation/admin-guide/mm/pagemap.rst: 63 is a page in memory, 62 one swapped out.
    """
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        entries = os.pread(pagemap.fileno(), (end - start) // _PAGE * 8, start // _PAGE * 8)
    pages = (at for at, (entry,) in enumerate(struct.iter_unpack("=Q", entries)) if entry >> 62)
    for _, run in groupby(enumerate(pages), lambda pair: pair[1] - pair[0]):
        at = [page for _, page in run]
        yield start + at[0] * _PAGE, start + (at[-1] + 1) * _PAGE


def _is_in_file(needles: Collection[bytes], path: Path) -> bool:
    try:
        if path.is_symlink() or not path.is_file():
            return False
        data = path.read_bytes()
    except OSError:  # it is gone
        return False
    packed = path.suffix in (".zip", ".gz") or data.startswith(b"PK")
    return any(_has(part, needles) for part in (unpacked(data) if packed else [data]))
