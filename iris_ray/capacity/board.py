"""What provisioners have asked for and hold. It is in memory only: they report it again at every look."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from iris_ray.actors.controller.clock import Clock
from iris_ray.capacity.autoscaler import since_words
from iris_ray.capacity.core import CapacityReport, SliceBatch, chip_hour
from iris_ray.errors import ProvisionerTakenError
from iris_ray.model.topology import get_tpu_config

KEPT_S = 900.0
"""How long the last report of a silent provisioner is shown."""
MOST_OWNERS, MOST_BATCHES = 100, 100
MISSED_S = 86_400.0
"""How long a provisioner that sends no reports counts as overdue."""


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

    def lease(self, owner: str, instance: str, seconds: float) -> None:
        """Let one process use a provisioner's name for some seconds. 0: the process ends, and is not overdue.

        Raises:
            ProvisionerTakenError: another process has the name.
        """
        now, held = self._clock.now(), self._leases.get(owner)
        if held is not None and held.instance != instance and now < held.until:
            raise ProvisionerTakenError(
                f"another provisioner is named {owner}: {held.instance}. Two would ask for the same slices, so this one"
                f" waits until that one has been silent for {held.until - now:.0f} s more; end one, or give it another"
                " --name"
            )
        if not seconds:
            self._leases.pop(owner, None)
            return
        self._leases.pop(owner, None)
        self._leases[owner] = _Lease(instance, seconds, now + seconds, held.due if held else now + seconds)
        if len(self._leases) > MOST_OWNERS:
            del self._leases[next(iter(self._leases))]

    def take(self, report: CapacityReport) -> None:
        """Replace the report of a provisioner; keep at most `MOST_BATCHES` of its batches."""
        self._reports.pop(report.owner, None)
        self._reports[report.owner] = self._clock.now(), replace(report, batches=report.batches[:MOST_BATCHES])
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

    def chip_hour(self, device: str) -> tuple[float, str] | None:
        """Return the price of a chip-hour of a type and its currency; None if no provisioner tells one."""
        return chip_hour(self.reports(), get_tpu_config(device).name) if self._reports else None

    def words(self, device: str) -> tuple[str, ...]:
        """Return the open requests of a type in words: slices, source, time, price, and why there are no more."""
        if not self._reports:
            return ()
        tpu_type = get_tpu_config(device).name
        return tuple(
            words
            for report in self.reports()
            if tpu_type in report.tpu_types
            for words in self._words(report, tpu_type)
        )

    def _words(self, report: CapacityReport, tpu_type: str) -> Iterator[str]:
        who = f"provisioner {report.owner}"
        coming = [batch for batch in report.batches if batch.tpu_type == tpu_type and not batch.joined]
        for batch in coming:
            yield f"{who} has asked for {batch.slices} in {batch.source} ({self._terms(batch, report.currency)})"
        waits = [why for about, why in report.waits if about == tpu_type]
        yield from (f"{who} asks for no more: {why}" for why in waits)
        if not coming and not waits:
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
