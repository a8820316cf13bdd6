"""What users have held in the past hours, so that users who had much lately come after those who had little."""

import math
from collections.abc import Mapping

HALF_LIFE_S = 4 * 3600.0
"""After so long, what was held counts half."""

_HOUR_S = 3600.0
_MEAN_LIFE_S = HALF_LIFE_S / math.log(2)
_NEGLIGIBLE = 1e-3
_USERS = 1000
"""When more users are remembered, and then whenever they have doubled, those with next to nothing are forgotten."""


class PastUsage:
    """Each user's amount-hours of each resource. What was held four hours ago counts half, a day ago 1/64.

    Args:
        usage: what each user holds now, by Ray's resource names; read only.

    Attributes:
        now: how late it is, as far as events say.
    """

    def __init__(self, usage: Mapping[str, Mapping[str, float]]) -> None:
        self._usage = usage
        self.now = 0.0
        self._past: dict[str, tuple[float, dict[str, float]]] = {}  # user → when it was worked out, amount-hours
        self._most = _USERS

    def settle(self, user: str) -> None:
        """Add up what a user has held until now. Call it before what the user holds changes."""
        self._past[user] = self.now, self.hours(user, self.now)
        if len(self._past) > self._most:
            self._forget_old()

    def hours(self, user: str, now: float) -> dict[str, float]:
        """Return the amount-hours of a user until a time, by Ray's resource names."""
        at, before = self._past.get(user, (now, {}))
        left = 0.5 ** (max(0.0, now - at) / HALF_LIFE_S)
        hours = {resource: amount * left for resource, amount in before.items()}
        if left < 1.0:
            for resource, amount in self._usage.get(user, {}).items():
                hours[resource] = hours.get(resource, 0.0) + amount * (1.0 - left) * _MEAN_LIFE_S / _HOUR_S
        return hours

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the amount-hours of all users, but for those of whom next to nothing is left."""
        found = ((user, self.hours(user, self.now)) for user in self._past)
        return {
            user: {resource: round(amount, 4) for resource, amount in hours.items()}
            for user, hours in found
            if any(amount > _NEGLIGIBLE for amount in hours.values())
        }

    def restore(self, hours: Mapping[str, Mapping[str, float]], at: float) -> None:
        """Take up what an earlier Controller knew at a time. What was held since then is not known."""
        self._past |= {user: (at, dict(amounts)) for user, amounts in hours.items()}

    def _forget_old(self) -> None:
        left = self.snapshot()
        self._past = {user: past for user, past in self._past.items() if user in left or user in self._usage}
        self._most = max(_USERS, 2 * len(self._past))
