"""The cluster's store of secrets: a private directory on the head with a file for each. It blocks, and knows no Ray.

A file is written whole or not at all, so two operators at once, and a full disk, leave one value or the other. The
store is nothing but the directory: a Controller that starts anew finds what was there.
"""

import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from iris_ray.errors import InvalidRequestError, SecretNotFoundError, SecretStoreError
from iris_ray.model.checks import unknown
from iris_ray.model.secret import is_secret_name, require_secret_name
from iris_ray.secrets.core import MOST_BYTES, StoredSecret, of_file, require_audience, text_of, to_file

DIRECTORY = "secrets"
MOST_SECRETS = 1000
"""The limit for secrets in the store."""
MOST_FILE_BYTES = MOST_BYTES + (256 << 10)
"""The limit for a file: a value in UTF-8, and the line before it."""
UNFINISHED_S = 60.0
"""The age in seconds from which an unfinished file counts as left by a process that is gone."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class SecretStore:
    """The secrets of one cluster.

    Args:
        parent: returns the directory for the store's own directory; None: there is no place for one.
        clock: returns seconds since the epoch.
    """

    def __init__(self, parent: Callable[[], Path | None], clock: Callable[[], float] = time.time) -> None:
        self._parent = parent
        self._clock = clock
        self._lock = threading.Lock()

    def listed(self) -> list[StoredSecret]:
        """Return all secrets by name, with the reason if one can't be read; see `SecretCalls.list_secrets`."""
        found = []
        for name in self._names():
            try:
                found.append(self._read(name)[0])
            except SecretStoreError as error:
                found.append(StoredSecret(name, "", 0.0, problem=str(error)))
            except SecretNotFoundError:  # removed a moment ago
                continue
        return found

    def put(
        self, name: str, value: bytes, users: tuple[str, ...], teams: tuple[str, ...], user: str
    ) -> tuple[StoredSecret, StoredSecret | None]:
        """Set a secret; see `SecretCalls.set_secret`."""
        require_secret_name(name)
        text_of(value)
        require_audience(users, teams)
        with self._lock, self._failing(f"the secret {name} was not set"):
            directory = self._directory(make=True)
            try:
                before = self._read(name)[0]
            except SecretNotFoundError:
                before = None
            except SecretStoreError as error:
                before = StoredSecret(name, "", 0.0, problem=str(error))
            if before is None and len(self._names()) >= MOST_SECRETS:
                raise SecretStoreError(
                    f"the secret {name} was not set: the store has {MOST_SECRETS:,} secrets, and takes no more; remove"
                    " some: iris-ray cluster secrets rm NAME"
                )
            revision = 1 if before is None or before.problem else before.revision + 1
            secret = StoredSecret(name, user, self._clock(), revision, users, teams)
            if len(content := to_file(secret, value)) > MOST_FILE_BYTES:
                raise InvalidRequestError("the names of the users and teams are too long together; give a team instead")
            _remove_unfinished(directory)
            _write_whole(directory, name, content)
        return secret, before

    def remove(self, name: str) -> None:
        """Remove a secret, even one that can't be read; see `SecretCalls.remove_secret`."""
        require_secret_name(name)
        with self._lock, self._failing(f"the secret {name} was not removed"):
            try:
                (self._directory() / name).unlink()
            except FileNotFoundError:
                raise self._unknown(name) from None
            _sync(self._directory())

    def value(self, name: str, user: str, team: str) -> bytes:
        """Return the value of a secret for a job of that user and team.

        Raises:
            InvalidRequestError, SecretNotFoundError: there is no such secret.
            NotPermittedError: it is for others.
            SecretStoreError: it can't be read.
        """
        require_secret_name(name)
        secret, value = self._read(name)
        secret.require_for(user, team)
        return value

    def value_for_operators(self, name: str) -> bytes:
        """Return the value of a secret that a cluster setting names, whichever jobs may use it. Raise like `value`."""
        require_secret_name(name)
        return self._read(name)[1]

    # -- files -----------------------------------------------------------------------------------------------------

    def _directory(self, make: bool = False) -> Path:
        """Return the store's directory, which may be missing unless it is to be made.

        Raises:
            OSError: it can't be made.
            SecretStoreError: there is no place for it, or it is not safe.
        """
        parent = self._parent()
        if parent is None:
            raise SecretStoreError("this cluster's head has no directory for iris_ray, so there is no store of secrets")
        path = parent / DIRECTORY
        if make:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            _require_private(path, path.lstat(), stat.S_ISDIR, "directory", 0o700)
        return path

    def _names(self) -> list[str]:
        with self._failing("the store of secrets can't be read"):
            try:
                return sorted(filter(is_secret_name, os.listdir(self._directory())))
            except FileNotFoundError:
                return []

    def _read(self, name: str) -> tuple[StoredSecret, bytes]:
        with self._failing(f"the secret {name} can't be read"):
            path = self._directory() / name
            try:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise self._unknown(name) from None
            try:
                _require_private(path, os.fstat(file), stat.S_ISREG, "file", 0o600)
                with open(file, "rb", closefd=False) as opened:
                    data = opened.read(MOST_FILE_BYTES + 1)
            finally:
                os.close(file)
            try:
                return of_file(name, data)
            except ValueError as why:
                raise SecretStoreError(
                    f"the secret {name} can't be read: {why}; set it again: iris-ray cluster secrets set {name}"
                ) from None

    def _unknown(self, name: str) -> SecretNotFoundError:
        problem = unknown("secret", name, self._names())
        return SecretNotFoundError(
            f"{problem}. An operator sets it in the cluster's store: iris-ray cluster secrets set {name}"
        )

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Raise SecretStoreError for an error of the disk; ``what`` names the action that failed."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = "make room on the head's disk, and try again"
            else:
                advice = "see to it on the cluster's head, and try again"
            where = f" ({error.filename})" if isinstance(error.filename, (str, Path)) else ""
            raise SecretStoreError(f"{what}: {error.strerror or error}{where}; {advice}") from None


def _require_private(path: Path, found: os.stat_result, is_kind: Callable[[int], bool], kind: str, mode: int) -> None:
    """Refuse a file or directory that others could read or change."""
    if not is_kind(found.st_mode):
        why, advice = f"is not a {kind}", "move it away"
    elif found.st_uid != os.geteuid():
        why, advice = "belongs to another account", "have it belong to the account that runs Ray, or move it away"
    elif found.st_mode & OTHERS:
        why = f"is open to other accounts (mode {stat.S_IMODE(found.st_mode):04o})"
        advice = f"run chmod {mode:o} {path}; if somebody else may have read it, also set new secrets"
    else:
        return
    raise SecretStoreError(f"the store of secrets is not used: {path} on the head {why}; {advice}")


def _write_whole(directory: Path, name: str, data: bytes) -> None:
    """Replace a private file as a whole, or leave the old one."""
    unfinished = directory / f".{secrets.token_hex(8)}"
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(file)
        unfinished.rename(directory / name)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    _sync(directory)


def _remove_unfinished(directory: Path) -> None:
    """Remove unfinished files of processes that were killed."""
    for path in directory.glob(".*"):
        with suppress(OSError):
            if path.lstat().st_mtime < time.time() - UNFINISHED_S:
                path.unlink()


def _sync(directory: Path) -> None:
    """Have the disk keep a change of a directory's names through a power failure."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
