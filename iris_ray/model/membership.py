"""Which slices of a job run, where each slice is a gang by itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Membership:
    """The slices of a job at one moment.

    Attributes:
        epoch: a number that grows with every change.
        running: by slice id, the number of the attempt that runs there, in the order in which they started. A slice
            that comes back has a higher number, and is the last.
        returned: the ids of the slices whose tasks have all returned. They don't run again.
        token: a secret of the job, by which its tasks know each other.
    """

    epoch: int
    running: Mapping[int, int] = field(default_factory=dict)
    returned: frozenset[int] = frozenset()
    token: str = field(default="", repr=False)

    def to_json(self) -> str:
        return json.dumps([self.epoch, list(self.running.items()), sorted(self.returned), self.token])

    @staticmethod
    def of_json(text: str) -> "Membership":
        """Return what `to_json` wrote. Raise ValueError, or TypeError, if it did not write this."""
        epoch, running, returned, token = json.loads(text)
        in_order = {int(slice_id): int(attempt) for slice_id, attempt in running}
        return Membership(int(epoch), in_order, frozenset(map(int, returned)), str(token))
