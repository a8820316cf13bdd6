"""Quarantine: after failures on a host, the user whose tasks failed there avoids it, or all users do.

A failure counts against the pair of a user and a host. If a user's tasks fail repeatedly on one host and not on others,
the user's jobs avoid it. A host is quarantined for all users if tasks of different users fail there, or if the host
itself reports that it is unfit.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.outcomes import Fault
from iris_ray.model.workers import TPU_NAME
from iris_ray.state.fleet import Fleet, Taint

QUARANTINE = "quarantined"
"""The name of the taint."""
BLAMES_ALLOWED = 2
"""The number of failures within `MEMORY_S` that are tolerated. The next one closes the host."""
MEMORY_S = 3600.0
QUARANTINE_S = 3600.0
"""How long a host is quarantined or avoided, unless that is lifted earlier; seconds."""
SHORT_QUARANTINE_S = 300.0
"""How long a host is closed if no user code ran: another process probably has its chips and may soon exit; seconds."""
KEPT_OF_A_PAIR = 10
"""The number of latest failures of a user on a host that are kept: tasks may crash by the ten thousand."""

_Index = defaultdict[str | None, set[str | None]]


@dataclass(frozen=True, slots=True)
class Blame:
    """A failure that may be a host's fault.

    Attributes:
        node_id: the host.
        user: the user of the task.
        fault: the kind of failure.
        at: seconds on the caller's clock.
    """

    node_id: str
    user: str
    fault: Fault
    at: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """The consequence of a host's failures.

    Attributes:
        everybody: whether the host is quarantined for all users; otherwise one user's jobs avoid it.
        blames: the failures.
    """

    everybody: bool
    blames: tuple[Blame, ...]

    @property
    def seconds(self) -> float:
        """How long the judgement holds, in seconds."""
        in_user_code = any(blame.fault in (Fault.CRASH, Fault.DISK, Fault.HANG) for blame in self.blames)
        return QUARANTINE_S if in_user_code else SHORT_QUARANTINE_S


class BlameBook:
    """The failures of the last hour: the latest of each user on each host."""

    def __init__(self) -> None:
        # By host and user, with the latest failure last. The user is None for a fault of the host itself.
        self._pairs: OrderedDict[tuple[str, str | None], deque[Blame]] = OrderedDict()
        self._users_on: _Index = defaultdict(set)  # by host
        self._hosts_of: _Index = defaultdict(set)  # by user

    def add(self, blame: Blame) -> Judgement | None:
        """Record a failure. Return its consequence, or None."""
        self._note(blame)
        here = self._here(blame)
        by_host = tuple(one for one in here if one.fault is Fault.HOST)
        by_users = tuple(self._not_the_users([one for one in here if one.fault is not Fault.HOST]))
        by_user = tuple(one for one in by_users if one.user == blame.user)
        if blame.fault is Fault.HOST:
            return Judgement(True, by_host) if len(by_host) > BLAMES_ALLOWED else None
        if len(by_users) > BLAMES_ALLOWED and len(by_user) < len(by_users):
            return Judgement(True, by_users)
        return Judgement(False, by_user) if len(by_user) > BLAMES_ALLOWED else None

    def still_holds(self, judged: Judgement) -> bool:
        """Return whether a judgement still holds, given all failures known by now."""
        if judged.blames[0].fault is Fault.HOST:
            return True
        left = self._not_the_users(judged.blames)
        return len(left) > BLAMES_ALLOWED and (not judged.everybody or len({one.user for one in left}) > 1)

    def forgive(self, node_id: str) -> None:
        """Forget the failures of a host."""
        for user in list(self._users_on.get(node_id, ())):
            self._remove(node_id, user)

    def _not_the_users(self, blames: Sequence[Blame]) -> list[Blame]:
        """Return the failures whose users have none on other hosts."""
        return [one for one in blames if self._hosts_of.get(one.user, set()) <= {one.node_id}]

    def _note(self, blame: Blame) -> None:
        pair = blame.node_id, None if blame.fault is Fault.HOST else blame.user
        self._pairs.setdefault(pair, deque(maxlen=KEPT_OF_A_PAIR)).append(blame)
        self._pairs.move_to_end(pair)
        self._users_on[blame.node_id].add(pair[1])
        self._hosts_of[pair[1]].add(blame.node_id)

    def _here(self, latest: Blame) -> list[Blame]:
        """Return the last hour's failures on the host of the latest one, and forget older failures everywhere."""
        since = latest.at - MEMORY_S
        while (first := next(iter(self._pairs.items())))[1][-1].at < since:
            self._remove(*first[0])
        users = self._users_on[latest.node_id]
        return [one for user in users for one in self._pairs[latest.node_id, user] if one.at >= since]

    def _remove(self, node_id: str, user: str | None) -> None:
        del self._pairs[node_id, user]
        for index, key, other in ((self._users_on, node_id, user), (self._hosts_of, user, node_id)):
            index[key].remove(other)
            if not index[key]:
                del index[key]


