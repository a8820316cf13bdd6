"""What each group of workers is to one requirement: free, in use, or no use. Shared by all jobs that ask the same."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from iris_ray.model.constraints import AttributeValue, Constraint
from iris_ray.model.ids import job_of
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU, TPU_VM_COUNT, Worker
from iris_ray.state.groups import Group, Grouping

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
        away: whether it is of no use for now only: somebody outside iris_ray uses it, or it may be lost.
        good: the workers that will do if nobody uses them.
        usable: those of them that nobody uses; None: all members of the group.
        short: how many hosts are missing to make it free.
        lack: how much is missing on them, 1 for each that lacks all that it must give.
        ending: whether it will be free once all that is over has been confirmed.
        obstacle: what stands in the way, in words.
        users: the jobs that do.
        removed: how many workers each constraint (by position) or taint (by name) leaves out.
        recheck_at: when time alone will change it; seconds on the caller's clock.
    """

    status: Status
    bucket: int
    rank: Rank | None = None
    good: tuple[Worker, ...] = ()
    usable: tuple[Worker, ...] | None = None
    short: int = 0
    lack: float = 0.0
    ending: bool = False
    away: bool = False
    obstacle: str = ""
    users: tuple[str, ...] = ()
    removed: tuple[tuple[int | str, int], ...] = ()
    recheck_at: float | None = None


