"""Shows Ray's autoscaler which slices are missing, as placement groups that wait; on KubeRay see `kuberay_demand.py`.

This is done only where an autoscaler runs: without one, the groups would only clutter ``ray status``, and Ray would try
to place them again and again. The cluster's setting ``autoscaler_demand`` overrides the look for an autoscaler.

Each missing slice gets one group of one bundle ``{"TPU-<type>-head": 1}``: one launch of a provider's makes a slice, as
with Ray's provider for Google's VMs. KubeRay's counts hosts, so there the group has a bundle for each of the slice's
hosts. Observed with Ray 2.60:

- Ray gives such a bundle the head of *any* slice, busy ones too, since jobs claim chips and not heads. So a label
  selector keeps it off all existing slices. Version 2 of the autoscaler respects the selector.
- Version 1 ignores it, and counts a busy slice's head as good enough. There the bundle asks for the host's chips, too.
- A group that a detached actor made is removed when that actor ends for good. After a restart of the actor the groups
  still exist, and their names show whose they are.

A new slice gives its head to a group, which is removed within a second.
"""

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from iris_ray.actors.calls.ray_internals import placement_group_by_id, placement_groups_in_use
from iris_ray.actors.controller.node_table import SLICE_NAME_LABEL
from iris_ray.capacity.demand import Arrivals, net_demand
from iris_ray.capacity.ray_internals import autoscaler_launches, has_autoscaler_v2
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU

logger = logging.getLogger(__name__)

NAME_PREFIX = "iris_ray_demand/"
MOST_GROUPS = 64
"""Groups of one type at a time. When the autoscaler has added these slices, it sees the next groups."""
LAUNCHES_S = 15.0
"""The interval between two looks at what the autoscaler launches, while it is asked for slices."""

Slices = Mapping[str, tuple[str, bool]]
"""The type of each slice that has hosts, and whether it has all of them."""


class Demand(ABC):
    """Asks for the slices that are missing. `update` blocks.

    Args:
        has_autoscaler: whether an autoscaler serves this cluster.

    Attributes:
        asked: how many requested slices of each type have not come yet.
        way: the means by which slices are requested, in words.
        problem: why slices can't be requested by the proper means, in words; None if they are.
    """

    way: str
    problem: str | None = None

    def __init__(self, has_autoscaler: bool) -> None:
        self._has_autoscaler = has_autoscaler
        self.asked: Mapping[str, int] = {}

    def is_shown(self, setting: bool | None) -> bool:
        """Return whether to request missing slices, given the cluster's setting; None: only if an autoscaler runs."""
        return self._has_autoscaler if setting is None else setting

    @property
    @abstractmethod
    def is_gone(self) -> bool:
        """Whether no request is open, not even one of an earlier process."""

    @abstractmethod
    def words(self, device: str) -> tuple[str, ...]:
        """Return the open requests of a type, in words: how many slices, since when, and why none come."""

    @abstractmethod
    def update(self, missing: Mapping[str, Sequence[int]], slices: Slices) -> None:
        """Request the slices that are missing now, and withdraw all other requests.

        Args:
            missing: how many slices of each type each waiting gang could use; the result of `missing_slices`.
            slices: the result of `slices_in`.
        """


