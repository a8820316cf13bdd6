"""Shows Ray's autoscaler which slices are missing, as placement groups that wait.

This is done only where an autoscaler runs: without one, the groups would only clutter ``ray status``, and Ray would try
to place them again and again. The cluster's setting ``autoscaler_demand`` overrides the look for an autoscaler.

Each missing slice gets one group of one bundle ``{"TPU-<type>-head": 1}``. Observed with Ray 2.60:

- Ray gives such a bundle the head of *any* slice, busy ones too, since jobs claim chips and not heads. So a label
  selector keeps it off all existing slices. Version 2 of the autoscaler respects the selector.
- Version 1 ignores it, and counts a busy slice's head as good enough. There the bundle asks for the host's chips, too.
- A group that a detached actor made is removed when that actor ends for good. After a restart of the actor the groups
  still exist, and their names show whose they are.

A new slice gives its head to a group, which is removed within a second.
"""

import logging
import os
import time
import uuid
from collections.abc import Mapping

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from iris_ray.actors.calls.ray_internals import has_autoscaler_v2, placement_group_by_id, runs_autoscaler
from iris_ray.actors.controller.node_table import SLICE_NAME_LABEL
from iris_ray.cloud.demand import Arrivals, net_demand
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU

logger = logging.getLogger(__name__)

NAME_PREFIX = "iris_ray_demand/"
MOST_GROUPS = 64
"""Groups of one type at a time. Once an autoscaler has added so many slices, it sees the next ones."""


class AutoscalerDemand:
    """Keeps as many placement groups waiting as slices are missing. `update` blocks.

    Args:
        has_autoscaler: whether one serves this cluster.

    Attributes:
        asked: how many slices of each type the autoscaler is asked for.
    """

    def __init__(self, has_autoscaler: bool = False) -> None:
        self._has_autoscaler = has_autoscaler
        self._groups: dict[str, list[PlacementGroup]] = {}
        self._kept_off: dict[str, frozenset[str]] = {}
        self._arrivals = Arrivals()
        self.asked: dict[str, int] = {}
        self._knows_all = False  # which groups there are

    @staticmethod
    def of_this_cluster() -> "AutoscalerDemand":
        """Look through the head's processes for an autoscaler that serves this cluster."""
        return AutoscalerDemand(runs_autoscaler(os.environ))

    def is_shown(self, setting: bool | None) -> bool:
        """Return whether to show missing slices, as the cluster's setting says; None: only if an autoscaler runs."""
        return self._has_autoscaler if setting is None else setting

    @property
    def is_gone(self) -> bool:
        """Whether certainly no group is left, not even one of an earlier process."""
        return self._knows_all and not self._groups

    def asked_for(self, device: str) -> int:
        """Return how many slices of a type the autoscaler is asked for."""
        return self.asked.get(get_tpu_config(device).name, 0)

    def update(self, missing: Mapping[str, int], slices: Mapping[str, tuple[str, bool]]) -> None:
        """Make the groups that are lacking, and remove those that are too many or have got their slice.

        Args:
            missing: how many slices of each type waiting jobs could use.
            slices: the type of each slice that has hosts, and whether it has all of them.
        """
        if not self._knows_all:
            self._remove_leftovers()
        self._knows_all = False  # a call of Ray that fails may have taken effect
        wanted = net_demand(missing, self._arrivals.arriving(slices, time.monotonic()))
        for tpu_type in {*wanted, *self._groups}:
            there = frozenset(name for name, (its_type, _) in slices.items() if its_type == tpu_type)
            self._update(tpu_type, min(wanted.get(tpu_type, 0), MOST_GROUPS), there)
        self._knows_all = True
        if wanted != self.asked:
            self.asked = wanted
            logger.info("Ray's autoscaler is asked for %s", wanted or "no slices any more")

    def _update(self, tpu_type: str, count: int, there: frozenset[str]) -> None:
        groups = self._groups.get(tpu_type, [])
        outdated = groups if there != self._kept_off.get(tpu_type) else [g for g in groups if not _waits(g)]
        kept = [group for group in groups if group not in outdated]
        made = [_make(tpu_type, there) for _ in range(count - len(kept))]  # first, so that the demand never drops
        for group in (*outdated, *kept[count:]):
            remove_placement_group(group)
        self._groups[tpu_type] = kept[:count] + made
        self._kept_off[tpu_type] = there
        if not self._groups[tpu_type]:
            del self._groups[tpu_type], self._kept_off[tpu_type]

    def _remove_leftovers(self) -> None:
        """Remove all groups: they are from before a restart of this process, or from before a call failed."""
        for group_id, group in placement_group_table().items():
            if group["name"].startswith(NAME_PREFIX) and group["state"] != "REMOVED":
                remove_placement_group(placement_group_by_id(group_id))
        self._groups, self._kept_off = {}, {}


def _make(tpu_type: str, there: frozenset[str]) -> PlacementGroup:
    bundle = {f"TPU-{tpu_type}-head": 1.0}
    if not has_autoscaler_v2():
        bundle[TPU] = float(get_tpu_config(tpu_type).chips_per_vm)
    selector = {SLICE_NAME_LABEL: f"!in({','.join(sorted(there))})"} if there else {}
    name = f"{NAME_PREFIX}{tpu_type}/{uuid.uuid4().hex[:8]}"
    return placement_group([bundle], name=name, bundle_label_selector=[selector] if selector else None)


def _waits(group: PlacementGroup) -> bool:
    return placement_group_table(group).get("state") in ("PENDING", "PREPARED", "RESCHEDULING")
