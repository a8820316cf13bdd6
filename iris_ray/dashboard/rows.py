"""The tables of the pages: rows of jobs, hosts and users, and their changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from iris_ray.actors.protocol.overview import UserShare, WaitingJob, as_json
from iris_ray.actors.protocol.status import (
    HostCondition,
    JobStatus,
    LimitStatus,
    WorkerStatus,
    fields_in,
)
from iris_ray.dashboard.slices import SliceView, reason_of, slices_of
from iris_ray.model.lifecycle import job_of
from iris_ray.model.limits import EVERYBODY
from iris_ray.model.workers import GPU, TPU

Row = Mapping[str, Any]
"""Values of JSON by name."""


@dataclass(slots=True)
class Diff:
    """Changes of tables.

    Attributes:
        put: table → key → the new row.
        drop: table → keys of removed rows.
    """

    put: dict[str, dict[str, Row]] = field(default_factory=dict)
    drop: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.put and not self.drop


class Table:
    """Rows by key, and the keys that have changed since the last `take_changes`."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._changed: dict[str, None] = {}

    def put(self, key: str, row: Row) -> Row | None:
        """Add or replace a row. Return the row before; None if there was none."""
        before = self.rows.get(key)
        if before != row:
            self.rows[key] = row
            self._changed[key] = None
        return before

    def drop(self, key: str) -> Row | None:
        """Remove a row and return it, if it is there."""
        row = self.rows.pop(key, None)
        if row is not None:
            self._changed[key] = None
        return row

    def replace(self, rows: Mapping[str, Row]) -> None:
        """Replace all rows."""
        for key in self.rows.keys() - rows.keys():
            self.drop(key)
        for key, row in rows.items():
            self.put(key, row)

    def take_changes(self, name: str, diff: Diff) -> None:
        """Add the changes since the last call to a diff, under this table's name."""
        put = {key: self.rows[key] for key in self._changed if key in self.rows}
        drop = [key for key in self._changed if key not in self.rows]
        if put:
            diff.put[name] = put
        if drop:
            diff.drop[name] = drop
        self._changed.clear()


def slice_row(hosts: Sequence[WorkerStatus], spares: Mapping[str, str]) -> Row:
    """Return the row of a slice, or of a single host without one.

    A host in ``hosts`` is ``[number, condition, job, why, address, node id]``; a missing host has no address.
    """
    (view,) = slices_of(hosts)
    rows = [_host(host, spares) for host in view.hosts]
    there = {host.host_index for host in view.hosts}
    rows += [_missing(number) for number in range(view.hosts_expected) if number not in there and view.is_slice]
    return {
        "name": view.slice,
        "type": view.type or _kind(view),
        "tpu": view.is_slice,
        "state": view.state.value,
        "jobs": list(dict.fromkeys(spares.get(job, job) for job in view.jobs)),
        "why": view.reason,
        "chips": sum(host.resources.get(TPU, 0.0) + host.resources.get(GPU, 0.0) for host in view.hosts),
        "hosts": sorted(rows, key=lambda row: (row[0] is None, row[0] or 0)),
    }


def _host(host: WorkerStatus, spares: Mapping[str, str]) -> list[str | int | None]:
    jobs = dict.fromkeys(spares.get(job, job) for job in map(job_of, host.tasks))
    return [host.host_index, host.condition.value, next(iter(jobs), None), reason_of(host), host.address, host.node_id]


def _missing(number: int) -> list[str | int | None]:
    return [number, HostCondition.LOST.value, None, "it is missing: the slice is not complete", None, None]


def _kind(view: SliceView) -> str:
    gpus = sum(host.resources.get(GPU, 0.0) for host in view.hosts)
    return "GPU" if gpus else "no TPU"


ERROR_CHARACTERS = 300
"""The length of errors in the table of jobs; the job's page has the whole error."""


def job_row(job: JobStatus) -> Row:
    return {there: as_json(getattr(job, name)) for name, there in fields_in("row").items()} | {
        "band": job.priority.name.lower(),
        "state": "starting" if job.starting else job.state.value,
        "over": job.state.finished,
        "tasks": {state.value: count for state, count in job.tasks.items() if count},
        "error": job.error[:ERROR_CHARACTERS] if job.error else None,
        "gives_way": job.gives_way and {"to": job.gives_way[0], "until": job.gives_way[1]},
    }


def queue_row(waiting: WaitingJob) -> Row:
    return {"why": waiting.why, "kind": waiting.kind.lower(), "since": waiting.since}


def user_rows(limits: Iterable[LimitStatus], shares: Iterable[UserShare]) -> Mapping[str, Row]:
    """Return a row for each user who holds resources now, held some lately, or has limits."""
    rows: dict[str, dict[str, Any]] = {}
    for share in shares:
        row = rows.setdefault(share.user, _row(share.user))
        row |= {"share": share.now, "counted": share.counted, "chip_hours": round(share.chip_hours, 1)}
    for limit in limits:
        if limit.user != EVERYBODY:
            row = rows.setdefault(limit.user, _row(limit.user))
            row["chips"] += limit.chips
            row["running"] += limit.running_jobs
            row["queued"] += limit.queued_jobs
            row["tasks"] += limit.tasks
            row["bands"].append(_band(limit))
    return rows


def _row(user: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("share", "counted", "chip_hours", "chips", "running", "queued", "tasks"), 0)
    return {"user": user, **nothing, "bands": []}


def _band(limit: LimitStatus) -> Row:
    return {
        "band": limit.band.name.lower(),
        "chips": limit.chips,
        "running": limit.running_jobs,
        "queued": limit.queued_jobs,
        "limits": {name: value for name, value in limit.set_here.items() if value is not None},
    }
