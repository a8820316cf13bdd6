"""Copies the log files of an attempt to a directory that outlives the host, as they grow.

The directory is a share or a mounted bucket, and may be slow or away: a thread of its own copies, and nothing waits for
it. Files keep their names, so that `AttemptLog` reads them in both places.
"""

import logging
import threading
import time
from pathlib import Path

from iris_ray.logs.files import AttemptLog

logger = logging.getLogger(__name__)

COPY_S = 15.0
"""The interval at which new output is copied."""
LAST_TRIES = 20
"""The number of tries to copy the rest at the end of an attempt, while the directory is away."""
CHUNK_BYTES = 1 << 20


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
        threading.Thread(target=self._run, name="copying logs", daemon=True).start()

    def close(self) -> None:
        """Have the rest copied. Return at once."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(COPY_S):
            self._copy()
        for _ in range(LAST_TRIES):
            if self._copy():
                return
            time.sleep(COPY_S)

    def _copy(self) -> bool:
        """Copy what is new; return whether that worked."""
        try:
            copy(self._log, self._archive)
            self._problem = None
        except OSError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("output is not kept in %s for now: %s", self._archive, error)
        return self._problem is None


def copy(log: AttemptLog, archive: Path) -> None:
    """Append to the files in an archive what they lack.

    Raises:
        OSError: the archive is away, or full.
    """
    if not archive.is_dir():
        raise FileNotFoundError(f"{archive} is not a directory; mount it on all hosts and on the head")
    there = AttemptLog(archive, log.job_id, log.task_index, log.attempt)
    there.directory.mkdir(mode=0o700, exist_ok=True)
    for offset, path in log.files():
        try:
            source = path.open("rb")
        except FileNotFoundError:  # the oldest are deleted
            continue
        with source, there.file(offset).open("ab") as target:
            source.seek(target.tell())
            while data := source.read(CHUNK_BYTES):
                target.write(data)
