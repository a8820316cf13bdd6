"""The requests and slices of provisioners, and which process may work under each name.

Reports are in memory only, as each provisioner sends them again at every look. Leases are recorded: otherwise a process
that waits could have a name as soon as the Controller is restarted, while another one works under it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.services import Gauge, PlainValue
from iris_ray.capacity.autoscaler import since_words
from iris_ray.capacity.core import CapacityReport, SliceBatch, chip_hour
from iris_ray.errors import ProvisionerTakenError
from iris_ray.model.checks import Seconds, require

KEPT_S = 900.0
"""How long the last report of a silent provisioner is shown."""
MOST_OWNERS, MOST_BATCHES = 100, 100
MISSED_S = 86_400.0
"""How long a provisioner that sends no reports counts as overdue."""
LEASE = Seconds(0, most=3 * 86_400.0)
"""How long a process may have a name without a word: longer than the longest interval of a provisioner, a day."""


@dataclass(slots=True)
class _Lease:
    """The right of one process to a provisioner's name; times are of the Controller's clock.

    Attributes:
        until: when another process may have the name.
        due: when the next report of the provisioner should have come.
    """

    instance: str
    seconds: float
    until: float
    due: float


class CapacityBoard:
    """The latest report of each provisioner, and which process may work under its name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, CapacityReport]] = {}
        self._leases: dict[str, _Lease] = {}

    def record(self) -> bytes:
        """Return the leases, for a successor."""
        return json.dumps({owner: asdict(one) for owner, one in self._leases.items()}).encode()

    def restore(self, recorded: bytes) -> None:
        """Take up an earlier Controller's leases."""
        self._leases = {owner: _Lease(**about) for owner, about in json.loads(recorded).items()}

    def lease(self, owner: str, instance: str, seconds: float) -> bool:
        """Let one process use a provisioner's name for some seconds. 0: the process ends, and is not overdue.

        Return whether the process was the last one that had the name.

        Raises:
            InvalidRequestError: the time is not one of `LEASE`.
            ProvisionerTakenError: another process has the name.
        """
        require("seconds", seconds, LEASE)
        now, held = self._clock.now(), self._leases.get(owner)
        if held is not None and held.instance != instance and now < held.until:
            raise ProvisionerTakenError(
                f"another provisioner is named {owner}: {held.instance}. Two would ask for the same slices, so this one"
                f" waits until that one has been silent for {held.until - now:.0f} s more; end one, or give it another"
                " --name"
            )
        self._leases.pop(owner, None)
        is_last = held is not None and held.instance == instance
        if not seconds:
            return is_last
        self._leases[owner] = _Lease(instance, seconds, now + seconds, held.due if held else now + seconds)
        if len(self._leases) > MOST_OWNERS:
            del self._leases[next(iter(self._leases))]
        return is_last

    def take(self, report: CapacityReport) -> None:
        """Replace the report of a provisioner; keep at most `MOST_BATCHES` of its batches, and of everything else."""
        parts = {field.name: getattr(report, field.name) for field in fields(report)}
        lists: dict[str, Any] = {name: part[:MOST_BATCHES] for name, part in parts.items() if isinstance(part, tuple)}
        self._reports.pop(report.owner, None)
        self._reports[report.owner] = self._clock.now(), replace(report, **lists)
        if len(self._reports) > MOST_OWNERS:
            del self._reports[next(iter(self._reports))]
        if (lease := self._leases.get(report.owner)) is not None:
            lease.due = self._clock.now() + lease.seconds

    def overdue(self) -> dict[str, float]:
        """Return by how many seconds the report of each provisioner is late, unless the provisioner has ended."""
        now = self._clock.now()
        self._leases = {owner: one for owner, one in self._leases.items() if now - one.due < MISSED_S}
        return {owner: max(0.0, now - one.due) for owner, one in self._leases.items()}

    def reports(self) -> list[CapacityReport]:
        """Return the reports of the provisioners that are not silent."""
        now = self._clock.now()
        looks_s = {owner: lease.seconds for owner, lease in self._leases.items()}
        self._reports = {
            name: (at, one) for name, (at, one) in self._reports.items() if now - at < KEPT_S + looks_s.get(name, 0.0)
        }
        return [one for _, one in self._reports.values()]

    def prices(self) -> dict[str, tuple[float, str]]:
        """Return the price of a chip-hour and its currency, by the types of which provisioners tell one."""
        reports = self.reports()
        types = {batch.tpu_type for report in reports for batch in report.batches}
        found = {tpu_type: chip_hour(reports, tpu_type) for tpu_type in sorted(types)}
        return {tpu_type: price for tpu_type, price in found.items() if price is not None}

    def words(self) -> dict[str, tuple[str, ...]]:
        """Return the open requests by type, in words: slices, source, time, price, and why there are no more."""
        found: dict[str, tuple[str, ...]] = {}
        for report in self.reports():
            for tpu_type in report.tpu_types:
                found[tpu_type] = (*found.get(tpu_type, ()), *self._words(report, tpu_type))
        return found

    def _words(self, report: CapacityReport, tpu_type: str) -> Iterator[str]:
        who = f"provisioner {report.owner}"
        coming = [batch for batch in report.batches if batch.tpu_type == tpu_type and not batch.joined]
        for batch in coming:
            yield f"{who} has asked for {batch.slices} in {batch.source} ({self._terms(batch, report.currency)})"
        taken_back = [what for about, what in report.taken_back if about == tpu_type]
        yield from (f"{who} {what}" for what in taken_back)
        waits = [why for about, why in report.waits if about == tpu_type]
        yield from (f"{who} asks for no more: {why}" for why in waits)
        if not (coming or waits or taken_back):
            yield f"{who} has asked for none"
        if not waits:
            troubles = (trouble for trouble in report.troubles if trouble.tpu_type == tpu_type)
            yield from (f"{trouble.source} is not asked now: {trouble.last}" for trouble in troubles)

    def _terms(self, batch: SliceBatch, currency: str) -> str:
        since = since_words(self.waited_s(batch)) if batch.since else ""
        price = "" if batch.hourly is None else f", {batch.hourly:,.2f} {currency} an hour"
        return f"{batch.market}{since}{price}"

    def waited_s(self, batch: SliceBatch) -> float:
        """Return for how many seconds the oldest of the slices has been asked for."""
        return max(0.0, self._clock.wall(self._clock.now()) - batch.since)

    def gauges(self) -> list[Gauge]:
        """Return the metrics of provisioners: a name, the values of the labels, and a value."""
        sums: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        largest: dict[tuple[str, tuple[str, ...]], float] = {}

        def note(name: str, labels: tuple[str, ...], value: float) -> None:
            largest[name, labels] = max(largest.get((name, labels), 0.0), value)

        for report in self.reports():
            for batch in report.batches:
                kind, paid = (batch.tpu_type, batch.source), (batch.tpu_type, batch.source, batch.market)
                sums["iris_provisioned_chips", (*paid, "held" if batch.joined else "asked")] += batch.chips
                if not batch.joined and batch.since:
                    note("iris_provisioning_oldest_request", kind, self.waited_s(batch))
                if batch.joined and batch.hourly is not None:
                    sums["iris_provisioned_cost_per_hour", (*paid, report.currency)] += batch.hourly
            if report.undeleted:
                sums["iris_provisioner_undeleted_slices", (report.owner,)] += len(report.undeleted)
            for trouble in report.troubles:
                note("iris_provisioner_failures", (report.owner, trouble.source), trouble.failures)
        for owner, late_s in self.overdue().items():
            note("iris_provisioner_overdue_seconds", (owner,), late_s)
        return [(*named, value) for named, value in {**sums, **largest}.items()]


def capacity_rows(reports: Iterable[CapacityReport]) -> dict[str, dict[str, PlainValue]]:
    """Return two rows for each provisioner, type and source: for requested slices and for present ones."""
    rows: dict[str, dict[str, PlainValue]] = {}
    for report in reports:
        last = {(trouble.tpu_type, trouble.source): trouble.last for trouble in report.troubles}
        for batch in report.batches:
            key = f"{report.owner}/{batch.tpu_type}/{batch.source}/{batch.market}/{batch.joined}"
            rows[key] = _row(report, batch, "" if batch.joined else last.get((batch.tpu_type, batch.source), ""))
        for tpu_type, why in report.waits:
            none = SliceBatch(tpu_type, "", "", joined=False, slices=0, chips=0, since=0.0)
            rows[f"{report.owner}/{tpu_type}/waits"] = _row(report, none, why)
    return rows


def _row(report: CapacityReport, batch: SliceBatch, note: str) -> dict[str, PlainValue]:
    found: dict[str, PlainValue] = asdict(batch)
    own = {"type": found.pop("tpu_type"), "since": batch.since or None, "note": note}
    return found | own | {"provisioner": report.owner, "currency": report.currency}
