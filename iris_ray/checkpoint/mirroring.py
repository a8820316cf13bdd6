"""Step directories that all hosts of equal place have, for checkpoint managers that look only at their own host."""

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from iris_ray.checkpoint.peer_files import PeerFiles, peers, room
from iris_ray.errors import InvalidRequestError, PeerFilesError
from iris_ray.model.job_info import JobInfo
from iris_ray.model.options import EACH_SLICE
from iris_ray.task.job_info import get_job_info

AT_ONCE = 16
"""The number of hosts that a task asks at a time, and of files that it fetches at a time."""
CHUNK_BYTES = 16 << 20
UNFINISHED = ".mirror"
"""The name of a step directory while it is fetched or removed. It isn't a step's name."""
_STEP = re.compile(r"(?:[A-Za-z][\w-]*_)?(\d+)")
MARK = ".mirrored "
MARKED_ATTEMPTS = 8


def mirror(directory: Path | str) -> int | None:
    """Bring all hosts of a gang to the same checkpoint step before Orbax opens it. Return the step, or None.

    For checkpoint managers that keep steps on each host, in ``directory``, such as Orbax's
    ``ReplicatorCheckpointManager``. That manager hangs if one host lacks a step that the others have, as a host that is
    new to the gang does. Call `mirror` in all tasks before the manager is made. It chooses the newest step that every
    host has or can copy, copies it to the hosts that lack it, and removes all other steps. A host copies from the host
    with the same number in another slice, so the program must be data-parallel over slices: hosts with the same number
    then hold the same data. If there is no such step, all steps are removed and None is returned: read the bucket.

    All tasks return the same step, provided that none of them saves before all have returned. Orbax's managers ensure
    that, since they begin with a barrier. If the gang went back to an older step, the later steps of a host that was
    away at the time are not used when that host returns.

    Args:
        directory: below ``get_job_info().local_dir``, and at the same path on all hosts. With several processes on each
            host, each has one of its own, named after its local index: ``f"{me.local_dir}/steps/{me.local_index}"``.
            A step directory has a name such as ``5`` or ``step_5``, and gets it only when it is whole, as Orbax's do.

    Raises:
        InvalidRequestError: called outside a task, in one without chips, or in a job whose failure domain is the slice;
            or the directory can't be used.
        PeerFilesError: a host of the gang can't be reached, or the step does not fit.
        OSError: this host can't read or write its files.

    Example::

        steps = Path(iris_ray.get_job_info().local_dir, "steps")
        iris_ray.checkpoint.mirror(steps)
        manager = ReplicatorCheckpointManager(steps, global_mesh=mesh)
    """
    me = get_job_info()
    if me is None or not me.local_dir:
        raise InvalidRequestError("this process has no local_dir to mirror: it is not a task of a job with chips")
    if me.failure_domain == EACH_SLICE:
        raise InvalidRequestError(
            f"the slices of this job start again one by one (failure_domain={EACH_SLICE!r}), and no other slice has"
            " this one's steps: save them to a bucket, or let iris_ray.outer carry the state"
        )
    own, folders = Path(directory), _folders(me, Path(directory))
    own.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(own / UNFINISHED, ignore_errors=True)
    hosts = peers()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        held = list(threads.map(HostSteps.of, hosts, folders))
        counting = steps_that_count(held)
        step = newest_at_all_places(me, counting)
        name = next((name for steps in counting for name in steps if _number(name) == step), None)
        keeps = name is not None and name in counting[me.task_index]
        for found in own.iterdir():
            if found.is_dir() and _STEP.fullmatch(found.name) and not (keeps and found.name == name):
                found.rename(own / UNFINISHED)  # at once, so that nothing half removed is taken for a step
                shutil.rmtree(own / UNFINISHED)
        if name is not None and not keeps:
            _fetch(threads, hosts, _donors(me, counting, name), f"{folders[me.task_index]}/{name}", own)
    _mark(own, ((me.attempt, -1 if step is None else step), *_history(me, held)))
    return step


Steps = Mapping[str, Mapping[str, int]]
"""Step directories by name: the sizes of their files, by path below them."""

Mark = tuple[tuple[int, int], ...]
"""The attempts that a directory has been through: an empty file in it, with the attempts in its name.

The latest attempt comes first, and each with the step with which it began, or -1. All steps in the directory are of the
latest, or the one with which that began. Of directories that have not been through a later attempt, steps newer than
that attempt's are of a timeline that was given up.
"""


@dataclass(frozen=True, slots=True)
class HostSteps:
    """The steps on one host.

    Attributes:
        mark: the directory's; () before the first attempt there has mirrored.
        steps: the step directories.
    """

    mark: Mark
    steps: Steps

    @staticmethod
    def of(host: PeerFiles, folder: str) -> "HostSteps":
        """Return the steps in a folder of a host."""
        marks, steps = list[Mark](), defaultdict[str, dict[str, int]](dict)
        for path, size in host.list(folder).items():
            name, _, below = path.removeprefix(folder + "/").partition("/")
            if below and _STEP.fullmatch(name):
                steps[name][below] = size
            elif name.startswith(MARK):
                pairs = (pair.split(":") for pair in name.removeprefix(MARK).split(" "))
                marks.append(tuple((int(attempt), int(step)) for attempt, step in pairs))
        return HostSteps(max(marks, default=()), steps)


