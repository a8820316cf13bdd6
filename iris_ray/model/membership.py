"""The running slices of a job whose slices are separate gangs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Membership:
    """The slices of a job at a point in time.

    Attributes:
        epoch: a number that increases with every change.
        running: the attempt number of each running slice, by slice id, in the order of their starts. A slice that
            restarts gets a higher number and moves to the end.
        returned: ids of the slices whose tasks have all returned. They don't run again.
        token: a secret by which the job's tasks authenticate each other.
    """

    epoch: int
    running: Mapping[int, int] = field(default_factory=dict)
    returned: frozenset[int] = frozenset()
    token: str = field(default="", repr=False)

    def to_json(self) -> str:
        return json.dumps([self.epoch, list(self.running.items()), sorted(self.returned), self.token])

    @staticmethod
    def of_json(text: str) -> "Membership":
        """Parse the output of `to_json`. Raises ValueError or TypeError for any other text."""
        epoch, running, returned, token = json.loads(text)
        in_order = {int(slice_id): int(attempt) for slice_id, attempt in running}
        return Membership(int(epoch), in_order, frozenset(map(int, returned)), str(token))
