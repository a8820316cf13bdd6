"""Asks KubeRay for missing slices: raises the ``replicas`` of worker groups, and says why slices don't come.

A requested slice that has not come is withdrawn once no job misses it, else Google would bring it hours after its job
was cancelled. A process withdraws only its own requests, because others raise ``replicas``, too. After a restart of the
Controller the requested slices come, and go when they have been idle.

`capacity/kuberay.py` says why this is no demand for Ray's autoscaler. `find_demand` chooses the autoscaler or KubeRay.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from iris_ray.capacity.autoscaler import AutoscalerDemand, Demand, Slices, since_words
from iris_ray.capacity.demand import ARRIVAL_S
from iris_ray.capacity.kuberay import (
    SCALE_UP_EVENTS,
    Raise,
    WorkerGroup,
    obstacles,
    pod_troubles,
    raises,
    withdrawal,
    worker_groups,
)
from iris_ray.capacity.kubernetes import KubernetesApi
from iris_ray.capacity.ray_internals import counts_hosts, runs_autoscaler
from iris_ray.errors import ProviderDeniedError, ProviderError
from iris_ray.model.topology import get_tpu_config

logger = logging.getLogger(__name__)

SETTLING_S = 3.0
"""The seconds from which a demand counts: a job still waits for a moment when its slice has just come."""
LOOK_S = 5.0
"""The interval between two looks at the RayCluster while slices are missing. Ray's autoscaler looks as often."""
REASONS_S = 15.0
"""The interval between two looks at pods that wait."""
CRASHES_S = 60.0
"""The interval between two looks at running pods, some of which may crash again and again."""
SPARE_S = 60.0
"""The seconds without demand after which a requested slice is withdrawn: a user may submit a job again."""
FIRST_RETRY_S, LONGEST_RETRY_S = 15.0, 600.0
"""The pauses between looks whether Kubernetes still denies the RayCluster; each is twice as long as the last."""


