"""The memory of a provisioner: failures and backoff, unconfirmed requests, how long conditions have held. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 30.0, 1800.0


@dataclass(slots=True)
class ProvisioningHistory:
    """The memory of a provisioner from one plan to the next. If it is lost, timers begin anew.

    Attributes:
        failures: failures in a row; a slice that joins the cluster ends the row.
        not_before: when the next slice may be requested; times are of the clock of `plan`.
        last_failure: a sentence.
        unconfirmed: names of requested slices that are not listed yet, and the times of the first requests.
    """

    failures: int = 0
    not_before: float = 0.0
    last_failure: str = ""
    unconfirmed: dict[str, float] = field(default_factory=dict)
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _counted: set[str] = field(default_factory=set)
    _joined: set[str] = field(default_factory=set)

    def failed(self, now: float, why: str) -> None:
        """Record a failure: the next request waits for `pause_s`."""
        self.failures += 1
        self.last_failure = why
        self.not_before = now + self.pause_s

    @property
    def pause_s(self) -> float:
        """The pause in seconds: 30 after the first failure, then 60, 120, … up to half an hour."""
        return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(max(0, self.failures - 1), 20)))

    def refused(self, name: str, now: float, why: str) -> None:
        """Record that the provider refuses the slice of that name; it is not requested again."""
        self.unconfirmed.pop(name, None)
        self.failed(now, why)

    def failed_once(self, name: str, now: float, why: str) -> None:
        """Record the failure of a slice, unless it is recorded already."""
        if name not in self._counted:
            self._counted.add(name)
            self.failed(now, why)

    def has_joined(self, name: str) -> None:
        """Record that all hosts of a slice are in the cluster. The first such record ends the row of failures."""
        if name not in self._joined:
            self._joined.add(name)
            self.failures, self.not_before = 0, 0.0

    def once_joined(self, name: str) -> bool:
        """Return whether all hosts of a slice were in the cluster at some time."""
        return name in self._joined

    def lasting(self, what: str, name: str, holds: bool, now: float) -> float:
        """Return for how many seconds a condition has held at every look; 0 if it does not hold now."""
        if not holds:
            self._since.pop((what, name), None)
            return 0.0
        return now - self._since.setdefault((what, name), now)

    def forget_all_but(self, names: Collection[str]) -> None:
        """Forget the slices that are gone."""
        self._since = {key: since for key, since in self._since.items() if key[1] in names}
        self._counted &= set(names)
        self._joined &= set(names)
