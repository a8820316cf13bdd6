"""Plans which slices to request, where, and which to delete. `iris-ray cluster provision` carries it out.

Every slice is a resource of its own at the provider: to repair one of several, the provider would restart all of them.
It holds quota until it is deleted, whatever its state, so FAILED and SUSPENDED ones are deleted. A provisioner owns
the slices with its label and its prefix in the name; it neither touches nor counts others.

Sources are asked in their order. One that fails, refuses or lets a request wait for too long pauses for that type of
slices, and the next one is asked; when its pause is over, it is the first choice again. The slices that a gang misses
are requested from one source. Slices of all types share the chips of a source: if it has no room for a gang,
`taking_back.py` takes chips back from slices of other types.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from iris_ray.capacity.demand import ARRIVAL_S, WaitingGang
from iris_ray.capacity.holdings import Holdings, Settings
from iris_ray.capacity.provider import CANCELLABLE, COMING, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioning_actions import Action, Create, Delete, Wait, listed, unmet
from iris_ray.capacity.provisioning_history import ProvisioningHistory, Unconfirmed
from iris_ray.capacity.reservations import GONE_S, TAKEN_AFTER_S, Holder, SharedChips, TypeUse
from iris_ray.capacity.taking_back import TakingBack
from iris_ray.model.topology import TPUConfig

JOIN_S, BROKEN_S, STUCK_S = 1800.0, 300.0, 3600.0
"""How long an ACTIVE slice may take to join the cluster whole, how long it may lack hosts that it had, and how long it
may be PROVISIONING."""


_NEVER_ASKED = 0.0, ""
_Alike = tuple[str, int, bool, tuple[str, ...]]
"""A type, how many slices of it are missing, whether others may be taken, and why jobs have left none before."""


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


def plan(
    settings: Settings,
    demand: Sequence[WaitingGang] | None,
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
        demand: the gangs that wait, the first to be served first; None if the cluster could not be asked.
        found: all requested slices of all zones.
        joined: the slices that have hosts in the cluster; ignored if ``demand`` is None.
        history: the memory of earlier plans; this call changes it.
        now: seconds on a monotonic clock.
        date: seconds since the epoch, for new names.
        unlisted: the locations that could not be asked now; ``found`` has their slices as they were last seen.
    """
    ours = {one.name: one for one in found if settings.owns(one)}
    config_of = {name: settings.config_of(name) for name in ours}
    for name, asked in list(history.unconfirmed.items()):
        is_late = now - asked.asked_at > ARRIVAL_S and asked.location not in unlisted  # it may be there unseen
        if name in ours or is_late or settings.config_of(name) is None:
            del history.unconfirmed[name]
    history.forget_all_but([*ours, *history.unconfirmed])
    held = [one for one in found if settings.holds(one)]
    ledger = Holdings.of(settings, held, history.unconfirmed)
    there = joined if demand is not None else {}
    firm = frozenset(name for gang in demand or () for name in (*gang.kept, *gang.removes))
    reserved = firm | {name for gang in demand or () for name in gang.holds}
    types: dict[str, _TypePlan] = {}
    idle = (config_of[name] for name in ours if name in there and not there[name].in_use)
    too_large = _too_large(settings, demand or (), Counter(config.name for config in idle if config))
    possible = [one for one in demand or () if one.group not in too_large]
    refused = (one for one in demand or () if one.group in too_large and one.missing)
    actions: list[Action] = [Wait(one.tpu_type, too_large[one.group]) for one in refused]
    for config in settings.configs:
        gangs = None if demand is None else [one for one in possible if one.tpu_type == config.name]
        about = settings, config, gangs, there, ledger, history, unlisted, now, date, reserved
        of_type = types[config.name] = _TypePlan(*about)
        of_config = (one for name, one in ours.items() if config_of[name] == config)
        mine = [one for one in of_config if not _has_left(one, there, history, now)]
        actions += [*of_type.sort_out(mine), *of_type.move_on(), *of_type.release()]
    leaving = {action.name for action in actions if isinstance(action, Delete)}
    going = [one for one in held if one.location not in unlisted and _is_going(one, leaving, history, now)]
    shared = SharedChips(
        [Holder(one.name, "", one.source, one.chips) for one in going],
        {name: of_type.leaves(leaving) for name, of_type in types.items()},
        firm,
    )
    if demand is not None:
        history.forget_promises_but({gang.job_id for gang in demand}, now)
    in_vain: dict[_Alike, str] = {}  # gangs that got nothing since anything was given to one, with the limit
    for group, some in groupby(possible, key=lambda one: one.group):
        gangs = [*some]
        served = [(types[gang.tpu_type], gang) for gang in gangs if gang.tpu_type in types]
        if group:
            for of_type, gang in served:
                of_type.claim(gang, shared)
            if len(served) < len(gangs) or not _start_together(served, ledger, shared):
                served = [(of_type, replace(gang, may_take=False)) for of_type, gang in served]
        for of_type, gang in served:
            alike = of_type.alike(gang)
            if alike is not None and alike in in_vain:
                of_type.left_out[in_vain[alike]].append(gang.missing)
                continue
            if not group:
                of_type.claim(gang, shared)
            limit = of_type.serve(gang, shared)
            if alike is None or limit is None:
                in_vain.clear()
            else:
                in_vain[alike] = limit
    return [*actions, *(action for of_type in types.values() for action in of_type.obtain())]


