"""What provisioners have asked for and hold. It is in memory only: they report it again at every look."""

from collections.abc import Iterator
from dataclasses import replace

from iris_ray.actors.controller.autoscaler_demand import since_words
from iris_ray.actors.controller.clock import Clock
from iris_ray.model.capacity import CapacityReport, Lot, chip_hour
from iris_ray.model.topology import get_tpu_config

KEPT_S = 900.0
"""How long the report of a provisioner that is silent is shown."""
MOST_OWNERS, MOST_LOTS = 100, 100


class CapacityBoard:
    """The latest report of each provisioner."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, CapacityReport]] = {}

    def take(self, report: CapacityReport) -> None:
        """Replace the report of a provisioner; what is shown of it has a limit."""
        self._reports.pop(report.owner, None)
        self._reports[report.owner] = self._clock.now(), replace(report, lots=report.lots[:MOST_LOTS])
        if len(self._reports) > MOST_OWNERS:
            del self._reports[next(iter(self._reports))]

    def reports(self) -> list[CapacityReport]:
        """Return the reports of the provisioners that are not silent."""
        now = self._clock.now()
        self._reports = {name: (at, one) for name, (at, one) in self._reports.items() if now - at < KEPT_S}
        return [one for _, one in self._reports.values()]

    def chip_hour(self, device: str) -> tuple[float, str] | None:
        """Return the price of a chip-hour of a type and its currency; None if no provisioner tells one."""
        return chip_hour(self.reports(), get_tpu_config(device).name) if self._reports else None

    def words(self, device: str) -> tuple[str, ...]:
        """Return what is asked for of a type: how many slices, where, since when, at what price, and why no more."""
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
        coming = [lot for lot in report.lots if lot.tpu_type == tpu_type and not lot.joined]
        for lot in coming:
            yield f"{who} has asked for {lot.slices} in {lot.source} ({self._terms(lot, report.currency)})"
        troubles = {trouble.source: trouble.last for trouble in report.troubles}
        waits = [why for about, why in report.waits if about == tpu_type]
        yield from (f"{who} asks for no more: {why}" for why in waits)
        if not coming and not waits:
            yield f"{who} has asked for none"
        if not waits:
            yield from (f"{source} is not asked now: {last}" for source, last in troubles.items())

    def _terms(self, lot: Lot, currency: str) -> str:
        since = since_words(self.waited_s(lot)) if lot.since else ""
        price = "" if lot.hourly is None else f", {lot.hourly:,.2f} {currency} an hour"
        return f"{lot.market}{since}{price}"

    def waited_s(self, lot: Lot) -> float:
        """Return for how many seconds the oldest of the slices has been asked for."""
        return max(0.0, self._clock.wall(self._clock.now()) - lot.since)
