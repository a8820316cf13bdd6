"""Plans which slices to request, where, and which to delete. `iris-ray cluster provision` carries it out.

Every slice is a resource of its own at the provider: to repair one of several, the provider would restart all of them.
It holds quota until it is deleted, whatever its state, so FAILED and SUSPENDED ones are deleted. A provisioner owns
the slices with its label and its prefix in the name; it neither touches nor counts others.

Sources are asked in their order. One that fails, refuses or lets a request wait for too long pauses for that type of
slices, and the next one is asked; when its pause is over, it is the first choice again. The slices that a gang misses
are requested from one source.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from iris_ray.capacity.demand import ARRIVAL_S
from iris_ray.capacity.provider import CANCELLABLE, COMING, OWNER_LABEL, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioning_history import ProvisioningHistory, Unconfirmed
from iris_ray.model.topology import TPUConfig

JOIN_S, BROKEN_S, STUCK_S = 1800.0, 300.0, 3600.0
"""How long an ACTIVE slice may take to join the cluster whole, how long it may lack hosts that it had, and how long it
may be PROVISIONING."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one provisioner.

    Attributes:
        owner: its name, in the label and in the names of its slices.
        configs: the types of its slices.
        sources: where they come from, the preferred one first.
        least, most: how many slices of each type it keeps at least, and holds at most, including those that only hold
            quota; None: as many as the budget allows.
        idle_s: seconds after which an unneeded slice is deleted.
        max_wait_s: seconds after which a request that still waits is given up, if another source can be asked.
        budget: how many chips it asks for and holds at most, of all types and sources together; None: no limit.
    """

    owner: str
    configs: tuple[TPUConfig, ...]
    sources: tuple[Source, ...]
    least: int
    most: int | None
    idle_s: float
    max_wait_s: float = math.inf
    budget: int | None = None

    def prefix(self, config: TPUConfig) -> str:
        return f"iris-{self.owner}-{config.name}-"

    def config_of(self, name: str) -> TPUConfig | None:
        """Return the type of the slice of this provisioner that has this name, or None."""
        return next((config for config in self.configs if name.startswith(self.prefix(config))), None)

    def holds(self, found: QueuedSlice) -> bool:
        """Return whether a slice counts towards the budget: a provisioner of this name has made it, of any type."""
        return found.labels.get(OWNER_LABEL) == self.owner and found.name.startswith(f"iris-{self.owner}-")

    def owns(self, found: QueuedSlice) -> bool:
        """Return whether this provisioner has made a slice."""
        return self.holds(found) and self.config_of(found.name) is not None

    def most_of(self, config: TPUConfig) -> int:
        """Return how many slices of a type it may hold at most."""
        by_budget = (self.budget or 0) // config.chip_count
        return min((one for one in (self.most, self.budget and by_budget) if one is not None), default=0)


@dataclass(frozen=True, slots=True)
class Joined:
    """A slice with hosts in the cluster.

    Attributes:
        whole: whether all of its hosts are in the cluster.
        in_use: whether a job runs on it, a process keeps it warm, or other Ray work uses its chips.
        closed: whether a provisioner has closed it to new jobs, to delete it.
    """

    whole: bool
    in_use: bool
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Request a slice of this name; an earlier plan may have requested it already."""

    name: str
    config: TPUConfig
    source: Source
    reason: str

    def __str__(self) -> str:
        return f"create {self.name} in {self.source}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a slice; with ``if_unused`` only if no job has started on it meanwhile."""

    name: str
    reason: str
    if_unused: bool = False

    def __str__(self) -> str:
        return f"delete {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Slices of a type are wanted, but can't be requested now."""

    tpu_type: str
    reason: str

    def __str__(self) -> str:
        return f"wait: {self.reason}"


Action = Create | Delete | Wait


