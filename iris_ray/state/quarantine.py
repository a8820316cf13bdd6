"""Quarantine: hosts on which task processes fail again and again, though they don't fail elsewhere, are set aside."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from iris_ray.state.fleet import Fleet, Taint

QUARANTINE = "quarantined"
"""The name of the taint."""
BLAMES_ALLOWED = 2
"""Failures of a host within `MEMORY_S` that are tolerated; the next one sets it aside."""
MEMORY_S = 3600.0
QUARANTINE_S = 3600.0
"""How long a host is set aside, unless its taint is lifted before."""
SHORT_QUARANTINE_S = 300.0
"""The same if no user code ran there: most likely another process has its chips, and may release them soon."""


@dataclass(frozen=True, slots=True)
class Blame:
    """One failure that may be a host's fault.

    Attributes:
        node_id: the host.
        user: the user of the task.
        by_user_code: whether user code had begun to run. If so, and the user's tasks crash on other hosts as well, the
            failure does not count against the host.
        at: seconds on the caller's clock.
    """

    node_id: str
    user: str
    by_user_code: bool
    at: float


class BlameBook:
    """Failures of the last hour."""

    def __init__(self) -> None:
        self._blames: deque[Blame] = deque()
        self._set_aside: dict[
            str, tuple[Taint, list[Blame]]
        ] = {}  # node id → its taint, and the failures that led to it

    def add(self, blame: Blame, reason: str) -> Taint | None:
        """Record a failure. Return the taint that its host gets if it has too many by now, else None."""
        self._blames.append(blame)
        while self._blames[0].at < blame.at - MEMORY_S:
            self._blames.popleft()
        counted = self._counted(blame.node_id, self._blames)
        if len(counted) <= BLAMES_ALLOWED:
            return None
        self.forgive(blame.node_id)  # they count only once
        why = f"{len(counted)} task processes failed there within an hour, the last one: {reason}"
        ran = any(blamed.by_user_code for blamed in counted)
        taint = Taint(why, blame.at + (QUARANTINE_S if ran else SHORT_QUARANTINE_S))
        self._set_aside[blame.node_id] = taint, counted
        return taint

    def acquitted(self) -> dict[str, Taint]:
        """Return the hosts that were set aside for failures of tasks that have since failed on other hosts, too.

        Each comes with the taint that it got for them. By now the host may have another taint, set by an operator.
        """
        found = {
            host: taint
            for host, (taint, blames) in self._set_aside.items()
            if len(self._counted(host, blames)) <= BLAMES_ALLOWED
        }
        for node_id in found:
            self.forgive(node_id)
        return found

    def forgive(self, node_id: str) -> None:
        """Forget the failures of a host."""
        self._blames = deque(blame for blame in self._blames if blame.node_id != node_id)
        self._set_aside.pop(node_id, None)

    def _counted(self, node_id: str, blames: Iterable[Blame]) -> list[Blame]:
        """Return a host's failures without those of users whose tasks crash on other hosts as well."""
        elsewhere = {blame.user for blame in self._blames if blame.by_user_code and blame.node_id != node_id}
        return [b for b in blames if b.node_id == node_id and not (b.by_user_code and b.user in elsewhere)]


class Quarantine:
    """Sets hosts aside, and releases them when later failures show that they were not at fault."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._blames = BlameBook()

    def blame(self, blame: Blame, reason: str) -> None:
        """Count a failure against a host."""
        if (taint := self._blames.add(blame, reason)) is not None:
            self._fleet.taint(blame.node_id, QUARANTINE, taint)
        for node_id, taint in self._blames.acquitted().items():
            if self._fleet.taints.get(node_id, {}).get(QUARANTINE) == taint:
                self._fleet.lift_taint(node_id, QUARANTINE)

    def taint_lifted(self, target: str, taint: str) -> None:
        """Lift a taint. If it is the quarantine, the host's failures are forgotten."""
        self._fleet.lift_taint(target, taint)
        if taint == QUARANTINE:
            self._blames.forgive(target)
