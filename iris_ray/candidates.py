"""What each group of workers is to one requirement: free, in use, or no use. Shared by all jobs that ask the same."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from iris_ray.constraints import AttributeValue, Constraint
from iris_ray.groups import Group, Grouping
from iris_ray.requirement import Requirement
from iris_ray.workers import TPU, TPU_VM_COUNT, Worker, job_of

LARGER = 0
"""The bucket of slices of which a gang would take a part; the others are known by the hosts that it takes of each."""

Rank = tuple[int, float, int, int, str]
"""Preferences that are not met, chips that would lie idle, whether somebody keeps it, hosts left over, name."""


class Status(Enum):
    FREE = "free"
    BUSY = "busy"  # it would do if nobody used it
    UNFIT = "unfit"


@dataclass(slots=True)
class Fit:
    """What one group is to a requirement.

    Attributes:
        status: whether it will do, now or later.
        bucket: hosts that the gang takes of it, if it is a whole slice or no slice at all, else `LARGER`.
        rank: the smaller the better; only if it is free.
        usable: the workers that will do; None: all of them.
        short: how many hosts are missing to make it free.
        lack: how much is missing on them, 1 for each that lacks all that it must give.
        ending: whether all that stands in the way is over and about to be confirmed.
        obstacle: what stands in the way, in words.
        users: the jobs that do.
        removed: how many workers each constraint (by position) or taint (by name) leaves out.
        unevaluable: why a constraint can't be evaluated, or None.
        recheck_at: when time alone will change it; seconds on the caller's clock.
    """

    status: Status
    bucket: int
    rank: Rank | None = None
    usable: tuple[Worker, ...] | None = None
    short: int = 0
    lack: float = 0.0
    ending: bool = False
    obstacle: str = ""
    users: tuple[str, ...] = ()
    removed: tuple[tuple[int | str, int], ...] = ()
    unevaluable: str | None = None
    recheck_at: float | None = None


class Candidates:
    """All groups, seen with the eyes of one requirement.

    Attributes:
        fits: by group name.
        free: bucket → ranks of its free groups, best first.
        sound: bucket → how many groups are free or in use.
        soon: bucket → how many groups are about to be free.
        near: (hosts short, lack, name) of groups that are not free, the nearest first.
        removed: how many workers each constraint or taint leaves out.
        unevaluable: groups on which a constraint can't be evaluated.
        seen: the version of the fleet that this is up to date with.
    """

    def __init__(self, requirement: Requirement, grouping: Grouping, holders: Mapping[str, str]) -> None:
        self.requirement = requirement
        self.grouping = grouping
        self.seen = 0
        self.fits: dict[str, Fit] = {}
        self.free: defaultdict[int, list[Rank]] = defaultdict(list)
        self.sound: Counter[int] = Counter()
        self.soon: Counter[int] = Counter()
        self.near: list[tuple[int, float, str]] = []
        self.removed: Counter[int | str] = Counter()
        self.unevaluable: set[str] = set()
        self._holders = holders
        self._recheck: list[tuple[float, str]] = []

    def look_at_all(self, now: float) -> None:
        need = self.requirement
        for group in self.grouping.groups():
            fit = self.fits[group.name] = judge(group, need, self._is_held(group), now)
            self._count(group.name, fit, list.append)
        self.near.sort()
        for ranks in self.free.values():
            ranks.sort()

    def look_again(self, changed: Iterable[Worker], now: float) -> None:
        """Catch up with what changed, and with what time has changed."""
        names = dict.fromkeys(map(self.grouping.name_of, changed))
        while self._recheck and self._recheck[0][0] <= now:
            names[heapq.heappop(self._recheck)[1]] = None
        for name in names:
            if name is not None:
                self._look_at(name, now)

    def _look_at(self, name: str, now: float) -> None:
        before = self.fits.pop(name, None)
        if before is not None:
            self._discount(name, before)
        group = self.grouping.get(name)
        if group is not None:
            fit = self.fits[name] = judge(group, self.requirement, self._is_held(group), now)
            self._count(name, fit, insort)

    def _is_held(self, group: Group) -> bool:
        if group.is_slice:
            return group.name in self._holders
        if not self.requirement.chips:
            return False
        return any(worker.slice_name in self._holders for worker in group.workers)

    def _count(self, name: str, fit: Fit, add: Callable[[list[Any], Any], None]) -> None:
        if fit.rank is not None:
            add(self.free[fit.bucket], fit.rank)
        elif fit.obstacle:
            add(self.near, (fit.short, fit.lack, name))
        if fit.status is not Status.UNFIT:
            self.sound[fit.bucket] += 1
        if fit.ending:
            self.soon[fit.bucket] += 1
        for what, count in fit.removed:
            self.removed[what] += count
        if fit.unevaluable:
            self.unevaluable.add(name)
        if fit.recheck_at is not None:
            heapq.heappush(self._recheck, (fit.recheck_at, name))

    def _discount(self, name: str, fit: Fit) -> None:
        if fit.rank is not None:
            ranks = self.free[fit.bucket]
            del ranks[bisect_left(ranks, fit.rank)]
        elif fit.obstacle:
            del self.near[bisect_left(self.near, (fit.short, fit.lack, name))]
        if fit.status is not Status.UNFIT:
            self.sound[fit.bucket] -= 1
        self.soon[fit.bucket] -= fit.ending
        for what, count in fit.removed:
            self.removed[what] -= count
        self.unevaluable.discard(name)

    def contents(self) -> tuple[object, ...]:
        """All of it, to compare with candidates made anew."""
        free = {bucket: ranks for bucket, ranks in self.free.items() if ranks}
        return self.fits, free, +self.sound, +self.soon, self.near, +self.removed, self.unevaluable


def judge(group: Group, need: Requirement, held: bool, now: float) -> Fit:
    """What a group is to a requirement.

    A slice is useless with any host that is missing or that takes nothing new: it is the unit that fails. Of other
    groups the sound members count.
    """
    workers = group.workers
    tasks = group.size if need.whole_groups else need.replicas
    bucket = tasks if not group.is_slice or group.size == tasks else LARGER
    if group.sound and group.size >= tasks and _all_will_do(group, need):
        return Fit(Status.FREE, bucket, _rank(group, need, held, len(workers) - tasks))
    out: dict[str, str] = {}  # worker id → why it will not do
    removed: list[tuple[int | str, int]] = []
    for position, constraint in enumerate(need.constraints):
        try:
            failing = _failing(constraint, group, out)
        except TypeError as error:
            why = f"{constraint} can't be evaluated: {error}"
            return Fit(Status.UNFIT, bucket, short=tasks, obstacle=why, unevaluable=why)
        if failing:
            removed.append((position, len(failing)))
            if len(out) + len(failing) == len(workers):
                return Fit(Status.UNFIT, bucket, removed=tuple(removed))
            out.update({worker.worker_id: f"{worker.name} fails {constraint}" for worker in failing})
    for taint in group.taints:
        if taint not in need.tolerated:
            tainted = [w for w in workers if taint in w.attributes and w.worker_id not in out]
            removed.append((taint, len(tainted)))
            out.update({worker.worker_id: f"{worker.name} has {taint}" for worker in tainted})
    left_out = tuple(removed)
    if group.flaw:
        return Fit(
            Status.UNFIT, bucket, short=abs(group.size - len(workers)) or 1, obstacle=group.flaw, removed=left_out
        )
    if group.size < tasks:
        why = f"has {_hosts(group.size)}, the job needs {tasks}"
        return Fit(Status.UNFIT, bucket, short=tasks - group.size, obstacle=why, removed=left_out)

    if group.ailing:
        out.update(group.ailing)
    suspects, recheck_at = [], None
    if group.suspects:
        suspects = [worker for worker in group.suspects if now < worker.suspected_until]
        recheck_at = min((worker.suspected_until for worker in suspects), default=None)
        out.update({w.worker_id: f"{w.name} may be lost ({w.suspected})" for w in suspects})
    least, chips_idle = group.room
    all_have_room = (chips_idle or not need.chips) and need.fits_into(least)
    if not all_have_room:
        for worker in workers:
            if (too_small := _too_small(worker, need)) and worker.worker_id not in out:
                out[worker.worker_id] = too_small
    unsound = group.is_slice and (group.ailing or suspects)
    if unsound or len(workers) - len(out) < tasks:
        obstacle = next(iter({**group.ailing, **out}.values())) if unsound else next(iter(out.values()), "")
        short = len(out) if unsound else tasks - len(workers) + len(out)
        return Fit(Status.UNFIT, bucket, short=short, obstacle=obstacle, removed=left_out, recheck_at=recheck_at)

    usable = tuple(w for w in workers if w.worker_id not in out) if out else workers
    if not all_have_room:
        full = [worker for worker in usable if not need.has_room(worker)]
        if len(usable) - len(full) < tasks:
            return _busy(bucket, tasks - len(usable) + len(full), full, need, left_out, recheck_at)
        usable = tuple(worker for worker in usable if worker not in full)
    rank = _rank(group, need, held, len(usable) - tasks)
    all_of_them = None if len(usable) == len(workers) else usable
    return Fit(Status.FREE, bucket, rank, all_of_them, removed=left_out, recheck_at=recheck_at)


def _all_will_do(group: Group, need: Requirement) -> bool:
    """Whether at first sight nothing stands in the way, as is mostly so where a gang can go."""
    attributes = group.workers[0].attributes
    try:
        for constraint in need.constraints:
            if not group.shares(constraint.key) or not constraint.matches(attributes):
                return False
    except TypeError:
        return False
    least, chips_idle = group.room
    return (chips_idle or not need.chips) and need.fits_into(least)


def _rank(group: Group, need: Requirement, held: bool, hosts_left: int) -> Rank:
    first = group.workers[0]
    unmet = [preference for preference in need.preferences if not _prefers(preference, group)]
    return (
        len(unmet),
        0.0 if need.chips else first.resources.get(TPU, 0.0),
        int(held),
        hosts_left if need.group_by or not need.chips else _hosts_left_idle(first),
        group.name,
    )


def _failing(constraint: Constraint, group: Group, out: Container[str]) -> Sequence[Worker]:
    """Members that do not satisfy it and are not out already."""
    if not group.shares(constraint.key):
        return [w for w in group.workers if w.worker_id not in out and not constraint.matches(w.attributes)]
    if constraint.matches(group.workers[0].attributes):
        return ()
    return [w for w in group.workers if w.worker_id not in out]


def _busy(
    bucket: int,
    short: int,
    full: list[Worker],
    need: Requirement,
    removed: tuple[tuple[int | str, int], ...],
    recheck_at: float | None,
) -> Fit:
    users = tuple(dict.fromkeys(job_of(task_id) for worker in full for task_id, _ in worker.occupants))
    ending = all(worker.occupants.keys() <= worker.ending for worker in full)
    return Fit(
        Status.BUSY,
        bucket,
        short=short,
        lack=sum(_lack(worker, need) for worker in full),
        ending=ending,
        obstacle=f"{'just left' if ending else 'in use'} by {', '.join(users[:3])}{', …' if len(users) > 3 else ''}",
        users=users,
        removed=removed,
        recheck_at=recheck_at,
    )


def _too_small(worker: Worker, need: Requirement) -> str | None:
    for resource, amount in need.resources:
        have = worker.resources.get(resource, 0.0)
        if have < amount:
            return f"{worker.name} has {have:g} {resource}, a task needs {amount:g}"
    return None


def _lack(worker: Worker, need: Requirement) -> float:
    lacking = [1 - worker.free.get(resource, 0.0) / amount for resource, amount in need.resources]
    if need.chips and worker.free.get(TPU, 0.0) != worker.resources.get(TPU, 0.0):
        lacking.append(1.0)
    return max(0.0, *lacking) if lacking else 0.0


def _prefers(preference: Constraint, group: Group) -> bool:
    members = group.workers[:1] if group.shares(preference.key) else group.workers
    try:
        return all(preference.matches(worker.attributes) for worker in members)
    except TypeError:
        return False  # what can't be compared is not what was wished for


def _hosts_left_idle(worker: Worker) -> int:
    """Hosts of its slice that a single task with chips would waste."""
    size = worker.attributes.get(TPU_VM_COUNT, AttributeValue(1)).value
    return int(size) - 1 if isinstance(size, int) else 0


def _hosts(number: int) -> str:
    return f"{number} host" if number == 1 else f"{number} hosts"