class AutoscalerDemand(Demand):
    """Keeps as many placement groups waiting as slices are missing.

    Args:
        has_autoscaler: whether one serves this cluster.
        counts_hosts: whether it launches hosts, and not slices.
    """

    way = "placement groups that Ray's autoscaler sees"

    def __init__(self, has_autoscaler: bool = False, counts_hosts: bool = False) -> None:
        super().__init__(has_autoscaler)
        self._counts_hosts = counts_hosts
        self._groups: dict[str, list[PlacementGroup]] = {}
        self._kept_off: dict[str, frozenset[str]] = {}
        self._arrivals = Arrivals()
        self._knows_all = False  # which groups there are
        self._since: dict[str, float] = {}
        self._launches: tuple[str, ...] = ()
        self._looked_at = -float("inf")

    @property
    def is_gone(self) -> bool:
        return self._knows_all and not self._groups

    def words(self, device: str) -> tuple[str, ...]:
        tpu_type = get_tpu_config(device).name
        if (asked := self.asked.get(tpu_type)) is None:
            return ()
        now = time.monotonic()
        since = since_words(now - self._since.get(tpu_type, now))  # `update`, in another thread, may just forget it
        return (f"Ray's autoscaler is asked for {asked} more{since}", *self._launches)

    def update(self, missing: Mapping[str, Sequence[int]], slices: Slices) -> None:
        """Make the missing placement groups, and remove those that are superfluous or have got their slice."""
        if not self._knows_all:
            self._remove_leftovers()
        self._knows_all = False  # a call of Ray that fails may have taken effect
        now = time.monotonic()
        wanted = net_demand({t: sum(gangs) for t, gangs in missing.items()}, self._arrivals.arriving(slices, now))
        for tpu_type in {*wanted, *self._groups}:
            there = frozenset(name for name, (its_type, _) in slices.items() if its_type == tpu_type)
            self._update(tpu_type, min(wanted.get(tpu_type, 0), MOST_GROUPS), there)
        self._knows_all = True
        self._since = {tpu_type: self._since.get(tpu_type, now) for tpu_type in wanted}
        if wanted != self.asked:
            self.asked = wanted
            logger.info("Ray's autoscaler is asked for %s", wanted or "no slices now")
        self._look_at_launches(now)

    def _look_at_launches(self, now: float) -> None:
        if not self.asked or not self._has_autoscaler:
            self._launches = ()
        elif now - self._looked_at >= LAUNCHES_S:
            self._looked_at = now
            try:
                self._launches = autoscaler_launches()
            except Exception as error:  # only what people read is lost; the demand stays
                logger.info("the list of launches of Ray's autoscaler can't be read: %s", error)

    def _update(self, tpu_type: str, count: int, there: frozenset[str]) -> None:
        groups = self._groups.get(tpu_type, [])
        outdated = groups if there != self._kept_off.get(tpu_type) else [g for g in groups if not _waits(g)]
        kept = [group for group in groups if group not in outdated]
        made = [self._make(tpu_type, there) for _ in range(count - len(kept))]  # first, so that the demand never drops
        for group in (*outdated, *kept[count:]):
            remove_placement_group(group)
        self._groups[tpu_type] = kept[:count] + made
        self._kept_off[tpu_type] = there
        if not self._groups[tpu_type]:
            del self._groups[tpu_type], self._kept_off[tpu_type]

    def _make(self, tpu_type: str, there: frozenset[str]) -> PlacementGroup:
        config = get_tpu_config(tpu_type)
        bundle = {f"TPU-{tpu_type}-head": 1.0}  # all hosts of a slice have one, as the autoscaler of KubeRay sees it
        if not has_autoscaler_v2():
            bundle[TPU] = float(config.chips_per_vm)
        bundles = [bundle] * (config.vm_count if self._counts_hosts else 1)
        selector = {SLICE_NAME_LABEL: f"!in({','.join(sorted(there))})"} if there else {}
        name = f"{NAME_PREFIX}{tpu_type}/{uuid.uuid4().hex[:8]}"
        return placement_group(bundles, name=name, bundle_label_selector=[selector] * len(bundles) if there else None)

    def _remove_leftovers(self) -> None:
        """Remove all groups: they are from before a restart of this process, or from before a call failed."""
        for group_id, name in placement_groups_in_use().items():
            if name.startswith(NAME_PREFIX):
                remove_placement_group(placement_group_by_id(group_id))
        self._groups, self._kept_off = {}, {}


def _waits(group: PlacementGroup) -> bool:
    return placement_group_table(group).get("state") in ("PENDING", "PREPARED", "RESCHEDULING")


def since_words(seconds: float) -> str:
    """Return a duration as the end of a sentence, such as ``, for 5 min``; "" for less than a minute."""
    minutes = int(seconds // 60)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f", for {hours}{minutes % 60} min" if minutes else ""
