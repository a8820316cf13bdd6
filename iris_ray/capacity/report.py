"""The report of a provisioner for people: its requests and slices, with their age and price. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from iris_ray.capacity.core import CapacityReport, SliceBatch, Trouble
from iris_ray.capacity.holdings import Settings
from iris_ray.capacity.prices import Prices
from iris_ray.capacity.provider import COMING, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioning import Joined
from iris_ray.capacity.provisioning_actions import Action, TakeBack, Wait
from iris_ray.capacity.provisioning_history import ProvisioningHistory
from iris_ray.model.topology import TPUConfig

_Kind = tuple[TPUConfig, Source, bool]


def capacity_report(
    settings: Settings,
    found: Sequence[QueuedSlice],
    joined: Mapping[str, Joined],
    history: ProvisioningHistory,
    actions: Sequence[Action],
    undeleted: Mapping[str, str],
    prices: Prices,
    now: float,
    date: float,
) -> CapacityReport:
    """Return the report after a turn.

    Args:
        settings, found, joined, history: as for `plan`; ``history`` has the requests of this turn.
        actions: the plan.
        undeleted: why slices that are to go stay, by name.
        prices: of chips.
        now: seconds on the monotonic clock of ``history``.
        date: the same moment in seconds since the epoch.
    """
    asked_at: defaultdict[_Kind, list[float]] = defaultdict(list)
    for config, source, is_joined, since in _slices(settings, found, joined, history, now, date):
        asked_at[config, source, is_joined].append(since)
    batches = []
    for (config, source, is_joined), times in asked_at.items():
        chips, price = config.chip_count * len(times), prices.chip_hour(config, source.zone, source.market)
        batches.append(
            SliceBatch(
                tpu_type=config.name,
                source=str(source),
                market=source.market.value,
                joined=is_joined,
                slices=len(times),
                chips=chips,
                since=min(times),
                hourly=None if price is None else price * chips,
            )
        )
    return CapacityReport(
        owner=settings.owner,
        tpu_types=tuple(config.name for config in settings.configs),
        batches=tuple(batches),
        troubles=tuple(
            Trouble(config.name, str(source), past.failures, past.last_failure)
            for source in settings.sources
            for config in settings.configs
            for past in [history.at(source.key, config.name)]
            if past.failures
        ),
        waits=tuple((action.tpu_type, action.reason) for action in actions if isinstance(action, Wait)),
        currency=prices.currency,
        undeleted=tuple(undeleted.items()),
        taken_back=tuple((action.tpu_type, action.text) for action in actions if isinstance(action, TakeBack)),
    )


def _slices(
    settings: Settings,
    found: Sequence[QueuedSlice],
    joined: Mapping[str, Joined],
    history: ProvisioningHistory,
    now: float,
    date: float,
) -> Iterator[tuple[TPUConfig, Source, bool, float]]:
    """Yield type, source, whether it has joined and the time of the request of each slice that can be used, or will."""
    sources = {source.key: source for source in settings.sources}
    for one in found:
        config = settings.config_of(one.name)
        if settings.owns(one) and config is not None and one.state in (*COMING, QueuedState.ACTIVE):
            is_joined = one.name in joined and joined[one.name].whole
            yield config, Source(one.location, one.market, one.reservation), is_joined, one.asked_at
    known = {one.name for one in found}
    for name, asked in history.unconfirmed.items():
        config, source = settings.config_of(name), sources.get(asked.source)
        if name not in known and config is not None and source is not None:
            yield (
                config,
                Source(source.location, source.market, source.reservation),
                False,
                date - (now - asked.asked_at),
            )
