"""The directories on a host: iris_ray's own, the names of a job's directories, and a job's local directory."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from iris_ray.actors.host.announced_end import in_rays_directory
from iris_ray.actors.protocol.task_files import MEMORY, JobDirectory, remove_file
from iris_ray.settings import HOST_DIR

# -- host directory ----------------------------------------------------------------------------------------------------


def host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the host's directory: ``$IRIS_RAY_HOST_DIR``, or one per user in Ray's own directory. Create it if needed.

    Ray gives all processes of a node the same directory, ``/tmp/ray`` by default, whatever ``TMPDIR`` a job sets, and
    mounts it in containers that it starts.

    Raises:
        OSError: another user owns the directory or may write to it, or it can't be created.
    """
    configured = HOST_DIR.read(environ)
    path = configured or in_rays_directory(_rays_directory(), os.getuid())
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat() if configured else path.lstat()  # an operator's path may be a link; a path in /tmp must not
    if reason := _why_unsafe(found):
        raise PermissionError(
            f"{path} {reason}; remove it, or set {HOST_DIR.name} to a directory of yours before `ray start`"
        )
    return path


def _rays_directory() -> str:
    from iris_ray.actors.calls.ray_internals import temp_dir  # it imports Ray, and the reaper starts without

    return temp_dir()


def can_not_start(error: OSError) -> str:
    """Return the words that say that this error keeps tasks from starting on a host."""
    return f"no task can start there: {error}"


def _why_unsafe(found: os.stat_result) -> str | None:
    """Return why another user might change files in a directory; None if no other user can."""
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.getuid():
        return "belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by other users"
    return None


NAME_CHARS = 200
"""The number of characters of a job's id in a directory's name at most. File systems allow 255 bytes."""


def directory_name(job_id: str) -> str:
    """Return the name of a job's directories: safe, short and unique, though ids may have "/" or hundreds of bytes."""
    raw = job_id.encode(errors="surrogatepass")
    name = quote(raw, safe="")
    if len(name) > NAME_CHARS:  # two long ids may only differ at their end
        name = name[:NAME_CHARS] + "-" + hashlib.sha256(raw).hexdigest()[:16]
    return name if name.strip(".") else name.replace(".", "%2E")


# -- local directories -------------------------------------------------------------------------------------------------

LEAST_MEMORY_BYTES = 1 << 30
"""A file system in memory is not used if it has less free space, or is more than half full."""
REMOVAL_TRIES = 3
"""The file service may be writing into a directory that is being removed."""


