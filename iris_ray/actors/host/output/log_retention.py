"""How long and how much of what tasks have printed is kept on a host."""

import contextlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

HOST_BYTES = 2 << 30
HOST_FILES = 20_000
KEPT_S = 14 * 24 * 3600.0
"""How much space and how many files all logs of a host may take, and for how many seconds a log is kept."""


def prune(
    root: Path, now: float, most_bytes: int = HOST_BYTES, kept_s: float = KEPT_S, most_files: int = HOST_FILES
) -> None:
    """Delete logs that are too old, then the oldest until the limits are met. The newest file always stays.

    Args:
        root: the host's directory of logs.
        now: seconds since the epoch.
        most_bytes, most_files: the limits for all logs together.
        kept_s: seconds after its last line after which a log is too old.
    """
    files = sorted(_logs(root))
    total, count = sum(size for _, size, _ in files), len(files)
    for written_at, size, path in files[:-1]:
        if total > most_bytes or count > most_files or written_at < now - kept_s:
            with contextlib.suppress(OSError):
                path.unlink()
                total, count = total - size, count - 1
    for directory in _within(root):
        with contextlib.suppress(OSError):
            directory.rmdir()  # refused unless it is empty


def _logs(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when each log file was last written, in seconds since the epoch, its size in bytes, and its path."""
    for path in chain.from_iterable(map(_within, _within(root))):
        with contextlib.suppress(OSError):
            stat = path.stat()
            yield stat.st_mtime, stat.st_size, path


def _within(directory: Path) -> list[Path]:
    """Return what a directory holds; nothing if it is none, or if a concurrent `prune` has just removed it."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []
