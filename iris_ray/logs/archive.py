"""Copies the log files of an attempt to a directory that outlives the host, as they grow.

The directory is a share or a mounted bucket, and may be slow or away: a thread of its own copies, and nothing waits for
it. Files keep their names, so that `AttemptLog` reads them in both places. A process may end before it has copied the
rest. So each attempt has a *mark* on its host until then, and the next TPUHostActor there copies what is left.
"""

import contextlib
import fcntl
import io
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from iris_ray.logs.files import AttemptLog

logger = logging.getLogger(__name__)

COPY_S = 15.0
"""The interval at which new output is copied."""
LAST_TRIES = 20
"""The number of tries to copy the rest at the end of an attempt, while the directory is away."""
CHUNK_BYTES = 1 << 20
MARK = ".uncopied"
"""The end of the name of a mark."""


class LogCopier:
    """Copies what one attempt of a task prints, until `close`.

    Args:
        log: the attempt's files on this host.
        archive: the directory. It must exist: if it is not mounted, the host's own disk must not fill up.
    """

    def __init__(self, log: AttemptLog, archive: Path) -> None:
        self._log = log
        self._archive = archive
        self._closing = threading.Event()
        self._problem: str | None = None
        self._mark = log.directory / f"task-{log.task_index}.attempt-{log.attempt}{MARK}"
        locked = self._locked_mark()
        try:
            threading.Thread(target=self._run, args=[locked], name="copying logs", daemon=True).start()
        except RuntimeError as error:  # no thread is left
            self._say(error)
            locked.close()

    def close(self) -> None:
        """Have the rest copied. Return at once."""
        self._closing.set()

    def _locked_mark(self) -> IO[str]:
        """Mark the attempt as not copied yet. Return the mark, which is locked until it is closed."""
        try:
            self._log.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark = self._mark.open("w")
        except OSError as error:  # a full disk; this process copies it all the same
            self._say(error)
            return io.StringIO()
        with contextlib.suppress(OSError):  # a network file system may have no locks
            fcntl.flock(mark, fcntl.LOCK_EX)
        return mark

    def _run(self, locked: IO[str]) -> None:
        with locked:
            while not self._closing.wait(COPY_S):
                self._copy()
            for _ in range(LAST_TRIES):
                if self._copy(is_last=True):
                    return
                time.sleep(COPY_S)

    def _copy(self, is_last: bool = False) -> bool:
        """Copy what is new; return whether that worked."""
        try:
            copy(self._log.all_files(), self._archive)
            if is_last:
                self._mark.unlink(missing_ok=True)
            self._problem = None
        except OSError as error:
            self._say(error)
        return self._problem is None

    def _say(self, error: Exception) -> None:
        if str(error) != self._problem:
            self._problem = str(error)
            logger.warning("output is not kept in %s for now: %s", self._archive, error)


def copy(files: Iterable[Path], archive: Path) -> None:
    """Append to the files in an archive what they lack of log files. It may be called again after any failure.

    Raises:
        OSError: the archive is away, or full.
    """
    if not archive.is_dir():
        raise FileNotFoundError(f"{archive} is not a directory; mount it on all hosts and on the head")
    for path in files:
        there = archive / path.parent.name
        there.mkdir(mode=0o700, exist_ok=True)
        try:
            source = path.open("rb")
        except FileNotFoundError:  # the oldest are deleted
            continue
        # When a write fails and has been done all the same, a buffer would do it again at its end.
        with source, (there / path.name).open("ab", buffering=0) as target:
            source.seek(target.tell())
            while data := source.read(CHUNK_BYTES):
                while data:
                    data = data[target.write(data) :]


def copy_left(root: Path, archive: Path) -> None:
    """Copy what processes that have ended have left on this host.

    Args:
        root: the host's directory of logs.
        archive: as for `LogCopier`.
    """
    for mark in root.glob(f"*/*{MARK}"):
        try:
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                copy(sorted(mark.parent.glob(f"{mark.stem}.*.*")), archive)
                mark.unlink()
        except (BlockingIOError, FileNotFoundError):  # the process that copies it lives, or has just done so
            pass
        except OSError as error:
            logger.warning("output in %s is not kept in %s for now: %s", mark.parent, archive, error)