def steps_that_count(held: Sequence[HostSteps]) -> list[Steps]:
    """Return the step directories on each host, without those of a timeline that was given up.

    If a host has missed attempts, only steps with which all of these may have begun count. If it has been through an
    attempt that the others don't know, or has missed too many, none of its steps counts.
    """
    latest = max((host.mark for host in held), default=())
    newest, limit = dict[int, float](), math.inf
    for attempt, step in (*latest, (0, -1)):  # 0: before the first attempt that mirrors
        newest[attempt], limit = limit, min(limit, step)
    return [
        {name: files for name, files in host.steps.items() if _number(name) <= newest.get(_attempt(host.mark), -1)}
        for host in held
    ]


def _attempt(mark: Mark) -> int:
    return mark[0][0] if mark else 0


def newest_at_all_places(me: JobInfo, counting: Sequence[Steps]) -> int | None:
    """Return the newest step that some host of every place has; None if there is none.

    Args:
        me: any task of the gang.
        counting: the step directories on each host, by task index.
    """
    at_place = defaultdict[int, set[int]](set)
    for index, steps in enumerate(counting):
        at_place[_place(me, index)] |= set(map(_number, steps))
    everywhere = set[int].intersection(*at_place.values()) if at_place else set[int]()
    return max(everywhere, default=None)


def _history(me: JobInfo, held: Sequence[HostSteps]) -> Mark:
    """Return the earlier attempts that have mirrored. Faster tasks may have marked this attempt already."""
    latest = max((host.mark for host in held), default=())
    return tuple(pair for pair in latest if pair[0] != me.attempt)[: MARKED_ATTEMPTS - 1]


def _mark(own: Path, mark: Mark) -> None:
    name = MARK + " ".join(f"{attempt}:{step}" for attempt, step in mark)
    (own / name).touch()
    for found in own.iterdir():
        if found.name != name and found.name.startswith(MARK):
            found.unlink()


def _folders(me: JobInfo, own: Path) -> list[str]:
    """Return where each task of the gang has its steps, relative to its ``local_dir``."""
    if not own.is_relative_to(me.local_dir) or ".." in own.parts or own == Path(me.local_dir):
        raise InvalidRequestError(f"{own} is not below {me.local_dir}, where other hosts could see it")
    folder = own.relative_to(me.local_dir)
    if me.processes_per_host == 1:
        return [str(folder)] * me.num_tasks
    if folder.name != str(me.local_index):
        raise InvalidRequestError(
            f"{own} would be that of {me.processes_per_host} processes; give each its own, named after its local index:"
            f' f"{{me.local_dir}}/{folder}/{{me.local_index}}"'
        )
    return [str(folder.with_name(str(index % me.processes_per_host))) for index in range(me.num_tasks)]


def _place(me: JobInfo, index: int) -> int:
    """Return the number of a task within its slice."""
    return index % (me.num_tasks // me.num_slices)


def _number(name: str) -> int:
    match = _STEP.fullmatch(name)
    assert match is not None
    return int(match[1])


# -- fetching ----------------------------------------------------------------------------------------------------------


def _donors(me: JobInfo, counting: Sequence[Steps], name: str) -> list[tuple[int, Mapping[str, int]]]:
    """Return the tasks of equal place that have a step, and its files there; the one in the next slice first."""
    place = _place(me, me.task_index)
    found = [index for index, steps in enumerate(counting) if _place(me, index) == place and name in steps]
    found.sort(key=lambda index: (index - me.task_index) % len(counting))
    return [(index, counting[index][name]) for index in found]


def _fetch(
    threads: ThreadPoolExecutor,
    hosts: Sequence[PeerFiles],
    donors: Sequence[tuple[int, Mapping[str, int]]],
    source: str,
    own: Path,
) -> None:
    """Fetch a step directory from the first of these hosts that can give it, whole or not at all."""
    errors: list[BaseException] = []
    for index, sizes in donors:
        if (needed := sum(sizes.values())) > (left := room()):
            raise PeerFilesError(
                f"{source} has {needed} bytes, and {max(0, left)} may be added to local_dir on this host, so that a"
                " tenth of the memory, or disk, stays free; keep fewer steps, or save only to the bucket"
            )
        fetches = [
            threads.submit(_fetch_file, hosts[index], f"{source}/{path}", own / UNFINISHED / path, size)
            for path, size in sizes.items()
        ]
        if not (failed := [error for fetch in fetches if (error := fetch.exception()) is not None]):
            (own / UNFINISHED).rename(own / Path(source).name)
            return
        errors += failed
        shutil.rmtree(own / UNFINISHED)
    raise errors[0]


def _fetch_file(host: PeerFiles, source: str, target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, size)))
    with open(target, "wb") as file:
        for start in range(0, size, CHUNK_BYTES):
            chunk = buffer[: size - start]
            host.read(source, chunk, start)
            file.write(chunk)