class KubeRayDemand(Demand):
    """Raises the worker groups' ``replicas`` to the numbers of present and missing slices together.

    Args:
        api: of this cluster.
        has_autoscaler: whether Ray's autoscaler serves the cluster, and gives back idle slices.
        clock: seconds that only grow.
    """

    way = "replicas of KubeRay's worker groups"

    def __init__(
        self, api: KubernetesApi, has_autoscaler: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(has_autoscaler)
        self._clock = clock
        self._api = api
        self._totals: deque[tuple[float, dict[str, int]]] = deque()
        self._looked_at = self._asked_why_at = self._asked_crashes_at = -float("inf")
        self._before: object = None  # what was missing at the last look
        self._raised = Counter[str]()  # group → slices that it was asked for here and that have not come
        self._unanswered: dict[str, Raise] = {}  # group → its last change, if no answer came: it may have been made
        self._spare: dict[str, tuple[float, int]] = {}  # type → since when at least so many are missed by nobody
        self._types: dict[str, str] = {}  # group → type
        self._there_before = Counter[str]()
        self._broken: dict[str, float] = {}  # slice → since when it has not been whole
        self._since: dict[str, float] = {}
        self._words: dict[str, tuple[str, ...]] = {}
        self._troubles: Mapping[str, tuple[str, ...]] = {}
        self._crashing: list[dict[str, Any]] = []
        self._events_from = -float("inf")  # when to ask for events, after a denial again

    @property
    def is_gone(self) -> bool:
        return not self.asked and not self._raised and not self._unanswered

    def words(self, device: str) -> tuple[str, ...]:
        return self._words.get(get_tpu_config(device).name, ())

    def update(self, missing: Mapping[str, Sequence[int]], slices: Slices) -> None:
        now = self._clock()
        there = self._there(slices, now)
        self._note_arrivals(there)
        self._since = {tpu_type: self._since.get(tpu_type, now) for tpu_type in missing}
        settled = self._settled({t: there[t] + sum(gangs) for t, gangs in missing.items()}, now)
        if not missing:
            self.asked, self._words = {}, {}
            if not self._raised and not self._unanswered:
                self._before = None
                return
        if self._before == (settled, missing) and now - self._looked_at < LOOK_S:
            return
        self._looked_at, self._before = now, (settled, missing)
        try:
            self._look(missing, there, settled, now)
        except ProviderError as error:
            self._words = dict.fromkeys(missing, (str(error),))
            raise

    def _there(self, slices: Slices, now: float) -> Counter[str]:
        """Count the slices of each type that are whole, or have lacked hosts for too long to be starting."""
        self._broken = {name: self._broken.get(name, now) for name, (_, whole) in slices.items() if not whole}
        return Counter(t for name, (t, whole) in slices.items() if whole or now - self._broken[name] >= ARRIVAL_S)

    def _settled(self, totals: dict[str, int], now: float) -> dict[str, int]:
        """Return for each type the smallest number of slices that was wanted in the past `SETTLING_S`."""
        while len(self._totals) > 1 and self._totals[1][0] <= now - SETTLING_S:
            self._totals.popleft()
        self._totals.append((now, totals))
        if self._totals[0][0] > now - SETTLING_S:
            return dict.fromkeys(totals, 0)
        return {tpu_type: min(then.get(tpu_type, 0) for _, then in self._totals) for tpu_type in totals}

    def _look(
        self, missing: Mapping[str, Sequence[int]], there: Counter[str], settled: Mapping[str, int], now: float
    ) -> None:
        cluster = self._api.ray_cluster()
        groups = worker_groups(cluster)
        self._note_changes(groups)
        changes = [
            change
            for tpu_type, gangs in missing.items()
            for change in raises(_of(groups, tpu_type), there[tpu_type], gangs, settled[tpu_type])
        ]
        if changes:
            self._unanswered = {change.group.name: change for change in changes}
            try:
                groups = worker_groups(self._api.patch_ray_cluster([op for change in changes for op in change.patch]))
            except ProviderError as error:
                if error.__cause__ is None:  # a refusal: nothing was changed
                    self._unanswered = {}
                raise
            self._note_changes(groups)
            named = ", ".join(f"{change.to} of group {change.group.name}" for change in changes)
            logger.info("KubeRay is asked for slices; wanted: %s", named)
        elif self._raised:
            groups = self._withdraw(cluster, groups, missing, there, now)
        coming = {t: max(0, _wanted(groups, t) - there[t]) for t in missing}
        self.asked = {t: min(n, sum(missing[t])) for t, n in coming.items() if n}
        troubles = self._pod_troubles(now) if any(coming.values()) else {}
        self._words = {}
        for tpu_type, gangs in missing.items():
            its_groups = _of(groups, tpu_type)
            asked = self.asked.get(tpu_type)
            self._words[tpu_type] = (
                *([f"KubeRay is asked for {asked} more{since_words(now - self._since[tpu_type])}"] if asked else ()),
                *obstacles(its_groups, there[tpu_type], gangs),
                *(why for group in its_groups for why in troubles.get(group.name, ())),
            )

    def _note_changes(self, groups: Sequence[WorkerGroup]) -> None:
        """Count what was asked for, now that it can be seen: the answer to a change may have been lost."""
        for group in groups:
            if (change := self._unanswered.pop(group.name, None)) is not None:
                self._raised[group.name] += max(0, min(group.wanted, change.to) - change.group.wanted)
                self._types[group.name] = group.tpu_type
        self._unanswered = {}
        self._raised = +self._raised

    def _note_arrivals(self, there: Counter[str]) -> None:
        """Match new slices with this process's requests, so that it never withdraws a request of somebody else."""
        for tpu_type, count in (there - self._there_before).items():
            for group in [name for name in self._raised if self._types[name] == tpu_type]:
                come = min(count, self._raised[group])
                self._raised[group] -= come
                count -= come
        self._raised = +self._raised
        self._there_before = there

    def _withdraw(
        self,
        cluster: Mapping[str, Any],
        groups: list[WorkerGroup],
        missing: Mapping[str, Sequence[int]],
        there: Counter[str],
        now: float,
    ) -> list[WorkerGroup]:
        """Withdraw requested slices that no job has missed for `SPARE_S`. Return the groups after that."""
        coming = {t: _wanted(groups, t) - there[t] for t in {*self._types.values()}}
        self._raised &= Counter({g.name: max(0, coming.get(g.tpu_type, 0)) for g in groups})
        spares = {t: n - sum(missing.get(t, ())) for t, n in coming.items()}
        self._spare = {
            t: (since, min(least, n))
            for t, n in spares.items()
            if n > 0
            for since, least in [self._spare.get(t, (now, n))]
        }
        for group in groups:
            since, spare = self._spare.get(group.tpu_type, (now, 0))
            count = min(spare, self._raised[group.name])
            if count <= 0 or now - since < SPARE_S:
                continue
            del self._spare[group.tpu_type]
            try:
                found = withdrawal(group, self._api.pods("Pending"), count)
                if found is None:
                    continue
                changed = self._api.patch_ray_cluster(found.patch(cluster["metadata"]["resourceVersion"]))
            except ProviderError as error:  # such as a change at the same moment
                logger.info("superfluous requests for slices of group %s are not withdrawn yet: %s", group.name, error)
                continue
            self._raised -= Counter({group.name: len(found.slices)})
            logger.info("KubeRay is no longer asked for %d slices of group %s", len(found.slices), group.name)
            return worker_groups(changed)
        return groups

    def _pod_troubles(self, now: float) -> Mapping[str, tuple[str, ...]]:
        if now - self._asked_why_at >= REASONS_S:
            self._asked_why_at = now
            if now - self._asked_crashes_at >= CRASHES_S:  # of thousands of hosts: tens of megabytes
                self._asked_crashes_at = now
                self._crashing = [pod for pod in self._api.pods("Running") if pod_troubles([pod])]
            self._troubles = pod_troubles([*self._api.pods("Pending"), *self._crashing], self._events(now))
        return self._troubles

    def _events(self, now: float) -> list[dict[str, object]]:
        if now >= self._events_from:
            try:
                return [event for reason in SCALE_UP_EVENTS for event in self._api.pod_events(reason)]
            except ProviderDeniedError as error:
                logger.info("the events of Kubernetes' autoscaler about pods can't be read: %s", error)
                self._events_from = now + LONGEST_RETRY_S
        return []


def _of(groups: Sequence[WorkerGroup], tpu_type: str) -> list[WorkerGroup]:
    return [group for group in groups if group.tpu_type == tpu_type]


def _wanted(groups: Sequence[WorkerGroup], tpu_type: str) -> int:
    """Return how many slices of a type the worker groups are to have, without broken groups."""
    return sum(group.wanted for group in _of(groups, tpu_type) if group.problem is None)


class DeniedDemand(Demand):
    """Shows placement groups while Kubernetes denies the RayCluster, looks again and again, and then raises replicas.

    A denial may pass: the account's role is bound a moment after the pod starts, or an operator mends it.

    Args:
        api: of this cluster.
        denial: its answer at the first look.
        stand_in: shows the placement groups.
        has_autoscaler: whether Ray's autoscaler serves the cluster.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        api: KubernetesApi,
        denial: ProviderDeniedError,
        stand_in: Demand,
        has_autoscaler: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(has_autoscaler)
        self._api, self._clock, self._now_by = api, clock, stand_in
        self._pause_s = FIRST_RETRY_S
        self._look_at = clock() + self._pause_s
        self.way, self.problem = stand_in.way, str(denial)

    @property
    def is_gone(self) -> bool:
        return self._now_by.is_gone

    def words(self, device: str) -> tuple[str, ...]:
        words = self._now_by.words(device)
        denied = f"by {self.way}, which miscounts slices on KubeRay, because {self.problem}"
        return (*words, denied) if words and self.problem else words

    def update(self, missing: Mapping[str, Sequence[int]], slices: Slices) -> None:
        if self.problem and self._clock() >= self._look_at:
            self._look_again(slices)
        self._now_by.update(missing, slices)
        self.asked = self._now_by.asked

    def _look_again(self, slices: Slices) -> None:
        try:
            self._api.ray_cluster()
        except ProviderError as error:  # also no answer: it says nothing of what the account may do
            self.problem = str(error)
            self._pause_s = min(LONGEST_RETRY_S, self._pause_s * 2)
            self._look_at = self._clock() + self._pause_s
            return
        self._now_by.update({}, slices)  # both ways together would bring twice as many
        self._now_by = KubeRayDemand(self._api, self._has_autoscaler, self._clock)
        self.way, self.problem = self._now_by.way, None
        logger.info("Kubernetes allows access to the RayCluster again: missing slices are requested by %s", self.way)


def find_demand() -> Demand:
    """Return the object that requests missing slices in this cluster. Look at the head's pod or processes; block."""
    has_autoscaler = runs_autoscaler(os.environ)
    api = KubernetesApi.of_this_pod()
    if api is None:
        return AutoscalerDemand(has_autoscaler)
    try:
        api.ray_cluster()
    except ProviderDeniedError as error:
        logger.warning(
            "missing slices are requested from Ray's autoscaler, which miscounts them; trying KubeRay again later: %s",
            error,
        )
        return DeniedDemand(api, error, AutoscalerDemand(has_autoscaler, counts_hosts()), has_autoscaler)
    except ProviderError as error:
        logger.warning("missing slices can't be requested yet: %s", error)
    return KubeRayDemand(api, has_autoscaler)
