"""Which spares, and which jobs that yield, give their hosts back to a waiting job that could use them."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from iris_ray.model.jobs import Job
from iris_ray.model.workers import Worker, accelerators
from iris_ray.scheduler.availability import Availability, best_free, buckets_for, num_groups
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.explanation import Unplaced
from iris_ray.scheduler.fair_queue import Deadlines, SearchFairness, comes_last
from iris_ray.scheduler.limits import Allowances, most_chips_of
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.state.fleet import Fleet
from iris_ray.state.user_limits import Account

KINDS_LOOKED_AT = 64
"""A plan ends its search for spares once it has found none for so many kinds of jobs. The next plan goes on."""

_Kind = tuple[object, ...]


class ReturnedSpares:
    """Chooses the spares that give their hosts back, once a plan is made.

    Args:
        spares: the spares that hold slices, and the jobs that yield. A replacement is no spare in this sense: its gang
            is about to lose a slice.
        fleet: the workers that the plan was made for.
        deadlines: tells which time limits have passed.
        allowances: what each user may still get.
        plan: the hosts that the plan has given away.
        fairness: for which kinds of jobs earlier plans have searched for spares in vain.
        leaving: ids of the spares and jobs that give their hosts back already.
    """

    def __init__(
        self,
        spares: Iterable[Job],
        fleet: Fleet,
        deadlines: Deadlines,
        allowances: Allowances,
        plan: Plan,
        fairness: SearchFairness,
        leaving: Collection[str] = (),
    ) -> None:
        self._fleet = fleet
        self._deadlines = deadlines
        self._allowances = allowances
        self._plan = plan
        self._fairness = fairness
        self._leaving = leaving
        self._on: dict[str, str] = {}  # node_id → id of the spare that holds the host
        self._yielding: set[str] = set()
        self._accounts: dict[str, Account] = {}  # id of a spare → whose it is
        self._within_limits: set[Account] = set()  # who gets below a limit with what is given back already
        for spare in spares:
            if comes_last(spare):
                self._accounts[spare.spec.job_id] = spare.spec.user, spare.spec.priority
                if spare.yields:
                    self._yielding.add(spare.spec.job_id)
                held = (task.node_id for task in spare.gang.tasks if task.node_id in fleet.workers)
                self._on |= {node_id: spare.spec.job_id for node_id in held if node_id is not None}
        self._is_first = True
        self._promised: set[str] = set()  # hosts about to be free that jobs before in the queue wait for

    def choose(self, unplaced: Iterable[Unplaced]) -> list[str]:
        """Return the ids of the spares whose slices let waiting jobs run: as few as possible, the first jobs first.

        If a job needs the hosts of spares and of jobs that yield, the spares give theirs back only once the jobs that
        yield have left. Else a spare would get its slice again, and again, while they leave.
        """
        chosen: dict[str, None] = {}
        hopeless: set[_Kind] = set()
        for one in unplaced if self._on else ():
            kind = self._kind(one)
            is_hopeless = kind in hopeless or self._fairness.passes_over(kind)
            if comes_last(one.job) or one.reason.taken_from or (is_hopeless and not one.reason.kept):
                continue
            found = self._for(one)
            if found is None:
                hopeless.add(kind)
                found = []
            first = [job_id for job_id in found if job_id in self._yielding] or found
            chosen |= dict.fromkeys(job_id for job_id in first if job_id not in self._leaving)
            self._on = {node_id: spare for node_id, spare in self._on.items() if spare not in found}
            if not self._on or len(hopeless) == KINDS_LOOKED_AT:
                break
        self._fairness.end_plan(hopeless, had_time=len(hopeless) < KINDS_LOOKED_AT)
        return list(chosen)

    def _kind(self, one: Unplaced) -> _Kind:
        job = one.job
        return (
            job.requirement,
            num_groups(job),
            one.available.impaired,
            self._hopes(job),
            job.spec.user,
            job.spec.priority,
        )

    def _for(self, one: Unplaced) -> list[str] | None:
        """Return the spares whose groups are enough for a job, those that leave already included.

        Return an empty list if groups that are about to be free are enough, and None if the spares' groups are too few
        or the job needs none.
        """
        available = one.available
        available.catch_up()
        if self._hopes(one.job) and any(map(available.free_soon, buckets_for(one.job, available))):
            return None  # the gang waits for more groups, and might not take the ones that spares give back
        if one.reason.limit is not None:
            return self._for_limited(one, one.reason.limit.needed)
        least = num_groups(one.job)[0]
        names = self._free(one, least)
        room, soon = self._room(one, names, max(0, least - len(names)))
        names += soon + room
        if not (soon or room) or len(names) < least:
            return None
        if not self._allowances.may_take(one.job, most_chips_of(names, available)):
            return None
        self._is_first = False
        self._promised.update(node_id for name in soon for node_id in available.group(name).node_ids)
        node_ids = (node_id for name in room for node_id in available.group(name).node_ids)
        return list(dict.fromkeys(self._on[node_id] for node_id in node_ids if node_id in self._on))

    def _for_limited(self, one: Unplaced, needed: float) -> list[str] | None:
        """Return the spares of a job's own user in whose place the job could run within the user's limit.

        Args:
            one: the job, which waits for the limit.
            needed: how many chips the job expects to take.
        """
        job, available, least = one.job, one.available, num_groups(one.job)[0]
        account = job.spec.user, job.spec.priority
        if account in self._within_limits:
            return None  # one job of an account at a time, since each uses some of the limit
        own = (name for name in self._groups(one) if self._accounts_in(name, available) == {account})
        room = list(islice(own, least))
        free = best_free(least - len(room), available, buckets_for(job, available)) if self._is_first else []
        if not room or len(room) + len(free) < least:
            return None
        node_ids = [node_id for name in room for node_id in available.group(name).node_ids]
        found = list(dict.fromkeys(self._on[node_id] for node_id in node_ids if node_id in self._on))
        chips = max(needed, most_chips_of([*room, *free], available))
        if not self._allowances.may_take(job, chips, given_back=sum(map(self._chips_of, found))):
            return None
        self._is_first = False
        self._within_limits.add(account)
        return found

    def _accounts_in(self, name: str, available: Availability) -> set[Account]:
        """Return the accounts of the spares that hold hosts of a group."""
        node_ids = available.group(name).node_ids
        return {self._accounts[self._on[node_id]] for node_id in node_ids if node_id in self._on}

    def _chips_of(self, spare: str) -> float:
        """Return how many chips a spare holds."""
        workers = (self._fleet.workers[node_id] for node_id, on_it in self._on.items() if on_it == spare)
        held = (held for worker in workers for who, held in worker.occupants.items() if who[1].job_id == spare)
        return sum(map(accelerators, held))

    def _free(self, one: Unplaced, least: int) -> list[str]:
        """Return groups that are free for a job already: those of its room, then others, as many as it needs.

        Only the first job gets groups outside its room, so that each free group is counted once.
        """
        names = self._own(one)
        if self._is_first and len(names) < least:
            names += best_free(least - len(names), one.available, buckets_for(one.job, one.available))
        return names

    def _room(self, one: Unplaced, names: Collection[str], count: int) -> tuple[list[str], list[str]]:
        """Return ``count`` more groups for a job: those that spares hold, and those that are about to be free.

        Groups that are about to be free replace groups of jobs that yield, which are warm for their owners.
        """
        room = list(islice(self._groups(one), count))
        if not any(self._yields(node_id) for name in room for node_id in one.available.group(name).node_ids):
            return room, []
        soon = list(islice(self._about_to_be_free(one, names), len(room)))
        return room[: len(room) - len(soon)], soon

    def _hopes(self, job: Job) -> bool:
        """Return whether a gang waits for more groups than it needs if some are about to be free."""
        return len(num_groups(job)) > 1 and self._deadlines.hopes_for_more(job.gang)

    def _own(self, one: Unplaced) -> list[str]:
        """Return the groups of a job's room that are free already."""
        evaluation, taken = one.available.evaluation, self._plan.taken.keys()
        free = (name for name in one.reason.kept if evaluation(name).status is Status.FREE)
        return [name for name in free if taken.isdisjoint(one.available.group(name).node_ids)]

    def _about_to_be_free(self, one: Unplaced, names: Collection[str]) -> Iterator[str]:
        """Yield groups beside ``names`` that are free for the job once the ends of all ended attempts are confirmed."""
        available, need, plan = one.available, one.available.requirement, self._plan
        for bucket in buckets_for(one.job, available):
            for name in sorted(available.candidates.ending.get(bucket, ())):
                node_ids = available.group(name).node_ids
                kept_for = {plan.kept[node_id] for node_id in node_ids if node_id in plan.kept}
                if name in names or available.is_free(name) or not kept_for <= {one.job.spec.job_id}:
                    continue
                hosts = (
                    worker for worker in available.candidates.evaluations[name].eligible if not available.avoids(worker)
                )
                free = sum(need.has_room(worker, plan.taken.get(worker.node_id), soon=True) for worker in hosts)
                if free >= available.tasks(name) and self._promised.isdisjoint(node_ids):
                    yield name

    def _groups(self, one: Unplaced) -> Iterator[str]:
        """Yield the groups that would be free for a job without the spares there.

        The groups of its room come first, then those whose spares all leave already.
        """
        available, workers, kept = one.available, self._fleet.workers, self._plan.kept
        name_of = available.candidates.grouping.name_of
        there = dict.fromkeys(name_of(workers[node_id]) for node_id in self._on)
        evaluations, buckets = available.candidates.evaluations, buckets_for(one.job, available)
        names = [name for name in there if name in evaluations and evaluations[name].bucket in buckets]
        stays = {name: any(self._stays(node_id) for node_id in available.group(name).node_ids) for name in names}
        for name in sorted(names, key=lambda name: (name not in one.reason.kept, stays[name], name)):
            kept_for = {kept[node_id] for node_id in available.group(name).node_ids if node_id in kept}
            if kept_for <= {one.job.spec.job_id} and available.suits(name) and self._is_enough(available, name):
                yield name

    def _yields(self, node_id: str) -> bool:
        return self._stays(node_id) and self._on[node_id] in self._yielding

    def _stays(self, node_id: str) -> bool:
        return node_id in self._on and self._on[node_id] not in self._leaving

    def _is_enough(self, available: Availability, name: str) -> bool:
        found, has_room, taken = (
            available.candidates.evaluations[name],
            available.requirement.has_room,
            self._plan.taken,
        )
        hosts = (worker for worker in found.eligible if not available.avoids(worker))
        free = sum(has_room(self._without_spares(worker), taken.get(worker.node_id)) for worker in hosts)
        in_use = found.status is not Status.UNSUITABLE and not available.is_free(name)
        return in_use and free >= available.tasks(name)

    def _without_spares(self, worker: Worker) -> Worker:
        spare = self._on.get(worker.node_id)
        left = {who: held for who, held in worker.occupants.items() if who[1].job_id != spare}
        return replace(worker, occupants=left) if len(left) < len(worker.occupants) else worker