def plan(
    settings: Settings,
    demand: Mapping[str, Sequence[int]] | None,
    found: Sequence[QueuedSlice],
    joined: Mapping[str, Joined],
    history: ProvisioningHistory,
    now: float,
    date: float,
    unlisted: Collection[str] = (),
) -> list[Action]:
    """Return the actions to take now, each with its reason.

    Args:
        settings: the provisioner's settings.
        demand: how many slices of each type each waiting gang misses, the first to be served first; None if the cluster
            could not be asked.
        found: all requested slices of all zones.
        joined: the slices that have hosts in the cluster; ignored if ``demand`` is None.
        history: the memory of earlier plans; this call changes it.
        now: seconds on a monotonic clock.
        date: seconds since the epoch, for new names.
        unlisted: the locations that could not be asked now; ``found`` has their slices as they were last seen.
    """
    ours = {one.name: one for one in found if settings.owns(one)}
    for name, asked in list(history.unconfirmed.items()):
        is_late = now - asked.asked_at > ARRIVAL_S and asked.location not in unlisted  # it may be there unseen
        if name in ours or is_late or settings.config_of(name) is None:
            del history.unconfirmed[name]
    history.forget_all_but([*ours, *history.unconfirmed])
    ledger = Holdings.of(settings, filter(settings.holds, found), history.unconfirmed)
    actions: list[Action] = []
    for config in settings.configs:
        gangs = None if demand is None else demand.get(config.name, ())
        there = joined if demand is not None else {}
        of_type = _TypePlan(settings, config, gangs, there, ledger, history, unlisted, now)
        mine = [one for one in ours.values() if settings.config_of(one.name) == config]
        actions += [*of_type.sort_out(mine), *of_type.move_on(), *of_type.release(), *of_type.obtain(date)]
    return actions


