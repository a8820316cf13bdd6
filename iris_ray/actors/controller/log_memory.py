"""What the Controller remembers of tasks' output, for when a host is gone."""

from collections import OrderedDict
from dataclasses import dataclass, field

from iris_ray.actors.wire.task_log import AttemptOfTask, LastLines


@dataclass(slots=True)
class LogMemory:
    """Where attempts of tasks ran, and the last lines of each: what is left when a host is gone. Bounded.

    Args:
        most_places: attempts of tasks whose host is remembered; the oldest are forgotten first.
        most_bytes: of last lines in all.
    """

    most_places: int = 200_000
    most_bytes: int = 64 << 20
    _places: OrderedDict[AttemptOfTask, str] = field(default_factory=OrderedDict)
    _last: OrderedDict[AttemptOfTask, LastLines] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def placed(self, job_id: str, task_index: int, attempt: int, node_id: str) -> None:
        """That attempt of that task runs there."""
        self._places[job_id, task_index, attempt] = node_id
        while len(self._places) > self.most_places:
            self._places.popitem(last=False)

    def remember(self, last: LastLines) -> None:
        """Take the last lines of an attempt, in place of earlier ones of the same."""
        key = last.job_id, last.task_index, last.attempt
        old = self._last.pop(key, None)
        if old is not None and old.end > last.end:
            last = old  # messages overtake each other
        self._bytes += len(last.data) - (len(old.data) if old else 0)
        self._last[key] = last
        self.placed(*key, last.node_id)
        while self._bytes > self.most_bytes:
            self._bytes -= len(self._last.popitem(last=False)[1].data)

    def node_of(self, key: AttemptOfTask) -> str | None:
        return self._places.get(key)

    def last_lines(self, key: AttemptOfTask) -> LastLines | None:
        return self._last.get(key)
