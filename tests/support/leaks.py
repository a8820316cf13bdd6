"""Looks for bytes in every place where a cluster of this machine may have left them."""

import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from iris_ray.actors.calls.ray_internals import ClusterStore

MEMORY = Path("/dev/shm")
_SYSTEM = ("gcs_server", "raylet", "dashboard", "agent", "log_monitor", "monitor.py")
_ZLIB = re.compile(rb"\x78[\x01\x5e\x9c\xda]|\x1f\x8b\x08")
_CHUNK = 16 << 20


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


def places_with(needle: bytes, root: Path, allowed: Path) -> list[str]:
    """Return the places that have these bytes: files, command lines, variables, and what Ray and the Controller keep.

    Of Ray's own processes the memory is searched: of the GCS, which has actors, jobs and their environments, of the
    raylets with the objects that they pass on, and of what serves and follows logs.

    Args:
        needle: what to look for.
        root: the directory of the cluster's files: sessions, logs, the disk of its GCS, and those of its hosts.
        allowed: a directory that may have it.
    """
    system = 0
    files = [path for place in (root, MEMORY) for path in place.rglob("*") if allowed not in path.parents]
    found = [str(path) for path in files if _is_in_file(needle, path)]
    for process in psutil.process_iter():
        name, pid = "", process.pid
        for what in ("cmdline", "environ"):
            try:
                if needle in Path(f"/proc/{pid}/{what}").read_bytes():
                    found.append(f"{what} of process {pid}")
                name = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
        if str(root) in name and any(each in name for each in _SYSTEM):
            system += 1
            if is_in_memory(needle, pid):
                found.append(f"memory of {name[:200]!r}")
    assert system >= 3, "a GCS and raylets"
    kept = ClusterStore().items("")
    assert kept, "the Controller has records"
    found += [f"key {key}" for key, value in kept.items() if any(needle in data for data in unpacked(value))]
    return found


def is_in_memory(needle: bytes, pid: int) -> bool:
    """Return whether a process has these bytes in memory of its own."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights, _, _, inode, *_ = line.split()
            if "r" not in rights or "p" not in rights or inode != "0" or "[v" in line:
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            before = b""
            for at in range(start, end, _CHUNK):
                try:
                    data = os.pread(memory.fileno(), min(_CHUNK, end - at), at)
                except OSError:  # not there any more
                    break
                if needle in before + data:
                    return True
                before = data[-len(needle) :]
    return False


def _is_in_file(needle: bytes, path: Path) -> bool:
    try:
        if path.is_symlink() or not path.is_file():
            return False
        data = path.read_bytes()
    except OSError:  # it is gone
        return False
    packed = path.suffix in (".zip", ".gz") or data.startswith(b"PK")
    return any(needle in part for part in (unpacked(data) if packed else [data]))