class Quarantine:
    """Closes hosts to a user or to all, and reopens them when later failures show that they were not at fault."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._blames = BlameBook()
        self._quarantined: dict[str, tuple[Taint, Judgement]] = {}  # node id → its taint, and the reason
        self._avoided: dict[tuple[str, str], Judgement] = {}  # (user, node id)

    def blame(self, blame: Blame, reason: str) -> None:
        """Count a failure against a host and a user."""
        judged = self._blames.add(blame)
        if judged is not None and judged.everybody:
            count, until = len(judged.blames), blame.at + judged.seconds
            taint = Taint(f"{count} task processes failed there within an hour, the last one: {reason}", until)
            self._forgive(blame.node_id)  # these failures count only once
            self._quarantined[blame.node_id] = taint, judged
            self._fleet.taint(blame.node_id, QUARANTINE, taint)
        elif judged is not None:
            self._avoided[blame.user, blame.node_id] = judged
            self._fleet.avoid(blame.user, blame.node_id, blame.at + judged.seconds)
        self._acquit()

    def taint_lifted(self, target: str, taint: str) -> None:
        """Lift a taint. If it is the quarantine, forget the host's failures."""
        self._fleet.lift_taint(target, taint)
        if taint == QUARANTINE:
            self._forgive(target)

    def _acquit(self) -> None:
        """Reopen hosts whose judgement no longer holds. A taint that an operator has set since then stays."""
        for node_id, (taint, judged) in list(self._quarantined.items()):
            if self._fleet.taints.get(node_id, {}).get(QUARANTINE) != taint:
                del self._quarantined[node_id]
            elif not self._blames.still_holds(judged):
                self._forgive(node_id)
                self._fleet.lift_taint(node_id, QUARANTINE)
        for (user, node_id), judged in list(self._avoided.items()):
            over = node_id not in self._fleet.avoided.get(user, {})
            if over or not self._blames.still_holds(judged):
                del self._avoided[user, node_id]
                if not over:
                    self._fleet.avoid(user, node_id, None)

    def _forgive(self, node_id: str) -> None:
        self._blames.forgive(node_id)
        self._quarantined.pop(node_id, None)


# -- avoided hosts -----------------------------------------------------------------------------------------------------
# A failed launch may be the fault of the host or of the job. The job therefore avoids the host for a while, and other
# jobs may use it. If there is no other host, the scheduler lets the job retry on the same one.

AVOIDED_S = 300.0
"""How long hosts are avoided after the job's latest failed launch; seconds."""
MOST_AVOIDED = 256
"""The largest number of hosts that a job avoids, by its latest failures. A whole slice counts as one host."""


def avoid(job: Job, gang: Gang, groups: Iterable[str], fleet: Fleet, now: float) -> None:
    """Make a job avoid the hosts of an attempt that could not be launched. The gang still has its hosts.

    ``groups`` has the names of the groups in which the launch failed, or the ids of the groups' first tasks. If the
    gang has none of these, all its groups count.
    """
    per_group, named = len(gang.tasks) // len(gang.groups), set(groups)
    first_tasks = dict(zip(gang.groups, gang.tasks[::per_group], strict=True))
    places = {name for name, task in first_tasks.items() if name in named or task.task_id in named}
    _add(job, dict.fromkeys(_hosts(job, gang, places or set(gang.groups), fleet)), now)


def avoid_host(job: Job, node_id: str, now: float) -> None:
    """Make a job avoid a host whose disk was full or faulty, or where a task held up its gang."""
    _add(job, {node_id: None}, now)


def forgive(job: Job, gang: Gang) -> None:
    """Remove the hosts of a started gang from the hosts that its job avoids."""
    if job.avoided:
        here = {task.node_id for task in gang.tasks}
        job.avoided = tuple(node_id for node_id in job.avoided if node_id not in here)


def _add(job: Job, hosts: dict[str, None], now: float) -> None:
    earlier = (node_id for node_id in avoided_by(job, now) if node_id not in hosts)
    job.avoided = (*earlier, *hosts)[-MOST_AVOIDED:]
    job.avoided_until = now + AVOIDED_S


def avoided_by(job: Job, now: float) -> tuple[str, ...]:
    """Return the ids of the hosts that a job avoids now."""
    return job.avoided if now < job.avoided_until else ()


def _hosts(job: Job, gang: Gang, groups: set[str], fleet: Fleet) -> Iterator[str]:
    per_group, grouped = len(gang.tasks) // len(gang.groups), job.spec.coscheduling
    for number, name in enumerate(gang.groups):
        if name in groups:
            tasks = gang.tasks[number * per_group : (number + 1) * per_group]
            is_whole = grouped and grouped.group_by == TPU_NAME and len(fleet.slice_workers(name)) <= per_group
            yield from (task.node_id or "" for task in (tasks[:1] if is_whole else tasks))