class Candidates:
    """All groups, seen with the eyes of one requirement.

    Attributes:
        fits: by group name.
        free: bucket → ranks of its free groups, best first.
        sound: bucket → how many groups are free or in use.
        soon: bucket → how many groups are about to be free.
        away: bucket → how many groups are of no use for now only.
        near: (hosts short, lack, name) of groups that are not free, the nearest first.
        removed: how many workers each constraint or taint leaves out.
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
        self.away: Counter[int] = Counter()
        self.near: list[tuple[int, float, str]] = []
        self.removed: Counter[int | str] = Counter()
        self._holders = holders
        self._recheck: list[tuple[float, str]] = []

    def look_at_all(self, now: float) -> None:
        need = self.requirement
        for group in self.grouping.groups():
            fit = self.fits[group.name] = evaluate(group, need, self._is_held(group), now)
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
            fit = self.fits[name] = evaluate(group, self.requirement, self._is_held(group), now)
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
        if fit.away:
            self.away[fit.bucket] += 1
        for what, count in fit.removed:
            self.removed[what] += count
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
        self.away[fit.bucket] -= fit.away
        for what, count in fit.removed:
            self.removed[what] -= count

    def contents(self) -> tuple[object, ...]:
        """All of it, to compare with candidates made anew."""
        free = {bucket: ranks for bucket, ranks in self.free.items() if ranks}
        return self.fits, free, +self.sound, +self.soon, +self.away, self.near, +self.removed


def evaluate(group: Group, need: Requirement, held: bool, now: float) -> Fit:
    """What a group is to a requirement.

    A slice is useless with any host that is missing or that takes nothing new: it is the unit that fails. Of other
    groups the sound members count.
    """
    workers = group.workers
    tasks = group.size if need.whole_groups else need.replicas
    bucket = tasks if not group.is_slice or group.size == tasks else LARGER
    if group.sound and group.size >= tasks and _all_will_do(group, need):
        return Fit(Status.FREE, bucket, _rank(group, need, held, len(workers) - tasks), workers)
    out: dict[str, str] = {}  # worker id → why it will not do
    removed: list[tuple[int | str, int]] = []
    for position, constraint in enumerate(need.constraints):
        try:
            failing = [worker for worker in _failing(constraint, group) if worker.node_id not in out]
        except TypeError as error:
            return Fit(Status.UNFIT, bucket, short=tasks, obstacle=f"{constraint} can't be evaluated: {error}")
        if failing:
            removed.append((position, len(failing)))
            out.update({worker.node_id: f"{worker.name} fails {constraint}" for worker in failing})
    if len(out) == len(workers):
        return Fit(Status.UNFIT, bucket, removed=tuple(removed))
    for taint in group.taints:
        if taint not in need.tolerated:
            tainted = [w for w in workers if taint in w.attributes and w.node_id not in out]
            removed.append((taint, len(tainted)))
            out.update(
                {worker.node_id: f"{worker.name} has {taint} ({worker.attributes[taint]})" for worker in tainted}
            )
    left_out = tuple(removed)
    if group.flaw:
        return Fit(
            Status.UNFIT, bucket, short=abs(group.size - len(workers)) or 1, obstacle=group.flaw, removed=left_out
        )
    if group.size < tasks:
        why = f"has {_hosts(group.size)}, the job needs {tasks}"
        return Fit(Status.UNFIT, bucket, short=tasks - group.size, obstacle=why, removed=left_out)

    out.update(group.ailing)
    least, chips_idle = group.room
    all_have_room = (chips_idle or not need.chips) and need.fits_into(least)
    if not all_have_room:
        for worker in workers:
            if (too_small := _too_small(worker, need)) and worker.node_id not in out:
                out[worker.node_id] = too_small
    will_do_later = len(workers) - len(out) >= tasks and not (group.is_slice and group.ailing)
    out.update(group.visited)
    suspects = [worker for worker in group.suspects if now < worker.suspected_until]
    recheck_at = min((worker.suspected_until for worker in suspects), default=None)
    out.update({w.node_id: f"{w.name} may be lost ({w.suspected})" for w in suspects})
    unsound = group.is_slice and (group.ailing or group.visited or suspects)
    if unsound or len(workers) - len(out) < tasks:
        return Fit(
            Status.UNFIT,
            bucket,
            short=len(out) if unsound else tasks - len(workers) + len(out),
            away=will_do_later,
            obstacle=next(iter({**group.ailing, **out}.values()), "") if unsound else next(iter(out.values()), ""),
            removed=left_out,
            recheck_at=recheck_at,
        )

    good = tuple(w for w in workers if w.node_id not in out) if out else workers
    full = [] if all_have_room else [worker for worker in good if not need.has_room(worker)]
    if len(good) - len(full) < tasks:
        return _busy(group, bucket, tasks, good, full, need, left_out, recheck_at)
    usable = tuple(worker for worker in good if worker not in full) if full else good
    rank = _rank(group, need, held, len(usable) - tasks)
    all_of_them = None if len(usable) == len(workers) else usable
    return Fit(Status.FREE, bucket, rank, good, all_of_them, removed=left_out, recheck_at=recheck_at)


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


def _failing(constraint: Constraint, group: Group) -> Sequence[Worker]:
    """Members that do not satisfy it."""
    if not group.shares(constraint.key):
        return [worker for worker in group.workers if not constraint.matches(worker.attributes)]
    return () if constraint.matches(group.workers[0].attributes) else group.workers


def _busy(
    group: Group,
    bucket: int,
    tasks: int,
    good: tuple[Worker, ...],
    full: list[Worker],
    need: Requirement,
    removed: tuple[tuple[int | str, int], ...],
    recheck_at: float | None,
) -> Fit:
    users = tuple(dict.fromkeys(job_of(task_id) for worker in full for task_id, _ in worker.occupants))
    ending = any(w.ending for w in full) and sum(need.has_room(w, soon=True) for w in good) >= tasks
    how_many = f"{len(full)} of {_hosts(len(group.workers))} " if len(full) < len(group.workers) else ""
    who = f"{', '.join(users[:3])}{', …' if len(users) > 3 else ''}"
    return Fit(
        Status.BUSY,
        bucket,
        good=good,
        short=tasks - len(good) + len(full),
        lack=sum(map(need.lack, full)),
        ending=ending,
        obstacle=f"{how_many}{'just left' if ending else 'in use'} by {who}",
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