def _too_large(settings: Settings, demand: Sequence[WaitingGang], idle: Mapping[str, int]) -> dict[str, str]:
    """Return the groups whose jobs could never have all their slices at a time, each with the reason.

    ``idle`` has the number of idle slices of each type: what the jobs would use beyond these are slices of others.
    """
    missing, used = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    for gang in demand:
        if gang.group:
            missing[gang.group][gang.tpu_type] += gang.missing * gang.times
            used[gang.group][gang.tpu_type] += gang.there
    found: dict[str, str] = {}
    of_sources = sum(math.inf if source.chips is None else source.chips for source in settings.sources)
    most = min(of_sources, math.inf if settings.budget is None else settings.budget)
    for group, lacks in missing.items():
        chips = 0
        for config in settings.configs:
            slices = lacks[config.name] + min(used[group][config.name], idle[config.name])
            chips += slices * config.chip_count
            if slices > settings.most_of(config):
                found[group] = f"its jobs need {slices} {config.name} at a time, of at most {settings.most_of(config)}"
        if chips > most:
            found[group] = f"its jobs need {chips} chips at a time, of at most {most:.0f}"
    return {group: f"the group {group} can't start: {why}" for group, why in found.items()}


def _start_together(served: Sequence[tuple["_TypePlan", WaitingGang]], ledger: Holdings, shared: SharedChips) -> bool:
    """Return whether the chips that are free, or that other types could leave now, suffice for all gangs of a group."""
    ledger, shared = ledger.copy(), shared.copy()
    given = Counter[str]()
    for of_type, gang in served:
        for _ in range(gang.times):
            coming = min(of_type.spare - given[gang.tpu_type], gang.missing)
            given[gang.tpu_type] += coming
            if gang.missing > coming and not of_type.could_obtain(gang, gang.missing - coming, ledger, shared):
                return False
    return True


def _has_left(one: QueuedSlice, joined: Mapping[str, Joined], history: ProvisioningHistory, now: float) -> bool:
    """Return whether a slice is being deleted, however it is listed."""
    if one.state in (QueuedState.FAILED, QueuedState.SUSPENDED):
        return False
    return history.is_leaving(one.name, one.name in joined and joined[one.name].whole, now)


def _is_going(one: QueuedSlice, leaving: Collection[str], history: ProvisioningHistory, now: float) -> bool:
    """Return whether a slice that is listed is soon gone."""
    is_going = one.state is QueuedState.DELETING or one.name in leaving or one.name in history.leaving
    return history.lasting("going", one.name, is_going, now) < GONE_S and is_going


