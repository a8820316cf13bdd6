"""Frees chips of slices of other types for a waiting gang, if no source has room for the slices that it misses. Pure.

Requests and idle slices go first. If they don't suffice, and the provisioner's settings allow it (`Reach`), the
Controller is asked whether jobs of lower bands leave slices, or whether slices are held for the gang until enough of
them are idle (`lower_bands.py`). `reservations.py` says which slices go.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Holdings, Reach
from iris_ray.capacity.lower_bands import ChipsWanted, SharedSlice
from iris_ray.capacity.provider import Source
from iris_ray.capacity.provisioning_actions import (
    Action,
    Delete,
    KeepSlices,
    LeaveChips,
    TakeBack,
    held,
    listed,
    unmet,
)
from iris_ray.capacity.provisioning_history import ProvisioningHistory
from iris_ray.capacity.reservations import Offer, SharedChips, Taken
from iris_ray.model.topology import TPUConfig


@dataclass(slots=True)
class TakingBack:
    """The chips that one gang takes back, during a plan.

    Attributes:
        gang: the gang.
        config: its type.
        ledger: the limits, and what counts towards them.
        history: the memory of earlier plans.
        shared: the chips that all types share.
        now: seconds on the clock of `plan`.
        holding_at: the sources of the slices that are held for the gang.
    """

    gang: WaitingGang
    config: TPUConfig
    ledger: Holdings
    history: ProvisioningHistory
    shared: SharedChips
    now: float
    holding_at: set[str] = field(init=False)

    def __post_init__(self) -> None:
        held = (one for some in self.shared.named(self.gang.holds) for one in some)
        self.holding_at = {one.source for one in held if one.tpu_type != self.config.name}

    def keep_promise(self) -> None:
        """Keep the chips that were freed for the gang, or are being freed, if it was not looked at just now.

        It may miss its slices again soon. Otherwise this plan promises them anew.
        """
        gang, config = self.gang, self.config
        if (promise := self.history.promises.get(gang.job_id)) is None:
            return
        if gang.missing:
            del self.history.promises[gang.job_id]
            return
        for source in self.ledger.settings.sources:
            if source.key == promise.source:
                lack = self.ledger.lack(config, source, promise.slices)
                taken = self.shared.take(config.name, lack, is_freed_only=True) or Taken((), ())
                chips, of_source = taken.chips(), taken.chips(source.key)
                self.ledger.set_aside(config, source, promise.slices, gang.job_id, chips, of_source)

    def could_take(self, slices: int, source: Source) -> bool:
        """Return whether chips of slices of other types complete the gang now, and keep them for it if so."""
        if not self._may_ask(slices, source):
            return False
        if (taken := self.shared.take(self.config.name, self.ledger.lack(self.config, source, slices))) is None:
            return False
        about = self.gang.job_id, taken.chips(), taken.chips(source.key)
        self.ledger.set_aside(self.config, source, slices, *about)
        return True

    def take(self, slices: int, source: Source) -> list[Action]:
        """Delete slices of other types whose chips complete the gang, or wait until jobs have left them and they go.

        Return nothing if the gang gets no chips of the source in this way.
        """
        gang, shared, lack = self.gang, self.shared, self.ledger.lack(self.config, source, slices)
        if not self._may_ask(slices, source):
            return []
        if gang.holds and source.key in shared.asked_at:  # an earlier gang may get its slices
            return []
        idle, in_use, refused = shared.named(gang.removes)
        unused = [*idle, *refused, *shared.named(gang.holds)[0]]  # those of its type are never deleted for it
        first = [*in_use, *(one for one in unused if one.tpu_type != self.config.name)]
        if (taken := shared.take(self.config.name, lack, left=first)) is None:
            return []
        self._set_aside(slices, source, taken.chips(), taken.chips(source.key))
        goal, deletions = self._goal(slices), list[Action]()
        names = self._of_other_types([one.name for one in (*taken.going, *taken.to_go)])
        if in_use or refused:
            self.history.evicts(gang.job_id, self.now)
            left = f"jobs have left {listed([one.name for one in in_use])} and " if in_use else ""
            until = f"once {left}{listed(names)} are deleted"
            if refused:
                until += f" (the provider has refused to delete {listed([one.name for one in refused])})"
        else:
            besides = tuple(one.name for one in taken.going)
            deletions += [
                Delete(one.name, f"its {one.chips} chips become {goal}", not one.is_request, gang.job_id, besides)
                for one in taken.to_go
            ]
            until = f"once {listed(names)} are deleted"
        return [*deletions, TakeBack.of(self.config.name, taken.chips(), goal, until, source)]

    def ask_jobs(self, slices: int, source: Source) -> list[Action]:
        """Ask whether jobs leave slices of other types whose chips complete the gang, or such slices are held for it.

        While slices are held for it, no other source is asked; and none if another provisioner holds them: the slices
        would no longer be held there. Return nothing if there is nothing to ask.
        """
        gang, shared, key = self.gang, self.shared, source.key
        reach, is_held = self.ledger.settings.take_back, bool(gang.holds)
        if reach is Reach.IDLE or not self._could_reserve(slices, source):
            return []
        if is_held and (reach is not Reach.HELD or key not in self.holding_at or key in shared.held_at):
            return []
        lack = self.ledger.lack(self.config, source, slices)
        if is_held and key in shared.asked_at:  # an earlier gang may get its slices
            self._set_aside(slices, source, lack.in_all, lack.in_source)
            chips = int(max(lack.in_source, lack.in_all))
            how = held(self._of_other_types(gang.holds))
            return [TakeBack.of(self.config.name, chips, self._goal(slices), how, source)]
        offer = self._offer(slices, source)
        if offer is None or not (is_held or self.history.may_evict(gang.job_id, key, self.now)):
            return []
        otherwise = unmet(slices, self.config, self.ledger.limits(self.config, slices))
        self._set_aside(slices, source, lack.in_all, lack.in_source)
        may_hold = reach is Reach.HELD and key not in shared.held_at
        shared.kept |= {one.name for one in offer.slices}  # for this turn
        shared.asked_at.add(key)
        some = tuple(SharedSlice(one.name, one.tpu_type, one.chips) for one in offer.slices)
        wanted = ChipsWanted(gang.job_id, offer.chips, some, tuple(offer.most.items()), may_hold=may_hold)
        return [LeaveChips(wanted, self.config.name, self._goal(slices), source, otherwise)]

    def finish(self) -> list[Action]:
        """Keep the slices that are held for the gang from the gangs behind it; let jobs have them if it needs none."""
        gang, shared = self.gang, self.shared
        if gang.missing and gang.job_id not in self.ledger.kept and any(shared.named((*gang.removes, *gang.holds))):
            return [KeepSlices(gang.job_id)]
        shared.kept |= {*gang.holds}
        shared.held_at |= self.holding_at
        return []

    def why_not(self, slices: int) -> str:
        """Return why no chips are taken back, or an empty string if no other type has any."""
        sources, could = self.ledger.settings.sources, self.shared.could_free(self.config.name)
        asked = (self.history.lacking.get((self.gang.job_id, source.key), (0.0, "")) for source in sources)
        why_none = listed([*dict.fromkeys(why for _, why in asked if why)])
        in_use = f"; jobs of lower bands leave none: {why_none}" if why_none else ""
        if refused := sorted(self.history.undeletable):
            in_use += f"; the provider has refused to delete {listed(refused)}"
        if self.ledger.settings.take_back is Reach.IDLE and any(
            self._could_reserve(slices, source) and self._offer(slices, source) for source in sources
        ):
            in_use += f"; no jobs are asked to leave slices, and none are held ({Reach.IDLE.flag})"
        if not could or not self._may_take(slices):
            return in_use
        for source in sources:
            if (past := self.history.at(source.key, self.config.name)).failures:
                why = f"since {source} failed last: {past.last_failure}"
                return f"; {could} chips of idle slices of other types stay, {why}"
        return f"; {could} chips of idle slices of other types would not suffice{in_use}"

    def _goal(self, slices: int) -> str:
        return f"{slices} {self.config.name} for {self.gang.job_id}"

    def _set_aside(self, slices: int, source: Source, freed: float, of_source: float) -> None:
        """Keep chips for the gang: those that become free for it, and those of the source that are free already."""
        self.ledger.set_aside(self.config, source, slices, self.gang.job_id, freed, of_source)
        self.history.promise(self.gang.job_id, source.key, slices, self.now)

    def _could_reserve(self, slices: int, source: Source) -> bool:
        """Return whether slices of a source could be reserved for the gang, if the settings allow it."""
        gang = self.gang
        return gang.may_reserve and not gang.removes and gang.times == 1 and self._may_ask(slices, source)

    def _offer(self, slices: int, source: Source) -> Offer | None:
        """Return the slices of a source of which some could be reserved for the gang; None: they would not suffice."""
        lack = self.ledger.lack(self.config, source, slices)
        return self.shared.offer(self.config.name, lack, is_held=bool(self.gang.holds))

    def _may_ask(self, slices: int, source: Source) -> bool:
        """Return whether other types may lose slices, so that a source is asked for slices of the gang.

        If the last request of the type to this source failed, it is not clear that the next one would be taken.
        """
        return self._may_take(slices) and not self.history.at(source.key, self.config.name).failures

    def _may_take(self, slices: int) -> bool:
        gang, most, of_type = self.gang, self.ledger.settings.most, self.config.name
        in_use = self.shared.named((*gang.removes, *gang.holds))[1]  # of its type: the gang misses them, and they count
        new = slices - sum(one.tpu_type == of_type for one in in_use)
        return gang.may_take and (most is None or self.ledger.of_type[of_type] + new <= most)

    def _of_other_types(self, names: Iterable[str]) -> list[str]:
        """Return those of some slices that are not of the gang's type."""
        config_of = self.ledger.settings.config_of
        return [name for name in names if config_of(name) not in (None, self.config)]
