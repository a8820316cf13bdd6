"""Who runs where: a pure function of a snapshot.

A gang takes whole groups (slices) of exactly its size, or nothing. The scheduler proposes; the controller commits.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from iris_ray.constraints import AttributeValue, matches_all
from iris_ray.jobs import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, Job, JobSpec, Worker, string_attribute


@dataclass(frozen=True, slots=True)
class Assignment:
    """A gang's place: ``groups[slice_id][worker_id]`` is a worker's id."""

    job_id: str
    group_names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


@dataclass(slots=True)
class SchedulingResult:
    """What to start, and why the rest waits (job id → a sentence)."""

    assignments: list[Assignment] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that share a value of ``group_by``, by host number."""

    name: str
    workers: tuple[Worker, ...]

    @property
    def type_name(self) -> str:
        return string_attribute(self.workers[0].attributes, TPU_TOPOLOGY) or "unknown type"

    def full_size(self, spec: JobSpec) -> int:
        """How many hosts the group has when it is complete; 0 if its hosts disagree about that."""
        reported = {w.attributes.get(TPU_VM_COUNT, AttributeValue(spec.replicas)) for w in self.workers}
        size = reported.pop().value
        return size if isinstance(size, int) and not reported else 0

    def defect(self, spec: JobSpec, now: float) -> str | None:
        """What makes the group useless for the job, whoever uses it; None if nothing does."""
        present = [w.host_number for w in self.workers]
        if None in present:
            return f"{self.name}: a host has no worker id"
        if len(present) != len(set(present)):
            return f"{self.name}: two hosts claim the same worker id"
        size = self.full_size(spec)
        if not size:
            return f"{self.name}: its hosts disagree about how many they are"
        if size != spec.replicas and not spec.whole_groups:
            return f"{self.name}: has {size} hosts, the job needs {spec.replicas}"
        if missing := [i for i in range(size) if i not in present]:
            return f"{self.name}: host {', '.join(map(str, missing))} of {size} is missing"
        if len(present) > size:
            return f"{self.name}: has more hosts than the {size} of its type"
        for worker in self.workers:
            host = f"{self.name}: host {worker.host_number}"
            if worker.draining:
                return f"{host} is draining ({worker.draining})"
            if worker.suspected and now < worker.suspected_until:
                return f"{host} may be lost ({worker.suspected})"
            if worker.foreign:
                return f"{self.name}: {worker.foreign}"
            for resource, need in spec.demand(worker).items():
                if (have := worker.resources.get(resource, 0.0)) < need:
                    return f"{host} has {have:g} {resource}, a task needs {need:g}"
        return None

    def user(self) -> str | None:
        """The job that the group is taken by; None if it is free."""
        for worker in self.workers:
            for task_id, _ in worker.occupants:
                return task_id.rpartition("/")[0]
        return None

    @property
    def ending(self) -> bool:
        """Whether what runs here is over and only waits for its end to be confirmed."""
        return all(worker.occupants.keys() <= worker.ending for worker in self.workers)


class Scheduler:
    """Stateless: everything it knows comes in through the arguments."""

    def find_assignments(
        self, pending: Iterable[Job], workers: Iterable[Worker], holders: Mapping[str, str], now: float
    ) -> SchedulingResult:
        """Place pending jobs, oldest first; a job that does not fit lets those behind it pass.

        Args:
            pending: jobs that wait, oldest first.
            workers: all live workers.
            holders: slice name → owner that keeps it warm; a job prefers slices of its own owner, then unheld ones,
                then those that another owner would have to give up.
            now: seconds on the clock of ``Job.not_before``.
        """
        workers = list(workers)
        result = SchedulingResult()
        taken: dict[str, str] = {}  # worker id → job that got it in this cycle
        groups_by_key: dict[str, list[Group]] = {}
        for job in pending:
            if job.not_before > now:
                result.waiting[job.spec.job_id] = (
                    f"pausing {job.not_before - now:.0f} s after a launch that failed: {job.error}"
                )
                continue
            key = job.spec.coscheduling.group_by
            if key not in groups_by_key:
                groups_by_key[key] = _groups(workers, key)
            placed = _place(job.spec, groups_by_key[key], holders, taken, now)
            if isinstance(placed, str):
                result.waiting[job.spec.job_id] = placed
            else:
                result.assignments.append(placed)
                taken.update({worker_id: job.spec.job_id for group in placed.groups for worker_id in group})
        return result