@dataclass(slots=True)
class _TypePlan:
    """The plan for the slices of one type, made step by step in the order of the methods.

    Attributes:
        gangs: the waiting gangs; None if the cluster could not be asked.
        joined: the slices that have hosts in the cluster; none if it could not be asked.
        reserved: the names of the slices that are reserved for waiting jobs.
        coming: the requested slices that are on their way.
        present: the slices that are in the cluster, or active while the cluster can't be asked.
        spare: how many slices on their way no gang has been given yet.
        free: how many slices of each source jobs could use now, by its key.
        why: why slices are requested for the gangs, for people.
        created: how many slices are requested.
        actions: what the gangs need that have been served.
        paused: how many slices are wanted from sources that pause, by the reason and by the pauses.
        left_out: the gangs that can't have all slices that they miss, by the limit.
    """

    settings: Settings
    config: TPUConfig
    gangs: Sequence[WaitingGang] | None
    joined: Mapping[str, Joined]
    ledger: Holdings
    history: ProvisioningHistory
    unlisted: Collection[str]
    now: float
    date: float
    reserved: Collection[str]
    coming: list[QueuedSlice] = field(default_factory=list)
    present: list[QueuedSlice] = field(default_factory=list)
    spare: int = 0
    free: Counter[str] = field(default_factory=Counter)
    why: str = ""
    created: int = 0
    actions: list[Action] = field(default_factory=list)
    paused: Counter[tuple[str, str]] = field(default_factory=Counter)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    _possible: dict[tuple[int, int], bool] = field(default_factory=dict)  # by the slices that a gang misses and has

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
        use new ones. A gang that misses none keeps the idle ones that it would use.
        """
        settings = self.settings
        here = {one.name: self.joined[one.name] for one in self.present if one.name in self.joined}
        idle_now = sum(map(self._is_free, here))
        most = settings.most_of(self.config)
        self.free = Counter(one.source for one in self.present if self._is_free(one.name))
        can_use = (one for one in self.gangs or () if one.missing + idle_now <= most and self._is_possible(one))
        useful = sum(one.missing * one.times for one in can_use)
        requested = len(self.coming) + len(self._unconfirmed())
        spare = requested + len(self.present) - settings.least
        surplus = min(requested - useful, spare) if self.gangs is not None else 0
        requests: list[Action] = []
        for number, one in enumerate(one for one in self.coming if one.state in CANCELLABLE):
            unneeded = number < surplus
            if self._lasting("unneeded", one.name, unneeded) >= settings.idle_s and unneeded:
                requests.append(Delete(one.name, f"no job has waited for it for {settings.idle_s:g} s"))
        awaited = sum(one.there for one in self.gangs or () if not one.missing)
        free = [name for name, one in here.items() if not one.in_use and name not in self.reserved]
        free.sort(key=lambda name: self._lasting("unused", name, holds=True), reverse=True)
        unused = set() if useful else {*free[: max(0, len(free) - awaited)]}
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

    def leaves(self, leaving: Collection[str]) -> TypeUse:
        """Return what the type leaves to others, before any gang is served. ``leaving``: what is deleted anyway."""
        self.spare = len(self.coming) + len(self._unconfirmed())
        missed = sum(one.missing * one.times for one in self.gangs or ())
        self.why = f"waiting jobs miss {missed}, {self.spare} coming"
        coming = [one for one in self.coming if one.name not in leaving]
        present = [one for one in self.present if one.name not in leaving]
        idle = [one for one in present if one.name in self.joined and not self.joined[one.name].in_use]
        idle_names = {one.name for one in idle}
        idle_s = {one.name: self._lasting("unused", one.name, one.name in idle_names) for one in self.present}
        after_s = min(TAKEN_AFTER_S, self.settings.idle_s)
        longest = sorted(idle, key=lambda one: -idle_s[one.name])
        may_go, soon = ([one for one in longest if (idle_s[one.name] >= after_s) is is_due] for is_due in (True, False))
        on_the_way = len(coming) + len(self._unconfirmed())
        return TypeUse(
            requests=[self._holder(one) for one in coming if one.state in CANCELLABLE and self._may_go(one)],
            coming=on_the_way,
            idle=[self._holder(one) for one in may_go if self._may_go(one)],
            idle_now=len(idle),
            above_least=on_the_way + len(present) - self.settings.least,
            soon=[self._holder(one) for one in soon if self._may_go(one)],
            in_use=[self._holder(one) for one in present if self._is_used(one) and self._may_be_left(one)],
            refused=[self._holder(one) for one in idle if one.name in self.reserved and not self._may_go(one)],
        )

    def _is_used(self, one: QueuedSlice) -> bool:
        return one.name in self.joined and self.joined[one.name].whole and self.joined[one.name].in_use

    def _holder(self, one: QueuedSlice) -> Holder:
        return Holder(one.name, self.config.name, one.source, one.chips, one.state is not QueuedState.ACTIVE)

    def _may_go(self, one: QueuedSlice) -> bool:
        return one.location not in self.unlisted and self.history.may_delete(one.name, self.now)

    def _may_be_left(self, one: QueuedSlice) -> bool:
        """Return whether jobs may be asked to leave a slice, or are leaving it already."""
        is_reserved = one.name in self.reserved
        return self._may_go(one) and (is_reserved or self.history.may_be_left(one.name, self.now))

    def claim(self, gang: WaitingGang, shared: SharedChips) -> None:
        """Keep the idle slices that a gang would use, and requests that it misses, from the gangs behind it."""
        if self._is_possible(gang):  # otherwise it can't use any
            shared.claim(self.config.name, gang.there, min(self.spare, gang.missing * gang.times))

    def could_obtain(self, gang: WaitingGang, slices: int, ledger: Holdings, shared: SharedChips) -> bool:
        """Return whether a gang could have slices of a source now, or take their chips back, and count them if so."""
        for source in filter(self._is_open, self.settings.sources):
            if ledger.room(self.config) >= slices and ledger.room_at(self.config, source) >= slices:
                ledger.take(self.config, source, slices)
                return True
            if TakingBack(gang, self.config, ledger, self.history, shared, self.now).could_take(slices, source):
                return True
        return False

    def alike(self, gang: WaitingGang) -> "_Alike | None":
        """Return what decides whether a gang gets slices, for gangs of which no other thing has to be known.

        If one that is alike has got nothing, and nothing was given to any gang since, it gets nothing for the same
        reason. Return None for a gang that has free slices or reserved ones, may have some, or may get requested ones.
        """
        is_simple = not (gang.there or gang.holds or gang.removes or gang.may_reserve or gang.group or self.spare)
        if not is_simple or gang.times > 1 or not gang.missing or gang.job_id in self.history.promises:
            return None
        asked = (self.history.lacking.get((gang.job_id, source.key), _NEVER_ASKED) for source in self.settings.sources)
        return self.config.name, gang.missing, gang.may_take, tuple(why for _, why in asked)

    def serve(self, gang: WaitingGang, shared: SharedChips) -> str | None:
        """Request the slices that complete a gang, within all limits; or take their chips back from other types.

        Return the limit if it can't be completed.
        """
        taking, limit = TakingBack(gang, self.config, self.ledger, self.history, shared, self.now), None
        taking.keep_promise()
        for number in range(gang.times):
            given = min(self.spare, gang.missing)
            short = gang.missing - given
            if short and not self._obtain(short, self.why, taking):
                limit = self.ledger.limits(self.config, short) + taking.why_not(short)
                self.left_out.setdefault(limit, []).extend([gang.missing] * (gang.times - number))
                break  # nothing has changed, so the others get nothing either
            self.spare -= given
        self.actions += taking.finish()
        return limit

    def _is_possible(self, gang: WaitingGang) -> bool:
        """Return whether a gang could ever have what it misses, if only the slices that it would use were held.

        Those may be slices of others, or of other sources.
        """
        free, key = self.free, (gang.missing, gang.there)
        if key not in self._possible:
            most = self.settings.most_of(self.config)
            slices = [(one.chips, gang.missing + min(gang.there, free[one.key])) for one in self.settings.sources]
            fits = any(chips is None or n * self.config.chip_count <= chips for chips, n in slices)
            self._possible[key] = fits and gang.missing + min(gang.there, free.total()) <= most
        return self._possible[key]

    def _is_free(self, name: str) -> bool:
        return name in self.joined and not self.joined[name].in_use and not self.joined[name].closed

    def _obtain(self, slices: int, why: str, taking: TakingBack | None = None) -> bool:
        """Request slices from the first open source that has room, or of which a gang takes chips back.

        If there is none, ask jobs to leave some. Otherwise count the slices as paused if only sources that pause have
        room. Return whether the limits allow them.
        """
        config, ledger = self.config, self.ledger
        fitting = self._with_room(slices) if ledger.room(config) >= slices else []
        sources = [one for one in self.settings.sources if self._is_open(one)]
        for source in sources:
            if source in fitting:
                ledger.take(config, source, slices)
                self._create(slices, source, why)
                return True
            if taking is not None and (taken := taking.take(slices, source)):
                self.actions += taken
                return True
        if taking is not None:
            for source in sources:
                if asked := taking.ask_jobs(slices, source):
                    self.actions += asked
                    return True
        if fitting:
            ledger.take(config, fitting[0], slices)
            self.paused[why, self._pauses(fitting)] += slices
        return bool(fitting)

    def _create(self, slices: int, source: Source, why: str) -> None:
        stamp = f"{self.settings.prefix(self.config)}{int(self.date * 1000):x}"
        numbers = range(self.created, self.created + slices)
        self.actions += [Create(f"{stamp}-{number}", self.config, source, why) for number in numbers]
        self.created += slices

    def obtain(self) -> list[Action]:
        """Return the requests: repeated ones, those of the gangs that have been served, and up to the least number."""
        settings, config = self.settings, self.config
        sources = {source.key: source for source in settings.sources}
        unconfirmed = self._unconfirmed()
        repeated: list[Action] = [
            Create(name, config, sources[asked.source], "it was asked for, and is not listed yet")
            for name, asked in unconfirmed.items()
            if asked.source in sources
        ]
        there = len(self.coming) + len(unconfirmed) + len(self.present)
        for _ in range(settings.least - there - self.created - self.paused.total()):
            self._obtain(1, f"at least {settings.least}")
        waits: list[Action] = [
            Wait(config.name, unmet(listed(gangs), config, limit)) for limit, gangs in self.left_out.items()
        ]
        waits += [
            Wait(config.name, f"{slices} more {config.name} wanted ({why}), but pausing: {pauses}")
            for (why, pauses), slices in self.paused.items()
        ]
        return [*repeated, *waits, *self.actions]
