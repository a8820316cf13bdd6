"""The processes of a JAX program that keep their state together: their hosts' files, and how they agree."""

import atexit
import contextlib
import fcntl
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import jax

from iris_ray.actors.protocol.task_files import LocalRun
from iris_ray.checkpoint.parts import PartName
from iris_ray.checkpoint.peer_files import peers
from iris_ray.checkpoint.search import Files
from iris_ray.checkpoint.store import DirectoryFiles
from iris_ray.errors import InvalidRequestError
from iris_ray.model.job_info import JobInfo
from iris_ray.task.job_info import get_job_info

logger = logging.getLogger(__name__)

AGREE_S = 600.0
"""How long a process waits for the others. JAX ends it before, within 100 s by default, if one of them is dead."""
BARRIERS = 64
"""The number of names that a talk has for each kind of its barriers, in turn: JAX's service keeps names for ever."""
_numbers = itertools.count()
_attempts: dict[tuple[Path, str], int] = {}
"""The attempt that this process is in a directory, for each name of a state."""


@dataclass(frozen=True, slots=True)
class JaxGang:
    """The processes that keep a state together, as one of them sees them.

    Attributes:
        index, count: the number of this process, and the number of all; as JAX counts.
        attempt: of the processes. Their steps are newer than those of earlier attempts.
        hosts: the files of each host.
        host_of: the number of the host of each process.
        own: the files of this process's host.
        folder: the directory of the steps on each host.
        domains: for each process the number of its failure domain: its slice, or in one slice its host.
        sliced: whether the processes are on several slices.
        talk: their way to agree.
    """

    index: int
    count: int
    attempt: int
    hosts: Sequence[Files]
    host_of: Sequence[int]
    own: DirectoryFiles
    folder: str
    domains: Sequence[int]
    sliced: bool
    talk: "Talk"

    @property
    def near(self) -> list[int]:
        """The numbers of the hosts: this one, then those of equal place in the other slices, then the others."""
        mine = self.host_of[self.index]
        a_slice = max(1, len(self.hosts) // len(set(self.domains))) if self.sliced else 1
        following = [(mine + distance) % len(self.hosts) for distance in range(len(self.hosts))]
        return sorted(following, key=lambda host: (host != mine, (host - mine) % a_slice))


class Talk:
    """How the processes of a JAX program agree, through JAX's coordination service. One process only asks itself.

    Args:
        client: of the service; None for a single process.
        index: the number of this process.
        name: of the talk, which no other of the program has.
    """

    def __init__(self, client: Any, index: int, name: str) -> None:
        self._client = client
        self._index = index
        self._prefix = f"iris_ray/checkpoint/{name}"
        self._turns = itertools.count()
        self._said: list[str] = []  # the keys that this process has set, until all have read them

    def decide(self, key: str, decision: Callable[[], str]) -> str:
        """Return the decision of process 0. All processes call it with one new key."""
        if self._client is None:
            return decision()
        path = f"{self._prefix}/{key}"
        if self._index:
            answer: list[str] = json.loads(self._client.blocking_key_value_get(path, int(AGREE_S * 1000)))
        else:
            try:
                answer = ["decided", decision()]
            except Exception as error:
                self._say(path, json.dumps(["failed", str(error)]))
                raise
            self._say(path, json.dumps(answer))
        if answer[0] == "failed":
            raise RuntimeError(f"process 0 failed to choose a step for all processes: {answer[1]}")
        return answer[1]

    def agree(self, key: str, failure: str | None = None) -> list[str]:
        """Wait until all processes have called this with one new key, ``<kind>/…``. Return the failures of all."""
        if self._client is None:
            return [] if failure is None else [failure]
        path, read = f"{self._prefix}/{key}", self._said
        self._said = []
        if failure is not None:
            self._say(f"{path}/{self._index}", failure)
        barrier = f"{self._prefix}/{key.partition('/')[0]}/{next(self._turns) % BARRIERS}"
        self._client.wait_at_barrier(barrier, int(AGREE_S * 1000))
        failures = [text for _, text in sorted(self._client.key_value_dir_get(path))]
        for each in read:  # a process that has come to this barrier has read them
            with contextlib.suppress(Exception):  # it costs memory only; a broken service fails at the next barrier
                self._client.key_value_delete(each)
        return failures

    def _say(self, path: str, text: str) -> None:
        self._client.key_value_set(path, text)
        self._said.append(path)


def this_gang(name: str, directory: Path | None) -> JaxGang:
    """Return this process's gang, or this process alone. Call it once JAX's processes have joined.

    Args:
        name: of the state.
        directory: one that all processes share, in place of each host's own.

    Raises:
        InvalidRequestError: other processes can't read the files of this one.
    """
    me = get_job_info()
    index, count = jax.process_index(), jax.process_count()
    talk = Talk(_client() if count > 1 else None, index, f"{name}/{next(_numbers)}")
    if directory is None and me is not None and me.local_dir:
        return _on_hosts(me, name, index, count, talk)
    if directory is None:
        if count > 1:
            raise InvalidRequestError(
                f"this is one of {count} processes of JAX, and their hosts have no local_dir: that is for tasks with"
                " chips that iris_ray has started; give directory=, one in memory that all of them share"
            )
        directory = _for_this_process()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    own, folder = DirectoryFiles(directory), f"memory/{name}"

    def next_attempt() -> str:
        found = (PartName.of(path.rpartition("/")[2]) for path in own.list(folder))
        return str(max((part.attempt for part in found if part is not None), default=0) + 1)

    if (directory, name) not in _attempts:
        _attempts[directory, name] = int(talk.decide("attempt", next_attempt))
    attempt = _attempts[directory, name]
    return JaxGang(index, count, attempt, [own], [0] * count, own, folder, [0] * count, False, talk)


def _on_hosts(me: JobInfo, name: str, index: int, count: int, talk: Talk) -> JaxGang:
    a_slice = me.num_tasks // me.num_slices
    if count == me.num_tasks:
        tasks, folder = range(count), name
    elif count == a_slice:
        tasks = range(me.slice_id * a_slice, (me.slice_id + 1) * a_slice)
        folder = f"{name}-of-slice-{me.slice_id}"
    else:
        tasks, folder = range(me.task_index, me.task_index + 1), f"{name}-of-task-{me.task_index}"
    if count != len(tasks) or tasks[index] != me.task_index:
        raise InvalidRequestError(
            f"this process is number {index} of {count} in JAX, and task {me.task_index} of {me.num_tasks} in iris_ray;"
            " join all tasks of the gang, or of each slice, in their order, as iris_ray.jax.initialize() does"
        )
    own = DirectoryFiles(Path(me.local_dir))
    first = tasks[0] // me.processes_per_host
    host_of = [task // me.processes_per_host - first for task in tasks]
    hosts: list[Files] = [own] * (host_of[-1] + 1)
    if len(hosts) > 1:
        files = _peers(me)
        if not files:
            raise InvalidRequestError(
                "the hosts of this gang do not serve their files, so that no process could read what another has kept;"
                " give directory=, one that all of them share"
            )
        first_of_gang = me.task_index - me.gang_rank
        for task, host in zip(tasks, host_of, strict=True):
            hosts[host] = own if host == host_of[index] else files[task - first_of_gang]
    slices = [task // a_slice for task in tasks]
    sliced = len(set(slices)) > 1
    domains = slices if sliced else host_of
    return JaxGang(index, count, me.attempt, hosts, host_of, own, f"memory/{folder}", domains, sliced, talk)


def _peers(me: JobInfo) -> Sequence[Files]:
    run = LocalRun.of_this_task()
    if run is not None:
        first = me.task_index - me.gang_rank
        return [DirectoryFiles(run.local_dir(task)) for task in range(first, first + me.gang_size)]
    return peers()


def _for_this_process() -> Path:
    """Return a directory that is removed with this process."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else Path(tempfile.gettempdir())
    prefix = f"iris_ray-steps-{os.getuid()}-"
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # the process that uses it has locked it; or it is another user's
            os.close(_locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB))
            rmtree(left)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    _locked(made, fcntl.LOCK_SH)  # until this process ends, however it ends
    atexit.register(rmtree, made, ignore_errors=True)
    logger.warning("This process is not a task of a job: its steps end with it, unless you give directory=")
    return made


def _locked(directory: Path, kind: int) -> int:
    """Lock a directory. Return the file descriptor that holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _client() -> Any:
    """Return the client of JAX's coordination service, which has no public name (JAX 0.10 to 0.12)."""
    from jax._src import distributed

    if distributed.global_state.client is None:
        raise InvalidRequestError("JAX's processes are not joined; call iris_ray.jax.initialize() first")
    return distributed.global_state.client
