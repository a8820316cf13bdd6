"""The cluster as tables of rows for the pages, kept up to date by the Controller's changes."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from iris_ray.actors.protocol.overview import Changes
from iris_ray.actors.protocol.status import PAGE, HostCondition, JobStatus, WorkerStatus
from iris_ray.dashboard.happenings import Happening, as_row, of_job, of_slice
from iris_ray.dashboard.rows import (
    Diff,
    Row,
    Table,
    job_row,
    queue_row,
    slice_row,
    user_rows,
)

HAPPENINGS_KEPT = 500
OF_SERVICES = "teams", "capacity"
"""Tables that services fill."""
TABLES = "cluster", "slices", "jobs", "queue", "users", "teams", "capacity", "events"


class ClusterView:
    """Tables: ``cluster`` (one row, "now"), ``slices``, ``jobs``, ``queue``, ``users``, ``teams``, ``capacity`` and
    ``events``.

    ``clock`` returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.tables = {name: Table() for name in TABLES}
        self._clock = clock
        self._hosts: dict[str, WorkerStatus] = {}
        self._unusable: set[str] = set()  # node ids of hosts that no job can get
        self._members: dict[str, dict[str, None]] = {}  # slice → node ids
        self._spares: dict[str, str] = {}  # spare job → the job for which it holds slices ready
        self._happened: deque[int] = deque()
        self._last_happening = 0
        self._order: list[str] = []
        self._waiting = 0
        self._failing: list[str] = []

    def begin(self, jobs: Iterable[JobStatus], hosts: Iterable[WorkerStatus]) -> None:
        """Show these jobs and hosts and no others, without events: the Controller has listed all of them anew."""
        jobs, hosts = list(jobs), list(hosts)
        job_ids, node_ids = {job.job_id for job in jobs}, {host.node_id for host in hosts}
        self._take_jobs(jobs, [job_id for job_id in self.tables["jobs"].rows if job_id not in job_ids], silent=True)
        self._take_hosts(hosts, [node_id for node_id in self._hosts if node_id not in node_ids], silent=True)

    def apply(self, changes: Changes) -> None:
        """Show the changes."""
        self._take_jobs(changes.jobs, changes.forgotten)
        unusable = _unusable(changes.workers)  # all of them, unless they are more than a page
        gone = self._unusable - unusable if len(unusable) < PAGE else set()
        self._take_hosts(changes.workers, [*changes.lost, *gone])
        self.tables["queue"].replace({one.job_id: queue_row(one) for one in changes.queue})
        self.tables["users"].replace(user_rows(changes.limits, changes.shares))
        for name in OF_SERVICES:
            self.tables[name].replace({key: dict(row) for key, row in changes.tables.get(name, {}).items()})
        self._order, self._waiting = [one.job_id for one in changes.queue], changes.waiting
        self._failing = list(changes.failing)

    def take_changes(self, about: Row) -> Diff:
        """Return the rows that have changed since the last call. ``about`` is more to show in the cluster's row."""
        diff = Diff()
        for name in TABLES[1:]:
            self.tables[name].take_changes(name, diff)
        if diff.put or diff.drop or not self.tables["cluster"].rows:
            self._counts = self._count()
        now = {**about, **self._counts, "order": self._order, "waiting": self._waiting, "failing": self._failing}
        self.tables["cluster"].put("now", now)
        self.tables["cluster"].take_changes("cluster", diff)
        return diff

    def _take_jobs(self, jobs: Iterable[JobStatus], forgotten: Sequence[str], silent: bool = False) -> None:
        for job in jobs:
            if job.spare_for is not None:
                self._spares[job.job_id] = job.spare_for
            row = job_row(job)
            before = self.tables["jobs"].put(job.job_id, row)
            if not silent and before != row:
                self._note(of_job(before, row))
        for job_id in forgotten:
            self.tables["jobs"].drop(job_id)
            self._spares.pop(job_id, None)

    def _take_hosts(self, hosts: Sequence[WorkerStatus], lost: Sequence[str], silent: bool = False) -> None:
        touched: dict[str, None] = {}
        self._unusable = _unusable(hosts)
        for node_id in lost:
            self._forget_host(node_id, touched)
        for host in hosts:
            if self._hosts.get(host.node_id) != host:
                self._forget_host(host.node_id, touched)
                self._hosts[host.node_id] = host
                self._members.setdefault(_group(host), {})[host.node_id] = None
                touched[_group(host)] = None
        for name in touched:
            self._show_slice(name, silent)

    def _forget_host(self, node_id: str, touched: dict[str, None]) -> None:
        host = self._hosts.pop(node_id, None)
        if host is not None:
            members = self._members[_group(host)]
            del members[node_id]
            if not members:
                del self._members[_group(host)]
            touched[_group(host)] = None

    def _show_slice(self, name: str, silent: bool) -> None:
        members = [self._hosts[node_id] for node_id in self._members.get(name, ())]
        row = slice_row(members, self._spares) if members else None
        before = self.tables["slices"].put(name, row) if row else self.tables["slices"].drop(name)
        if not silent and before != row:
            self._note(of_slice(before, row))

    def _note(self, happenings: Iterable[Happening]) -> None:
        events = self.tables["events"]
        for happening in happenings:
            self._last_happening += 1
            events.put(str(self._last_happening), as_row(happening, self._last_happening, self._clock()))
            self._happened.append(self._last_happening)
            if len(self._happened) > HAPPENINGS_KEPT:
                events.drop(str(self._happened.popleft()))

    def _count(self) -> Row:
        slices, jobs = self.tables["slices"].rows.values(), self.tables["jobs"].rows.values()
        with_chips = [one for one in slices if one["chips"] or one["tpu"]]
        hosts: Counter[str] = Counter(host[1] for one in with_chips for host in one["hosts"])
        chips_in_use = sum(one["chips"] * _part_in_use(one) for one in slices)
        return {
            "hosts": dict(hosts),
            "slices": dict(Counter(one["state"] for one in slices if one["tpu"])),
            "chips": sum(one["chips"] for one in slices),
            "chips_in_use": round(chips_in_use),
            "jobs": dict(Counter(one["state"] for one in jobs if not one["spare_for"])),
        }


def _part_in_use(row: Row) -> float:
    there = [host for host in row["hosts"] if host[4] is not None]
    return sum(host[2] is not None for host in there) / len(there) if there else 0.0


def _unusable(hosts: Iterable[WorkerStatus]) -> set[str]:
    return {host.node_id for host in hosts if host.condition is HostCondition.UNUSABLE}


def _group(host: WorkerStatus) -> str:
    return host.slice_name or host.address
