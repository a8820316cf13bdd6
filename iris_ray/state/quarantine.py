"""Whom failures of hosts concern: the user whose tasks fail there, or everybody.

A failure is held against the pair of a user and a host. If a user's tasks fail again and again on one host and not on
others, that user's jobs avoid it. A host is set aside for everybody if tasks of different users fail there, or if the
host itself shows that it is not fit.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from iris_ray.model.outcomes import Fault
from iris_ray.state.fleet import Fleet, Taint

QUARANTINE = "quarantined"
"""The name of the taint."""
BLAMES_ALLOWED = 2
"""Failures within `MEMORY_S` that are tolerated; the next one has consequences."""
MEMORY_S = 3600.0
QUARANTINE_S = 3600.0
"""How long a host is set aside or avoided, unless that is lifted before."""
SHORT_QUARANTINE_S = 300.0
"""The same if no user code ran there: most likely another process has its chips, and may release them soon."""


@dataclass(frozen=True, slots=True)
class Blame:
    """One failure that may be a host's fault.

    Attributes:
        node_id: the host.
        user: the user of the task.
        fault: what failed.
        at: seconds on the caller's clock.
    """

    node_id: str
    user: str
    fault: Fault
    at: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from the failures of a host.

    Attributes:
        everybody: whether the host is set aside; otherwise a user's jobs avoid it.
        blames: the failures.
    """

    everybody: bool
    blames: tuple[Blame, ...]

    @property
    def seconds(self) -> float:
        """How long it holds."""
        in_user_code = any(blame.fault in (Fault.CRASH, Fault.DISK) for blame in self.blames)
        return QUARANTINE_S if in_user_code else SHORT_QUARANTINE_S


class BlameBook:
    """Failures of the last hour."""

    def __init__(self) -> None:
        self._blames: deque[Blame] = deque()

    def add(self, blame: Blame) -> Judgement | None:
        """Record a failure. Return what follows from it, or None."""
        self._blames.append(blame)
        while self._blames[0].at < blame.at - MEMORY_S:
            self._blames.popleft()
        here = [one for one in self._blames if one.node_id == blame.node_id]
        by_host = tuple(one for one in here if one.fault is Fault.HOST)
        by_users = tuple(self._not_the_users([one for one in here if one.fault is not Fault.HOST]))
        by_user = tuple(one for one in by_users if one.user == blame.user)
        if blame.fault is Fault.HOST:
            return Judgement(True, by_host) if len(by_host) > BLAMES_ALLOWED else None
        if len(by_users) > BLAMES_ALLOWED and len(by_user) < len(by_users):
            return Judgement(True, by_users)
        return Judgement(False, by_user) if len(by_user) > BLAMES_ALLOWED else None

    def still_holds(self, judged: Judgement) -> bool:
        """Return whether a judgement holds after all that is known now."""
        if judged.blames[0].fault is Fault.HOST:
            return True
        left = self._not_the_users(judged.blames)
        return len(left) > BLAMES_ALLOWED and (not judged.everybody or len({one.user for one in left}) > 1)

    def _not_the_users(self, blames: Sequence[Blame]) -> list[Blame]:
        """Return those failures on one host whose users' tasks don't fail on other hosts as well."""
        users = {one.user for one in blames}
        others = (one for one in self._blames if one.user in users and one.fault is not Fault.HOST)
        elsewhere = {one.user for one in others if one.node_id != blames[0].node_id}
        return [one for one in blames if one.user not in elsewhere]

    def forgive(self, node_id: str) -> None:
        """Forget the failures of a host."""
        self._blames = deque(blame for blame in self._blames if blame.node_id != node_id)


class Quarantine:
    """Sets hosts aside, for a user or for all, and releases them when later failures show that they were not at fault.

    Args:
        fleet: has the taints of hosts, and what users avoid.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._blames = BlameBook()
        self._set_aside: dict[str, tuple[Taint, Judgement]] = {}  # node id → its taint, and why it has that
        self._avoided: dict[tuple[str, str], Judgement] = {}  # (user, node id)

    def blame(self, blame: Blame, reason: str) -> None:
        """Count a failure against a host and a user."""
        judged = self._blames.add(blame)
        if judged is not None and judged.everybody:
            count, until = len(judged.blames), blame.at + judged.seconds
            taint = Taint(f"{count} task processes failed there within an hour, the last one: {reason}", until)
            self._forgive(blame.node_id)  # they count only once
            self._set_aside[blame.node_id] = taint, judged
            self._fleet.taint(blame.node_id, QUARANTINE, taint)
        elif judged is not None:
            self._avoided[blame.user, blame.node_id] = judged
            self._fleet.avoid(blame.user, blame.node_id, blame.at + judged.seconds)
        self._acquit()

    def taint_lifted(self, target: str, taint: str) -> None:
        """Lift a taint. If it is the quarantine, the host's failures are forgotten."""
        self._fleet.lift_taint(target, taint)
        if taint == QUARANTINE:
            self._forgive(target)

    def _acquit(self) -> None:
        """Release hosts that are not at fault, by all that is known now. An operator's taint stays."""
        for node_id, (taint, judged) in list(self._set_aside.items()):
            if not self._blames.still_holds(judged):
                self._forgive(node_id)
                if self._fleet.taints.get(node_id, {}).get(QUARANTINE) == taint:
                    self._fleet.lift_taint(node_id, QUARANTINE)
        for (user, node_id), judged in list(self._avoided.items()):
            over = node_id not in self._fleet.avoided.get(user, {})
            if over or not self._blames.still_holds(judged):
                del self._avoided[user, node_id]
                if not over:
                    self._fleet.avoid(user, node_id, None)

    def _forgive(self, node_id: str) -> None:
        self._blames.forgive(node_id)
        self._set_aside.pop(node_id, None)
