"""The requests and slices of a provisioner, in words and numbers for people."""

from collections.abc import Iterable
from dataclasses import dataclass

from iris_ray.model.plain_values import Words


@dataclass(frozen=True, slots=True)
class SliceBatch:
    """Slices of one type, source and state.

    Attributes:
        tpu_type: such as ``v6e-16``.
        source: the zone, or the reservation and its zone.
        market: how they are paid for, such as ``spot``.
        joined: whether they are in the cluster whole; otherwise they are asked for, on their way or broken.
        slices: how many.
        chips: of all of them.
        since: when the oldest was asked for; seconds since the epoch, 0 if unknown.
        hourly: their price for an hour; None if it is unknown.
    """

    tpu_type: str
    source: str
    market: str
    joined: bool
    slices: int
    chips: int
    since: float
    hourly: float | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """A source from which no slice of a type is asked for during a pause.

    Attributes:
        tpu_type: such as ``v6e-16``.
        source: the zone, or the reservation and its zone.
        failures: how many in a row.
        last: the last of them, in a sentence.
    """

    tpu_type: str
    source: str
    failures: int
    last: Words


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The report of one provisioner.

    Attributes:
        owner: its name.
        tpu_types: the types that it brings.
        batches: its requests and slices.
        troubles: its sources that have failed, by type.
        waits: by type, why it asks for no more, although jobs wait.
        taken_back: by type, for which job which slices of other types go.
        currency: of prices.
        undeleted: the slices that it can't delete now, with the reason.
    """

    owner: str
    tpu_types: tuple[str, ...] = ()
    batches: tuple[SliceBatch, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    waits: tuple[tuple[str, Words], ...] = ()
    currency: str = "USD"
    undeleted: tuple[tuple[str, Words], ...] = ()
    taken_back: tuple[tuple[str, Words], ...] = ()


def chip_hour(reports: Iterable[CapacityReport], tpu_type: str) -> tuple[float, str] | None:
    """Return the price of a chip-hour of a type and its currency: the mean over the slices that provisioners hold.

    None if none of them has a price. Slices in other currencies than the first one don't count.
    """
    batches = [(report.currency, batch) for report in reports for batch in report.batches]
    priced = [
        (currency, batch) for currency, batch in batches if batch.joined and batch.chips and batch.tpu_type == tpu_type
    ]
    found = [(currency, batch.hourly, batch.chips) for currency, batch in priced if batch.hourly is not None]
    if not found:
        return None
    same = [(hourly, chips) for currency, hourly, chips in found if currency == found[0][0]]
    return sum(hourly for hourly, _ in same) / sum(chips for _, chips in same), found[0][0]