def _groups(workers: Iterable[Worker], key: str) -> list[Group]:
    members: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        if name := string_attribute(worker.attributes, key):
            members[name].append(worker)

    def by_number(worker: Worker) -> int:
        return -1 if worker.host_number is None else worker.host_number

    return [Group(name, tuple(sorted(workers, key=by_number))) for name, workers in sorted(members.items())]


def _place(
    spec: JobSpec, groups: list[Group], holders: Mapping[str, str], taken: Mapping[str, str], now: float
) -> Assignment | str:
    """An assignment, or the reason why there is none."""
    free: list[Group] = []
    soon: list[Group] = []  # taken, but about to be free
    obstacles: list[str] = []
    for group in groups:
        try:
            if not all(matches_all(spec.constraints, w.attributes) for w in group.workers):
                continue
        except TypeError as error:
            obstacles.append(f"{group.name}: its constraints can't be evaluated: {error}")
            continue
        winner = next((taken[w.worker_id] for w in group.workers if w.worker_id in taken), None)
        if defect := group.defect(spec, now):
            obstacles.append(defect)
        elif winner:
            obstacles.append(f"{group.name}: goes to {winner}")
        elif user := group.user():
            soon += [group] if group.ending else []
            obstacles.append(f"{group.name}: {'just left' if group.ending else 'in use'} by {user}")
        else:
            free.append(group)

    if spec.whole_groups and free:  # slices of one gang are equal: of the sizes that there are, the most frequent
        sizes = Counter(len(group.workers) for group in free)
        size = max(sizes, key=lambda s: (sizes[s], s))
        free = [group for group in free if len(group.workers) == size]
        soon = [group for group in soon if len(group.workers) == size]
    counts = [n for n in spec.coscheduling.num_groups if n <= len(free)]
    better = [n for n in spec.coscheduling.num_groups if len(free) < n <= len(free) + len(soon)]
    if not counts or better:  # for a larger count it is worth to wait until an ended attempt is gone
        return _waiting_reason(spec, groups, len(free), obstacles)

    def cost(group: Group) -> int:
        holder = holders.get(group.name)
        return 0 if holder == spec.owner else 1 if holder is None else 2

    best = sorted(free, key=cost)[: max(counts)]  # stable: by name within equal cost
    chosen = sorted(best, key=lambda g: g.name)
    return Assignment(
        spec.job_id, tuple(g.name for g in chosen), tuple(tuple(w.worker_id for w in g.workers) for g in chosen)
    )


def _waiting_reason(spec: JobSpec, groups: list[Group], free: int, obstacles: list[str]) -> str:
    counts = spec.coscheduling.num_groups
    what = "slice" if spec.coscheduling.group_by == TPU_NAME else f"group by {spec.coscheduling.group_by}"
    conditions = " and ".join(map(str, spec.constraints)) or "any"
    plural = "" if counts == (1,) else "s"
    reason = f"waiting for {' or '.join(map(str, counts))} {what}{plural} ({conditions}); {free} free"
    if obstacles:
        return f"{reason}; {'; '.join(obstacles[:4])}" + ("; …" if len(obstacles) > 4 else "")
    if free:
        return reason
    types: dict[str, int] = defaultdict(int)
    for group in groups:
        types[group.type_name] += 1
    there_are = (
        ", ".join(f"{n} × {name}" for name, n in sorted(types.items()))
        or "no TPU hosts at all (to try without: SimulatedCluster)"
    )
    return f"{reason}; none like that in the cluster, which has {there_are}"
