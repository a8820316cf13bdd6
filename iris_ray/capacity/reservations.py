"""Chips that slices of several types share: which of them go, so that a waiting gang can have slices of its type. Pure.

The chips of a source (`Source.chips`), and those of the provisioner's budget, are shared by all types. When they are
used up, a gang takes them back from requests that no job waits for, and from idle slices, of other types. Nothing is
taken unless it suffices for the whole gang. If idle slices are too few, jobs of lower bands may leave others: see
`lower_bands.py`.

Gangs are served in their order. An earlier gang keeps what it would use itself: the idle slices and requests of its
type, and the chips that are being freed for it. So no two gangs take chips from each other in turn.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

TAKEN_AFTER_S = 60.0
"""How long a slice must have been idle before a gang of another type may have its chips, or the provisioner's own time
for idle slices if that is shorter. A new slice is made in minutes, and the next job of its type may come at once."""
GONE_S = 1800.0
"""How long a slice that is being deleted counts as soon gone. Its chips count as held for as long as it is there."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A slice, or a request for one, that holds shared chips.

    Attributes:
        name: its name.
        tpu_type: its type.
        source: the key of its source.
        chips: how many it holds.
        is_request: whether it is a request that can be withdrawn.
    """

    name: str
    tpu_type: str
    source: str
    chips: int
    is_request: bool = False


@dataclass(slots=True)
class TypeUse:
    """What slices of one type leave to others; it becomes less while a plan is made.

    Attributes:
        requests: those that can be withdrawn, in the order in which they go.
        coming: how many slices are on their way, with those requests.
        idle: the slices that have been idle for long enough, in the order in which they go.
        idle_now: how many slices are idle, with those.
        above_least: how many slices and requests there are beyond the least number.
        soon: the slices that are idle, but not for long enough.
        in_use: the slices that are in use and that jobs may be asked to leave.
        refused: the slices reserved for a gang whose deletion is tried again soon, since the provider has refused it.
    """

    requests: list[Holder]
    coming: int
    idle: list[Holder]
    idle_now: int
    above_least: int
    soon: list[Holder] = field(default_factory=list)
    in_use: list[Holder] = field(default_factory=list)
    refused: list[Holder] = field(default_factory=list)

    def copy(self) -> "TypeUse":
        slices = [*self.soon], [*self.in_use], [*self.refused]
        return TypeUse([*self.requests], self.coming, [*self.idle], self.idle_now, self.above_least, *slices)

    def left(self, kept: Collection[str]) -> list[Holder]:
        """Return the requests and slices that may go, requests first."""
        requests = self.requests[: max(0, self.coming)]
        idle = [one for one in self.idle if one.name not in kept][: max(0, self.idle_now)]
        return [*requests, *idle][: max(0, self.above_least)]

    def gone(self, one: Holder) -> None:
        """Record that a request or slice goes."""
        self.above_least -= 1
        if one.is_request:
            self.requests.remove(one)
            self.coming -= 1
            return
        for idle in (self.idle, self.soon):
            if one in idle:
                idle.remove(one)
                self.idle_now -= 1
        if one in self.in_use:
            self.in_use.remove(one)


@dataclass(frozen=True, slots=True)
class Lack:
    """The chips that a gang lacks.

    Attributes:
        source: the key of the source that it is to come from.
        in_source: how many of that source; not positive if it has enough.
        in_all: how many of the budget.
    """

    source: str
    in_source: float
    in_all: float


@dataclass(frozen=True, slots=True)
class Taken:
    """The chips that a gang gets once some slices are gone.

    Attributes:
        going: the slices that are being deleted already.
        to_go: the requests and slices to delete now.
    """

    going: tuple[Holder, ...]
    to_go: tuple[Holder, ...]

    def chips(self, source: str | None = None) -> int:
        """Return how many chips become free, of one source or of all."""
        return sum(one.chips for one in (*self.going, *self.to_go) if source in (None, one.source))


@dataclass(frozen=True, slots=True)
class Offer:
    """Slices of which a gang could have some if jobs of lower bands left them.

    Attributes:
        chips: how many chips of them the gang lacks.
        slices: the slices, idle ones first.
        most: how many of each type may go.
    """

    chips: int
    slices: tuple[Holder, ...]
    most: Mapping[str, int]


@dataclass(slots=True)
class SharedChips:
    """The shared chips that are being freed, and those that could be, during a plan.

    Attributes:
        going: the slices that are being deleted, and are kept for no gang yet.
        types: what each type leaves, by its name.
        kept: the names of slices that are reserved for a gang that waits.
        beyond: the chips of each source that earlier gangs leave over.
        asked_at: the sources of which slices are asked for a gang in this plan.
        held_at: the sources of which slices are held for a gang; for no gang behind it are any held there.
    """

    going: list[Holder]
    types: Mapping[str, TypeUse]
    kept: frozenset[str] = field(default_factory=frozenset)
    beyond: Counter[str] = field(default_factory=Counter)
    asked_at: set[str] = field(default_factory=set)
    held_at: set[str] = field(default_factory=set)

    def copy(self) -> "SharedChips":
        types = {name: use.copy() for name, use in self.types.items()}
        return replace(self, going=[*self.going], types=types, beyond=self.beyond.copy())

    def claim(self, tpu_type: str, idle: int, coming: int) -> None:
        """Keep idle slices and requests for a gang of their type."""
        if (own := self.types.get(tpu_type)) is not None:
            own.idle_now -= idle
            own.coming -= coming

    def could_free(self, tpu_type: str, source: str | None = None) -> int:
        """Return how many chips other types could leave to one, of one source or of all."""
        found = (*self.going, *self._spare(tpu_type)[0])
        return sum(one.chips for one in found if source in (None, one.source))

    def named(self, names: Collection[str]) -> tuple[list[Holder], list[Holder], list[Holder]]:
        """Return the slices of these names that are idle, those in use, and those that can't be deleted yet."""
        uses = self.types.values() if names else ()
        of_uses = (
            [one for use in uses for one in (*use.idle, *use.soon)],
            [one for use in uses for one in use.in_use],
            [one for use in uses for one in use.refused],
        )
        idle, in_use, refused = ([one for one in some if one.name in names] for some in of_uses)
        return idle, in_use, refused

    def offer(self, tpu_type: str, lack: Lack, is_held: bool = False) -> Offer | None:
        """Return the slices that a gang could have if jobs left some of them: those of the source, and of its own type.

        Return None if they would not suffice, or if others will soon: those that are idle now, or chips that earlier
        gangs leave over. ``is_held``: whether slices are held for the gang, which keeps them until others suffice.
        """
        if self.beyond[lack.source] > 0:
            return None
        lacking = max(lack.in_source, lack.in_all) - sum(one.chips for one in self.going if one.source == lack.source)
        idle, in_use, most = list[Holder](), list[Holder](), dict[str, int]()
        idle_chips = all_chips = 0
        for name, use in self.types.items():
            if name == tpu_type:
                continue
            requests = use.requests[: max(0, min(use.coming, use.above_least))]
            lacking -= sum(one.chips for one in requests if one.source == lack.source)
            reserved = sum(one.name in self.kept for one in (*use.idle, *use.soon, *use.in_use, *use.refused))
            most[name] = max(0, use.above_least - len(requests) - reserved)
            unused = [one for one in (*use.idle, *use.soon) if one.name not in self.kept][: max(0, use.idle_now)]
            unused = [one for one in unused if one.source == lack.source]
            used = [one for one in use.in_use if one.name not in self.kept and one.source == lack.source]
            idle_chips += sum(one.chips for one in unused[: most[name]])
            all_chips += sum(one.chips for one in [*unused, *used][: most[name]])
            idle, in_use = [*idle, *unused], [*in_use, *used]
        if (own := self.types.get(tpu_type)) is not None:
            of_own_type = [one for one in own.in_use if one.name not in self.kept]  # it would use them, of any source
            own_chips = sum(one.chips for one in of_own_type)
            if 0 < own_chips < lacking:  # otherwise the scheduler reserves some
                in_use, all_chips, most[tpu_type] = [*of_own_type, *in_use], all_chips + own_chips, len(of_own_type)
        if not 0 < lacking <= all_chips or (idle_chips >= lacking and not is_held):
            return None
        return Offer(int(lacking), (*idle, *in_use), most)

    def take(self, tpu_type: str, lack: Lack, is_freed_only: bool = False, left: Sequence[Holder] = ()) -> Taken | None:
        """Keep chips for a gang: first those that are being freed, then the fewest that suffice. None: too few.

        Args:
            tpu_type: the gang's type, of which nothing is deleted.
            lack: the chips that it lacks.
            is_freed_only: whether nothing more is deleted for it.
            left: slices that jobs have left for it, which go before other idle ones.
        """
        in_source, in_all = lack.in_source, lack.in_all
        found: list[list[Holder]] = []
        for holders in (self.going, *([] if is_freed_only else self._spare(tpu_type, left))):
            here = [one for one in holders if one.source == lack.source]
            chosen = cover(here, in_source)
            in_source -= sum(one.chips for one in chosen)
            in_all -= sum(one.chips for one in chosen)
            names = {one.name for one in chosen}
            more = cover([one for one in holders if one.name not in names], in_all)
            in_source -= sum(one.chips for one in more if one.source == lack.source)
            in_all -= sum(one.chips for one in more)
            found.append([*chosen, *more])
        if in_source > 0 or in_all > 0:
            return None
        if lack.in_source > 0:
            self.beyond[lack.source] -= int(in_source)
        going, to_go = found[0], [one for some in found[1:] for one in some]
        names = {one.name for one in going}
        self.going = [one for one in self.going if one.name not in names]
        for one in to_go:
            self.types[one.tpu_type].gone(one)
        return Taken(tuple(going), tuple(to_go))

    def _spare(self, tpu_type: str, left: Sequence[Holder] = ()) -> list[list[Holder]]:
        """Return what may go, in the order in which it goes."""
        spare = [one for name, use in self.types.items() if name != tpu_type for one in use.left(self.kept)]
        if not left:
            return [spare]
        first = [*(one for one in spare if one.is_request), *left]
        return [first, [one for one in spare if one not in first]]


def cover(holders: Sequence[Holder], lack: float) -> list[Holder]:
    """Return slices that have the chips which are lacking, none of them superfluous; all of them if they are too few.

    Requests go first, since nothing is lost with them. Then as few chips as possible go, if each size is a multiple of
    the next smaller one, and of slices of one size the first ones.
    """
    if lack <= 0:
        return []
    chosen: list[Holder] = []
    for holder in (one for one in holders if one.is_request):
        if lack > 0:
            chosen.append(holder)
            lack -= holder.chips
    slices = sorted((one for one in holders if not one.is_request), key=lambda one: -one.chips)
    left: list[Holder] = []
    for holder in slices:
        if 0 < holder.chips <= lack:
            chosen.append(holder)
            lack -= holder.chips
        else:
            left.append(holder)
    if lack > 0 and left:
        smallest = min(left, key=lambda one: one.chips)  # each is larger than what is lacking
        chosen.append(smallest)
        lack -= smallest.chips
    for holder in sorted(chosen, key=lambda one: (one.is_request, -one.chips)):
        if lack + holder.chips <= 0:
            chosen.remove(holder)
            lack += holder.chips
    return chosen
