"""Which hosts are set aside: those on which task processes fail again and again, where they do not elsewhere."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from iris_ray.state.fleet import Fleet, Taint

QUARANTINE = "quarantined"
"""The name of the taint."""
BLAMES_ALLOWED = 2
"""Failures of a host within `MEMORY_S` that are put down to bad luck; the next one sets it aside."""
MEMORY_S = 3600.0
QUARANTINE_S = 3600.0
"""How long a host is set aside, unless somebody lifts its taint before."""
SHORT_QUARANTINE_S = 300.0
"""The same if no user code came to run there: most likely somebody has its chips, who may be gone in a while."""


@dataclass(frozen=True, slots=True)
class Blame:
    """One failure that may be a host's fault.

    Attributes:
        node_id, user: where, and whose task it was.
        by_user_code: whether user code ran by then; if so, and the user's tasks crash on other hosts as well, it is the
            user's own doing.
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
        self._set_aside: dict[str, tuple[Taint, list[Blame]]] = {}  # worker id → what it got for that, and why

    def add(self, blame: Blame, reason: str) -> Taint | None:
        """Put a failure down; the taint that its host gets, if there are too many by now."""
        self._blames.append(blame)
        while self._blames[0].at < blame.at - MEMORY_S:
            self._blames.popleft()
        counted = self._counted(blame.node_id, self._blames)
        if len(counted) <= BLAMES_ALLOWED:
            return None
        self.forgive(blame.node_id)  # they have had their effect
        why = f"{len(counted)} task processes failed there within an hour, the last one: {reason}"
        ran = any(blamed.by_user_code for blamed in counted)
        taint = Taint(why, blame.at + (QUARANTINE_S if ran else SHORT_QUARANTINE_S))
        self._set_aside[blame.node_id] = taint, counted
        return taint

    def acquitted(self) -> dict[str, Taint]:
        """Hosts that were set aside for what their users' tasks do on other hosts, too, as has turned out since.

        With the taint that each got for that; by now it may have another one, which is none of ours.
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
        """Forget what was put down against a host."""
        self._blames = deque(blame for blame in self._blames if blame.node_id != node_id)
        self._set_aside.pop(node_id, None)

    def _counted(self, node_id: str, blames: Iterable[Blame]) -> list[Blame]:
        """Those against a host that are no user's own doing."""
        elsewhere = {blame.user for blame in self._blames if blame.by_user_code and blame.node_id != node_id}
        return [b for b in blames if b.node_id == node_id and not (b.by_user_code and b.user in elsewhere)]


class Quarantine:
    """Sets hosts aside, and takes them back when it turns out that they were not at fault."""

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
        """Somebody lifts a taint. If it is a quarantine, what was counted against the host is forgotten."""
        self._fleet.lift_taint(target, taint)
        if taint == QUARANTINE:
            self._blames.forgive(target)