@dataclass(slots=True)
class Holdings:
    """The requested and held chips and slices, by which limits are kept. Each chip counts once, whatever its slice's
    size.

    Attributes:
        chips: all chips, of all types and sources.
        of_source: the chips of each source, by its key.
        of_type: the slices of each type, by its name.
    """

    settings: Settings
    chips: int = 0
    of_source: Counter[str] = field(default_factory=Counter)
    of_type: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(settings: Settings, held: Iterable[QueuedSlice], unconfirmed: Mapping[str, Unconfirmed]) -> "Holdings":
        ledger = Holdings(settings)
        for one in held:
            config = settings.config_of(one.name)
            ledger._add(one.chips, one.source, config.name if config else "")
        for name, asked in unconfirmed.items():
            if (config := settings.config_of(name)) is not None:
                ledger._add(config.chip_count, asked.source, config.name)
        return ledger

    def _add(self, chips: int, source: str, tpu_type: str, slices: int = 1) -> None:
        self.chips += chips
        self.of_source[source] += chips
        self.of_type[tpu_type] += slices

    def take(self, config: TPUConfig, source: Source, slices: int) -> None:
        """Count slices that are about to be requested."""
        self._add(config.chip_count * slices, source.key, config.name, slices)

    def room(self, config: TPUConfig) -> int:
        """Return how many more slices of a type may be requested from all sources together."""
        rooms = []
        if self.settings.most is not None:
            rooms.append(self.settings.most - self.of_type[config.name])
        if self.settings.budget is not None:
            rooms.append((self.settings.budget - self.chips) // config.chip_count)
        return max(0, min(rooms, default=0))

    def room_at(self, config: TPUConfig, source: Source) -> float:
        """Return how many more slices of a type the source has chips for, as far as that is known."""
        if source.chips is None:
            return math.inf
        return max(0, (source.chips - self.of_source[source.key]) // config.chip_count)

    def limits(self, config: TPUConfig, slices: int) -> str:
        """Return which limit keeps a number of slices from being requested."""
        most, budget = self.settings.most, self.settings.budget
        if most is not None and self.of_type[config.name] + slices > most:
            return f"{self.of_type[config.name]} of at most {most} are asked for or held (--max)"
        if budget is not None and self.chips + slices * config.chip_count > budget:
            each = config.chip_count
            return (
                f"{self.chips} of the budget of {budget} chips are asked for or held (--budget), and a slice has {each}"
            )
        full = (s for s in self.settings.sources if s.chips is not None and self.room_at(config, s) < slices)
        return ", ".join(
            f"{self.of_source[s.key]} of the {s.chips} chips of {s} are asked for or held (--reservation)" for s in full
        )


@dataclass(slots=True)
class _TypePlan:
    """The plan for the slices of one type, made step by step in the order of the methods.

    Attributes:
        gangs: how many slices each waiting gang misses; None if the cluster could not be asked.
        joined: the slices that have hosts in the cluster; none if it could not be asked.
        coming: the requested slices that are on their way.
        present: the slices that are in the cluster, or active while the cluster can't be asked.
    """

    settings: Settings
    config: TPUConfig
    gangs: Sequence[int] | None
    joined: Mapping[str, Joined]
    ledger: Holdings
    history: ProvisioningHistory
    unlisted: Collection[str]
    now: float
    coming: list[QueuedSlice] = field(default_factory=list)
    present: list[QueuedSlice] = field(default_factory=list)

    # -- sources ---------------------------------------------------------------------------------------------------

    def _with_room(self, slices: int) -> list[Source]:
        """Return the sources that have room for a number of slices together, pausing ones included."""
        return [one for one in self.settings.sources if self.ledger.room_at(self.config, one) >= slices]

    def _is_open(self, source: Source) -> bool:
        """Return whether a source does not pause and can be asked."""
        not_before = self.history.at(source.key, self.config.name).not_before
        return self.now >= not_before and source.location not in self.unlisted

    def _pauses(self, sources: Iterable[Source]) -> str:
        """Return why the sources are not asked now."""
        return "; ".join(
            f"{one} can't be asked"
            if one.location in self.unlisted
            else f"{one} for {past.pause_s:g} s after {past.failures} failures, the last: {past.last_failure}"
            for one in sources
            for past in [self.history.at(one.key, self.config.name)]
        )

    def _failed(self, one: QueuedSlice, why: str, at_least_s: float = 0.0) -> None:
        self.history.failed_once(one.name, one.source, self.config.name, self.now, f"{one.name}: {why}", at_least_s)

    def _lasting(self, what: str, name: str, holds: bool) -> float:
        return self.history.lasting(what, name, holds, self.now)

    # -- the steps -------------------------------------------------------------------------------------------------

    def sort_out(self, mine: Iterable[QueuedSlice]) -> list[Action]:
        """Delete failed, suspended and broken slices; sort the others into coming and present ones."""
        deletions: list[Action] = []
        for one in mine:
            in_cluster = one.name in self.joined and self.joined[one.name].whole
            has_joined = self.history.once_joined(one.name)  # a slice that comes again after that has lost its hosts
            may_be_there = one.state is QueuedState.ACTIVE or (has_joined and one.state in COMING)
            is_absent = self.gangs is not None and not in_cluster and may_be_there
            absent_s = self._lasting("absent", one.name, is_absent)
            if in_cluster:
                self.history.has_joined(one.name, one.source, self.config.name)
            has_lost_hosts = is_absent and has_joined
            if deletion := self._deletion(one, has_lost_hosts, absent_s):
                deletions.append(deletion)
            elif has_lost_hosts:
                continue  # neither coming nor there
            elif one.state in COMING or is_absent:
                self.coming.append(one)
            elif one.state is QueuedState.ACTIVE:
                self.present.append(one)
        return deletions

    def _deletion(self, one: QueuedSlice, has_lost_hosts: bool, absent_s: float) -> Delete | None:
        """Return the deletion of a slice that has failed, was suspended, is broken or never joined; otherwise None."""
        if one.state is QueuedState.FAILED:
            flag = f" (--reservation {one.reservation})" if one.reservation else ""
            self._failed(one, f"{one.error or 'it has failed'}{flag}")
            return Delete(one.name, f"it has failed{f' ({one.error})' if one.error else ''} and holds quota")
        if one.state is QueuedState.SUSPENDED:
            who = "the provider" if one.by_service else "a user"
            return Delete(one.name, f"it was suspended by {who} and holds quota")
        making_s = self._lasting("provisioning", one.name, one.state is QueuedState.PROVISIONING)
        if making_s > STUCK_S:
            why = f"it has been provisioned for {making_s / 60:.0f} minutes without becoming active"
            self._failed(one, why)
            return Delete(one.name, why, if_unused=True)
        if has_lost_hosts and absent_s > BROKEN_S:
            why = f"it has lacked hosts that it had for {absent_s / 60:.0f} minutes"
            return Delete(one.name, why, if_unused=True)
        if not has_lost_hosts and absent_s > JOIN_S:
            why = f"it is active, but not all of its hosts have joined the cluster after {absent_s / 60:.0f} minutes"
            self._failed(one, f"{why}; look at its start-up script's log")
            return Delete(one.name, why, if_unused=True)
        return None

    def move_on(self) -> list[Action]:
        """Give up a source's requests that have waited too long, if another open source has room for them all."""
        late: dict[str, list[tuple[QueuedSlice, float]]] = {}
        for one in self.coming:
            waits = one.state in CANCELLABLE
            waited_s = self._lasting("waiting", one.name, waits)
            if waits and waited_s >= self.settings.max_wait_s and one.location not in self.unlisted:
                late.setdefault(one.source, []).append((one, waited_s))
        moves: list[Action] = []
        for source, requests in late.items():
            others = [one for one in self._with_room(len(requests)) if one.key != source and self._is_open(one)]
            for one, waited_s in requests if others else ():
                why = f"it has waited for {waited_s:.0f} s, and {others[0]} can be asked instead"
                self._failed(one, why, self.settings.max_wait_s)
                self.coming.remove(one)
                moves.append(Delete(one.name, why))
        return moves

    def release(self) -> list[Action]:
        """Delete what no job can use, down to the least number: requests first, then the slices that are idle longest.

        A gang that needs more slices than may be held can't use any. A gang that has to wait for other jobs' slices can
        use new ones.
        """
        settings, here = (
            self.settings,
            {one.name: self.joined[one.name] for one in self.present if one.name in self.joined},
        )
        idle_now = sum(not one.in_use and not one.closed for one in here.values())
        most = settings.most_of(self.config)
        useful = sum(missing for missing in self.gangs or () if missing + idle_now <= most)
        requested = len(self.coming) + len(self._unconfirmed())
        spare = requested + len(self.present) - settings.least
        surplus = min(requested - useful, spare) if self.gangs is not None else 0
        requests: list[Action] = []
        for number, one in enumerate(one for one in self.coming if one.state in CANCELLABLE):
            unneeded = number < surplus
            if self._lasting("unneeded", one.name, unneeded) >= settings.idle_s and unneeded:
                requests.append(Delete(one.name, f"no job has waited for it for {settings.idle_s:g} s"))
        unused = {name for name, one in here.items() if not useful and not one.in_use}
        unused_s = {one.name: self._lasting("idle", one.name, one.name in unused) for one in self.present}
        idle = sorted(((unused_s[name], name) for name in unused if unused_s[name] >= settings.idle_s), reverse=True)
        returned = [
            Delete(name, f"it has been idle for {seconds:.0f} s and no job that waits could use it", if_unused=True)
            for seconds, name in idle[: max(0, spare - len(requests))]
        ]
        return [*requests, *returned]

    def _unconfirmed(self) -> dict[str, Unconfirmed]:
        """Return the slices of the type that were requested and are not listed yet."""
        of_type = self.settings.prefix(self.config)
        return {name: asked for name, asked in self.history.unconfirmed.items() if name.startswith(of_type)}

    def obtain(self, date: float) -> list[Action]:
        """Request slices that complete gangs, within all limits, from the first open source with room."""
        settings, config, ledger = self.settings, self.config, self.ledger
        sources = {source.key: source for source in settings.sources}
        unconfirmed, demand = self._unconfirmed(), self.gangs or ()
        repeated: list[Action] = [
            Create(name, config, sources[asked.source], "it was asked for, and is not listed yet")
            for name, asked in unconfirmed.items()
            if asked.source in sources
        ]
        coming = len(self.coming) + len(unconfirmed)
        why = f"waiting jobs miss {sum(demand)}, {coming} coming"
        new: list[Action] = []
        paused: Counter[tuple[str, str]] = Counter()
        left_out: dict[str, list[int]] = {}

        def request(slices: int, why: str) -> bool:
            """Request slices, or count them as paused. Return whether the limits allow them."""
            fitting = self._with_room(slices) if ledger.room(config) >= slices else []
            if not fitting:
                return False
            chosen = next(filter(self._is_open, fitting), None)
            ledger.take(config, chosen or fitting[0], slices)
            if chosen is None:
                paused[why, self._pauses(fitting)] += slices
            else:
                stamp, first = f"{settings.prefix(config)}{int(date * 1000):x}", len(new)
                new.extend(Create(f"{stamp}-{first + n}", config, chosen, why) for n in range(slices))
            return True

        spare = coming
        for missing in demand:
            short = missing - min(spare, missing)
            if short and not request(short, why):
                left_out.setdefault(ledger.limits(config, short), []).append(missing)
            else:
                spare -= missing - short
        for _ in range(settings.least - coming - len(self.present) - len(new) - paused.total()):
            request(1, f"at least {settings.least}")
        waits: list[Action] = [
            Wait(config.name, f"gangs miss {_listed(gangs)} more slices of {config.name}, but {limit}")
            for limit, gangs in left_out.items()
        ]
        waits += [
            Wait(config.name, f"{slices} more {config.name} wanted ({why}), but pausing: {pauses}")
            for (why, pauses), slices in paused.items()
        ]
        return [*repeated, *waits, *new]


def _listed(gangs: Sequence[int]) -> str:
    return ", ".join(map(str, gangs[:8])) + (", …" if len(gangs) > 8 else "")
