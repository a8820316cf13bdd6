"""Which devices have changed, for all who keep something about them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from iris_ray.slots.devices import DeviceKey

KEPT, MOST = 20_000, 40_000
"""Changes; the oldest are forgotten when there are too many. A reader that was away for longer looks at all devices."""


@dataclass(slots=True)
class ChangeLog:
    """The most recent changes, in order. Readers remember how far they have read.

    Attributes:
        runner_changes: how often a runner has come, gone, opened or closed.
    """

    runner_changes: int = 0
    _keys: list[DeviceKey] = field(default_factory=list)
    _forgotten: int = 0
    _last: Sequence[DeviceKey] = ()
    """The keys that `add` got last; empty once a reader has read them."""

    @property
    def end(self) -> int:
        """How far it can be read now."""
        return self._forgotten + len(self._keys)

    def add(self, keys: Sequence[DeviceKey]) -> None:
        """Note that something changed on these devices."""
        if keys == self._last:  # a slot changes several times in one decision
            return
        known, self._last = self._keys, keys
        known.extend(keys)
        if len(known) > MOST:
            self._forgotten += len(known) - KEPT
            del known[:-KEPT]

    def since(self, position: int) -> set[DeviceKey] | None:
        """Return what has changed since somebody read up to there; None: that is no longer known, it may be all."""
        self._last = ()
        return None if position < self._forgotten else set(self._keys[position - self._forgotten :])
