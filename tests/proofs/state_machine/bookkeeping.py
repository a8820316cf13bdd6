"""A second account of the controller's state: who holds what and who has used up what, kept from the events alone.

The rules of `iris_ray.state` are written down here once more, in other words and without its indexes.
"""

from collections import Counter
from collections.abc import Mapping

from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.outcomes import Fault
from iris_ray.model.workers import TPU_NAME, Worker
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    GangMovedEvent,
    JobCancelledEvent,
    JobYieldsEvent,
    PoolRestartedEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskAssignedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TaskUnschedulableEvent,
    TimePassedEvent,
    WorkerBlamedEvent,
    WorkerFailedEvent,
)
from iris_ray.state.instructions import Instructions, ReclaimSlice
from tests.proofs.state_machine.account import PAUSES, Account, BlameView, demand_of, uses_chips
from tests.proofs.state_machine.views import GangView, JobView, S, view
from tests.support.worlds import World


class Bookkeeper:
    """Keeps the account of a world as events come.

    Attributes:
        world: the state and its scheduler.
        places: node id → where the host stands: (slice or rack, number).
        account: what the events say.
    """

    def __init__(self, world: World, places: Mapping[str, tuple[str, int]]) -> None:
        self.world = world
        self.places = places
        self.account = Account()

    @property
    def state(self) -> ControllerState:
        return self.world.state

    # -- who has used up what ----------------------------------------------------------------------------------------

    def charge(self, event: Event, before: Mapping[str, JobView]) -> dict[AttemptId, TaskState]:
        """Attempts that the event ends, with the state that its cause gets if the gang is not tried again."""
        charged: dict[AttemptId, TaskState] = {}
        match event:
            case TaskStateChangedEvent(attempt, index, (S.FAILED | S.WORKER_FAILED) as end) if attempt.job_id in before:
                job_id, number, position = attempt
                job = self.state.jobs[job_id]
                if before[job_id].state.finished or not 0 <= position < len(job.gangs):
                    return {}
                gang = before[job_id].gangs[position]
                member = index - position
                if not gang.live or gang.attempt != number or not 0 <= member < len(gang.states):
                    return {}
                if gang.states[member] is S.SUCCEEDED and end is S.FAILED:
                    return {}  # a function returns once
                host = self.state.workers.get(gang.node_ids[member] or "")
                sound = host is not None and host.node_id not in self.account.notices
                if self.account.ends_quickly(job_id, position) > 5 and sound and gang.states[member] is not S.SUCCEEDED:
                    end = S.FAILED  # nothing is wrong but the task
                charged[attempt] = end
                account = self.account.failures if end is S.FAILED else self.account.preemptions
                account[job_id, position] += 1
            case WorkerFailedEvent(node_id) if worker := self.state.workers.get(node_id):
                over: set[str] = set()
                for _, attempt in worker.occupants:
                    job_id, number, position = attempt
                    job = self.state.jobs[job_id]
                    gang = before[job_id].gangs[position]
                    if job_id in over or not gang.live or gang.attempt != number or before[job_id].state.finished:
                        continue
                    charged[attempt] = S.WORKER_FAILED
                    if gang.states != (S.ASSIGNED,) * len(gang.states):  # it had begun
                        self.account.preemptions[job_id, position] += 1
                    if self.account.lost_for_good(job, position):
                        over.add(job_id)
            case PoolRestartedEvent(owner):
                self.charge_for_pool(owner, before, charged)
        return charged

    def charge_for_pool(self, owner: str, before: Mapping[str, JobView], charged: dict[AttemptId, TaskState]) -> None:
        """All its gangs that had begun lose an attempt, until one of a job has lost too many."""
        over: set[str] = set()
        for attempt in filter(self.is_live, self.account.held):
            job_id, _, position = attempt
            job, gang = self.state.jobs[job_id], before[job_id].gangs[position]
            if job.spec.owner != owner or job.spec.spare_for is not None or job_id in over:
                continue
            charged[attempt] = S.WORKER_FAILED
            if set(gang.states) == {S.ASSIGNED}:
                continue
            member = next(i for i, state in enumerate(gang.states) if state is not S.SUCCEEDED)
            host = self.state.workers[gang.node_ids[member] or ""]
            if self.account.ends_quickly(job_id, position) > 5 and host.node_id not in self.account.notices:
                charged[attempt] = S.FAILED
                self.account.failures[job_id, position] += 1
            else:
                self.account.preemptions[job_id, position] += 1
            limit = job.spec.max_task_failures
            failed, lost = self.account.failed_for_good(job, position), self.account.lost_for_good(job, position)
            if lost or (failed and (limit is None or self.account.failures_of(job) > limit)):
                over.add(job_id)
        for job_id, was in before.items():  # results that no client has fetched yet are lost
            job = self.state.jobs[job_id]
            if job.spec.owner != owner or was.state.finished:
                continue
            for position, gang in enumerate(was.gangs):
                if set(gang.states) == {S.SUCCEEDED} and job_id not in over:
                    charged[AttemptId(job_id, gang.attempt, position)] = S.WORKER_FAILED
                    self.account.preemptions[job_id, position] += 1
                    if self.account.lost_for_good(job, position):
                        over.add(job_id)

    def book_ends(
        self,
        event: Event,
        before: Mapping[str, JobView],
        after: Mapping[str, JobView],
        charged: Mapping[AttemptId, TaskState],
    ) -> None:
        """Pauses, who returns, and when attempts have begun."""
        account, now = self.account, self.account.now
        for (job_id, _, position), end in charged.items():
            job, was = self.state.jobs[job_id], before[job_id].gangs[position]
            gang = after[job_id].gangs[position]
            by_report = isinstance(event, TaskStateChangedEvent)
            if by_report or set(was.states) != {S.ASSIGNED}:
                quick = account.quick[job_id, position] = account.ends_quickly(job_id, position)
                if gang.states[0] is S.PENDING:
                    assert gang.not_before == now + (PAUSES[quick] if quick < len(PAUSES) else 10.0)
                    if job.spec.spare_for is None:
                        account.returning[job_id] = gang.not_before + 30.0
            not_started = isinstance(event, PoolRestartedEvent) and set(was.states) == {S.ASSIGNED}  # a failed launch
            if end is S.WORKER_FAILED and gang.states[0] is S.PENDING and not not_started:
                account.wanted[job_id] = max(account.wanted.get(job_id, 0), len(was.groups))
        match event:
            case GangMovedEvent(attempt) if attempt.job_id in before:
                job_id, number, position = attempt
                was = before[job_id].gangs[position]
                if was.live and was.attempt == number and not before[job_id].state.finished:
                    assert set(after[job_id].gangs[position].states) == {S.PENDING}
                    if attempt in account.evicted:
                        self.gave_way(attempt, was, after[job_id].gangs[position])
                    else:
                        account.returning[job_id] = now + 30.0
                        account.quick[job_id, position] = 0
            case TimePassedEvent():
                for attempt in [attempt for attempt, (_, until) in account.evicted.items() if until <= now]:
                    job_id, _, position = attempt
                    assert set(after[job_id].gangs[position].states) == {S.PENDING}
                    self.gave_way(attempt, before[job_id].gangs[position], after[job_id].gangs[position])
            case GangAssignedEvent(job_id):
                account.began.pop((job_id, 0), None)
            case TaskAssignedEvent(job_id, index):
                account.began.pop((job_id, index), None)
            case TaskStateChangedEvent(attempt, _, S.RUNNING | S.SUCCEEDED) if attempt.job_id in before:
                job_id, _, position = attempt
                if position < len(before[job_id].gangs) and before[job_id] != after[job_id]:
                    account.began.setdefault((job_id, position), now)
                    account.launches.pop((job_id, position), None)
                    gang = after[job_id].gangs[position]
                    if set(gang.states) == {S.RUNNING} and len(gang.groups) >= account.wanted.get(job_id, 0):
                        account.wanted[job_id] = 0

    def gave_way(self, attempt: AttemptId, was: GangView, now: GangView) -> None:
        """Write down that an attempt has given its hosts away. If it yields, those that wait choose before it does."""
        job_id, _, position = attempt
        assert job_id not in self.account.yields or now.not_before == self.account.now + 5.0
        del self.account.evicted[attempt]
        self.account.evictions[job_id, position] += 1
        self.account.quick[job_id, position] = 0
        self.account.returning[job_id] = self.account.now + 30.0
        self.account.wanted[job_id] = max(self.account.wanted.get(job_id, 0), len(was.groups))

    # -- who holds what ----------------------------------------------------------------------------------------------

    def launch_failed(self, attempt: AttemptId, before: JobView) -> None:
        """Ten in a row end the job, unless it only holds slices."""
        job_id, number, position = attempt
        gang = before.gangs[position] if position < len(before.gangs) else None
        if gang and gang.live and gang.attempt == number and not before.state.finished:
            self.account.launches[job_id, position] += 1
            if self.account.launches[job_id, position] == 10 and not self.state.jobs[job_id].spec.spare_for:
                self.account.verdicts[job_id] = JobState.UNSCHEDULABLE

    def book(self, event: Event, before: Mapping[str, JobView], instructions: Instructions) -> None:
        """Write down what the event says about who holds what."""
        reclaim = []
        match event:
            case GangAssignedEvent(job_id, names, groups):
                node_ids = [node_id for group in groups for node_id in group]
                self.take(job_id, 0, dict(enumerate(node_ids)))
                config = self.state.jobs[job_id].spec.coscheduling
                if config is not None and config.group_by == TPU_NAME:
                    reclaim = self.take_slices(names, self.state.jobs[job_id].spec.owner)
            case TaskAssignedEvent(job_id, index, node_id):
                self.take(job_id, index, {index: node_id})
                name, _ = self.places[node_id]
                spec = self.state.jobs[job_id].spec
                if TPU_NAME in self.state.workers[node_id].attributes and uses_chips(spec):
                    reclaim = self.take_slices((name,), spec.owner)
            case AttemptEndConfirmedEvent(attempt):
                if attempt in self.account.held:
                    self.account.early.add(attempt)
            case WorkerFailedEvent(node_id):
                self.account.notices.pop(node_id, None)
                self.account.finals.pop(node_id, None)
                for hosts in self.account.held.values():
                    for task_id in [task_id for task_id, host in hosts.items() if host == node_id]:
                        del hosts[task_id]
            case SliceReleasedEvent(name, owner):
                self.released(name, owner)
            case PoolRestartedEvent(owner):  # nothing of it is left anywhere
                for attempt in list(self.account.held):
                    if self.state.jobs[attempt.job_id].spec.owner == owner:
                        assert not self.is_live(attempt)
                        del self.account.held[attempt]
                for name in list(self.account.holders):
                    self.released(name, owner)
                assert owner not in self.state.holders.values()
                assert not any(
                    set(gang.states) == {S.SUCCEEDED}
                    for job in self.state.jobs_of(owner)
                    for gang in map(view, job.gangs)
                ), "the results of gangs that have succeeded, which no client has fetched, are lost"
            case JobCancelledEvent(job_id) if job_id in before and not before[job_id].state.finished:
                if job_id in self.state.jobs and not self.state.jobs[job_id].spec.spare_for:
                    self.account.verdicts[job_id] = JobState.KILLED
            case TaskUnschedulableEvent(job_id, index) if job_id in before and not before[job_id].state.finished:
                gang = before[job_id].gangs[0 if self.state.jobs[job_id].spec.coscheduling else index]
                if gang.states[0] is S.PENDING and not before[job_id].started:
                    self.account.verdicts[job_id] = JobState.UNSCHEDULABLE
            case TaskDispatchFailedEvent(attempt, counts=True) if attempt.job_id in before:
                self.launch_failed(attempt, before[attempt.job_id])
            case WorkerBlamedEvent(node_id, job_id, _, fault) if node_id in self.state.workers:
                self.blame(node_id, job_id, fault)
            case JobYieldsEvent(job_id, yields) if not self.state.jobs[job_id].state.finished:
                (self.account.yields.add if yields else self.account.yields.discard)(job_id)
            case TaintedEvent(target, name, _, until):
                self.account.taints[target, name] = until
            case TaintLiftedEvent(target, name):
                self.account.taints.pop((target, name), None)
                if name == "quarantined":
                    self.account.forgive(target)
            case TimePassedEvent():
                for taint, until in list(self.account.taints.items()):
                    if until is not None and until <= self.account.now:
                        del self.account.taints[taint]
                for pair, (end, _) in list(self.account.avoided.items()):
                    if end <= self.account.now:
                        del self.account.avoided[pair]
        for attempt in [attempt for attempt in self.account.early if not self.is_live(attempt)]:
            self.account.early.remove(attempt)
            self.account.held.pop(attempt, None)
        found = self.state.fleet.taints.items()
        assert {(t, name): taint.until for t, taints in found for name, taint in taints.items()} == self.account.taints
        avoided = {(user, h): until for user, hosts in self.state.fleet.avoided.items() for h, until in hosts.items()}
        assert avoided == {pair: until for pair, (until, _) in self.account.avoided.items()}
        assert instructions.reclaim == reclaim
        assert self.state.holders == self.account.holders

    def released(self, name: str, owner: str) -> None:
        """If the owner held the slice, the owner of a job that is placed there holds it now."""
        if self.account.holders.get(name) != owner:
            return
        del self.account.holders[name]
        promised = {
            self.state.jobs[attempt.job_id].spec.owner
            for attempt, hosts in self.account.held.items()
            if self.is_live(attempt)
            and uses_chips(self.state.jobs[attempt.job_id].spec)
            and any(self.places[node_id][0] == name for node_id in hosts.values())
        }
        if promised:  # of several, any
            assert self.state.holders.get(name) in promised
            self.account.holders[name] = self.state.holders[name]

    def take(self, job_id: str, position: int, hosts: Mapping[int, str]) -> None:
        job = self.state.jobs[job_id]
        gang = job.gangs[position]
        attempt = job.current_attempt(gang)
        assert attempt not in self.account.held
        self.account.held[attempt] = {f"{job_id}/task-{i}": host for i, host in hosts.items()}
        assert [task.state for task in gang.tasks] == [S.ASSIGNED] * len(hosts)
        assert {task.index: task.node_id for task in gang.tasks} == hosts

    def take_slices(self, names: tuple[str, ...], owner: str) -> list[ReclaimSlice]:
        holders = self.account.holders
        reclaim = [ReclaimSlice(name, holders[name]) for name in names if holders.get(name, owner) != owner]
        for name in names:
            holders.setdefault(name, owner)
        return reclaim

    # -- which hosts are set aside -----------------------------------------------------------------------------------

    def blame(self, node_id: str, job_id: str, fault: Fault) -> None:
        """The third failure within an hour that is not the user's own doing.

        Three of one user: the user's jobs avoid the host. Three of several users, or three that the host shows by
        itself: it is set aside. For an hour, or for five minutes if no user code had come to run in any of them.
        """
        account, job = self.account, self.state.jobs.get(job_id)
        user = job.spec.user if job else job_id
        account.blames = [blame for blame in account.blames if blame.at >= account.now - 3600.0]
        account.blames.append(BlameView(account.now, node_id, user, fault))
        of_host = [blame for blame in account.blames if blame.node_id == node_id and blame.fault is Fault.HOST]
        of_users = self.not_the_users(node_id, account.blames)
        mine = [blame for blame in of_users if blame.user == user]
        if fault is Fault.HOST:
            if len(of_host) > 2:
                self.set_aside(node_id, of_host)
        elif len(of_users) > 2 and mine != of_users:
            self.set_aside(node_id, of_users)
        elif len(mine) > 2:
            account.avoided[user, node_id] = account.now + seconds(mine), mine
        for pair, (_, blames) in list(account.avoided.items()):
            if len(self.not_the_users(pair[1], blames)) <= 2:
                del account.avoided[pair]
        by_us = {other: until for other, (until, why) in account.set_aside.items() if self.may_return(other, why)}
        for other, until in by_us.items():
            account.forgive(other)
            if account.taints.get((other, "quarantined")) == until:  # else it is an operator's
                del account.taints[other, "quarantined"]

    def set_aside(self, node_id: str, blames: list[BlameView]) -> None:
        until = self.account.now + seconds(blames)
        self.account.taints[node_id, "quarantined"] = until
        self.account.forgive(node_id)
        self.account.set_aside[node_id] = until, blames

    def may_return(self, node_id: str, blames: list[BlameView]) -> bool:
        left = self.not_the_users(node_id, blames)
        return blames[0].fault is not Fault.HOST and (len(left) <= 2 or len({blame.user for blame in left}) < 2)

    def not_the_users(self, node_id: str, blames: list[BlameView]) -> list[BlameView]:
        """Those of users against a host, but for users whose tasks fail on other hosts as well."""
        fails = {(blame.user, blame.node_id) for blame in self.account.blames if blame.fault is not Fault.HOST}
        elsewhere = {user for user, host in fails if host != node_id}
        by_users = [b for b in blames if b.node_id == node_id and b.fault is not Fault.HOST]
        return [b for b in by_users if b.user not in elsewhere]

    # -- reading the account -----------------------------------------------------------------------------------------

    def is_live(self, attempt: AttemptId) -> bool:
        job_id, number, position = attempt
        if job_id not in self.state.jobs:
            return False
        job = self.state.jobs[job_id]
        gang = view(job.gangs[position])
        return gang.attempt == number and gang.live and not job.state.finished

    def attempts_on(self, node_id: str) -> list[AttemptId]:
        held = self.account.held.items()
        return [attempt for attempt, hosts in held if node_id in hosts.values() and self.is_live(attempt)]

    def members(self, name: str) -> list[Worker]:
        return [worker for node_id, worker in self.state.workers.items() if self.places[node_id][0] == name]

    def in_use(self, worker: Worker) -> Counter[str]:
        used: Counter[str] = Counter()
        for attempt, hosts in self.account.held.items():
            for node_id in hosts.values():
                if node_id == worker.node_id:
                    used += demand_of(self.state.jobs[attempt.job_id], worker)
        return used

    def uses_of_chips(self, worker: Worker) -> int:
        return sum(
            list(hosts.values()).count(worker.node_id)
            for attempt, hosts in self.account.held.items()
            if uses_chips(self.state.jobs[attempt.job_id].spec)
        )


def seconds(blames: list[BlameView]) -> float:
    return 3600.0 if any(blame.fault in (Fault.CRASH, Fault.DISK) for blame in blames) else 300.0