class LocalDirectories:
    """A directory per job on one host, for caches and checkpoints that only this host needs.

    It outlives the job's attempts on the host. It is removed when the job ends, when another job takes the host, or
    some minutes after the last process of iris_ray there, since no process is left that would hear of the job's end.

    Args:
        directory: iris_ray's directory on the host, used if there is no room in memory.
        memory: a file system in memory; None to use none.
    """

    def __init__(self, directory: Path, memory: Path | None) -> None:
        key = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
        self._on_disk = directory / "jobs"
        self._memory = memory
        self._kept: int | None = None  # the file descriptor that holds the lock
        self._in_memory = None if memory is None else memory / f"iris_ray-{os.getuid()}-{key}"

    @staticmethod
    def of_host(directory: Path, environ: Mapping[str, str] = os.environ) -> "LocalDirectories":
        """Return this host's directories. If an operator has chosen the host's directory, use no memory."""
        return LocalDirectories(directory, None if HOST_DIR.read(environ) else MEMORY)

    def take(self, job_id: str, token: str = "") -> Path:
        """Return the ``local_dir`` of a job that has the host to itself, and lock it as long as this process lives.

        Create it if needed, and remove those of other jobs.

        Args:
            job_id: the job.
            token: the token that the file service requires for the job's files; "": it does not serve them.

        Raises:
            OSError: it can't be created.
        """
        self.remove(but=job_id)
        name = directory_name(job_id)
        while True:
            path = next((own for own in self._all() if own.name == name), None) or self._create(name)
            try:
                self._kept = _lock(path, fcntl.LOCK_SH)
            except FileNotFoundError:  # another process has removed it meanwhile
                continue
            job = JobDirectory(path)
            job.files.mkdir(mode=0o700, exist_ok=True)
            if token:
                job.write_token(token)
            os.utime(path)
            return job.files

    def remove(
        self, job_id: str | None = None, but: str | None = None, not_taken_since: Mapping[Path, int] | None = None
    ) -> None:
        """Remove the directories that can be removed. A directory that a living task uses stays.

        Args:
            job_id: remove only this job's.
            but: keep this job's.
            not_taken_since: remove only these, and only if no task has taken them since `left` returned them.
        """
        only, spared = (each and directory_name(each) for each in (job_id, but))
        for path in self._all():
            if path.name != spared and only in (None, path.name):
                with contextlib.suppress(OSError):
                    if not_taken_since is None or not_taken_since.get(path) == path.stat().st_mtime_ns:
                        _remove(path, _remove_all)

    def left(self) -> dict[Path, int]:
        """Return the directories with files, and when each was changed last, in ns. Remove those without."""
        for path in self._all():
            with contextlib.suppress(OSError):
                _remove(path, _remove_if_empty)
        found = {}
        for path in self._all():
            with contextlib.suppress(OSError):
                found[path] = path.stat().st_mtime_ns
        return found

    def jobs(self) -> list[JobDirectory]:
        """Return the directories of all jobs."""
        return [JobDirectory(path) for path in self._all()]

    def _all(self) -> Iterator[Path]:
        for root in (self._in_memory, self._on_disk):
            if root is not None and _is_ours(root):
                yield from list(root.iterdir())

    def _create(self, name: str) -> Path:
        if self._in_memory is not None and self._has_room():
            with contextlib.suppress(OSError):
                return _create(self._in_memory, name)
        return _create(self._on_disk, name)

    def _has_room(self) -> bool:
        assert self._memory is not None
        try:
            disk = os.statvfs(self._memory)
        except OSError:
            return False
        free = disk.f_bavail * disk.f_frsize
        return free >= LEAST_MEMORY_BYTES and 2 * disk.f_bavail >= disk.f_blocks


def _is_ours(root: Path) -> bool:
    """Return whether this is a directory, and no link, into which no other user can write."""
    try:
        found = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _create(root: Path, name: str) -> Path:
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    if not _is_ours(root):
        raise PermissionError(f"{root} is not a directory that this user alone can change; remove it")
    path = root / name
    path.mkdir(mode=0o700, exist_ok=True)  # another process of the job may create it at the same moment
    return path


def _lock(path: Path, kind: int) -> int:
    """Lock a directory. Return the file descriptor that holds the lock.

    Raises:
        FileNotFoundError: it does not exist, or was removed before we got the lock.
        BlockingIOError: another process holds the lock, and ``kind`` does not wait.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, kind)
        if os.stat(path, follow_symlinks=False).st_ino != os.fstat(fd).st_ino:
            raise FileNotFoundError(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove(path: Path, by: Callable[[Path], object]) -> None:
    """Remove a directory by that function. Raise `OSError` if a process has locked it."""
    fd = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        by(path)
    finally:
        os.close(fd)


def _remove_if_empty(path: Path) -> None:
    """Remove a job's directory if its tasks have left no files. Raise `OSError` if they have."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(JobDirectory(path).files)
    _remove_all(path)


def _remove_all(path: Path) -> None:
    """Remove a directory with its content, even if its job has made it read-only. Keep what can't be removed."""
    remove_file(JobDirectory(path).token)  # so that the file service takes no more files for it
    for _ in range(REMOVAL_TRIES):
        try:
            return shutil.rmtree(path)
        except PermissionError:
            _make_writable(path)
        except OSError:
            pass
        except RecursionError:
            break
    subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)  # takes trees of any depth


def _make_writable(path: Path) -> None:
    path.chmod(0o700)
    with contextlib.suppress(RecursionError):
        for parent, directories, _ in os.walk(path):
            for each in (os.path.join(parent, name) for name in directories):
                if not os.path.islink(each):
                    with contextlib.suppress(OSError):  # another user's, such as a container's program
                        os.chmod(each, 0o700)
