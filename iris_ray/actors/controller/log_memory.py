"""What the Controller remembers of tasks' output, for when a host is gone."""

import heapq
import sys
from dataclasses import dataclass, field
from itertools import islice

from iris_ray.actors.wire.task_log import LastLines, LogId

ATTEMPT_BYTES = 240
"""What an attempt takes besides its lines: its key, where it ran, and its share of a dictionary that has room left."""
JOB_BYTES = 400
"""What a job takes besides its attempts."""

_Attempt = tuple[str, int, bytes]
"""Node id, how many bytes it has printed in all, the last of them."""


@dataclass(slots=True)
class _JobMemory:
    """The attempts of one job's tasks, the one that was heard of last at the end, by `_key`."""

    attempts: dict[int, _Attempt] = field(default_factory=dict)
    held_bytes: int = JOB_BYTES

    def put(self, key: int, attempt: _Attempt) -> None:
        self.forget(key)
        self.attempts[key] = attempt
        self.held_bytes += ATTEMPT_BYTES + len(attempt[2])

    def forget(self, key: int) -> None:
        if (attempt := self.attempts.pop(key, None)) is not None:
            self.held_bytes -= ATTEMPT_BYTES + len(attempt[2])

    def forget_oldest(self) -> None:
        """Forget an eighth of the attempts, at least one."""
        for key in list(islice(self.attempts, len(self.attempts) // 8 + 1)):
            self.forget(key)


class LogMemory:
    """Where attempts of tasks ran, and the last lines of each: what is left when a host is gone. Bounded.

    If there are too many, the jobs that take most of the memory forget their oldest attempts. So a job with very many
    tasks does not make the memory forget all others.

    Args:
        most_bytes: how much memory it may take, the overhead of Python's objects included.

    Attributes:
        held_bytes: how much it takes.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most_bytes = most_bytes
        self._jobs: dict[str, _JobMemory] = {}
        self.held_bytes = 0

    def placed(self, key: LogId, node_id: str) -> None:
        """Note that an attempt of a task runs there."""
        known = self._find(key)
        self._put(key, (sys.intern(node_id), *(known[1:] if known else (0, b""))))

    def remember(self, last: LastLines) -> None:
        """Take the last lines of an attempt, in place of earlier ones of the same."""
        key = last.log_id
        known = self._find(key)
        if known is None or known[1] <= last.end:  # else the messages have overtaken each other
            self._put(key, (sys.intern(last.node_id), last.end, last.data))

    def node_of(self, key: LogId) -> str | None:
        """Return the host that an attempt ran on."""
        found = self._find(key)
        return found[0] if found else None

    def last_lines(self, key: LogId) -> LastLines | None:
        """Return the last lines of an attempt that came here, if any did."""
        found = self._find(key)
        return LastLines(*key, *found) if found and found[1] else None

    def _find(self, key: LogId) -> _Attempt | None:
        job = self._jobs.get(key.job_id)
        return job.attempts.get(_key(key)) if job else None

    def _put(self, key: LogId, attempt: _Attempt) -> None:
        job = self._jobs.get(key.job_id)
        if job is None:
            job = self._jobs[key.job_id] = _JobMemory()
            self.held_bytes += job.held_bytes
        self.held_bytes -= job.held_bytes
        job.put(_key(key), attempt)
        self.held_bytes += job.held_bytes
        if self.held_bytes > self._most_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Forget what is oldest in the largest jobs, until an eighth is free: so it is rarely done."""
        largest = [(-job.held_bytes, place, job_id) for place, (job_id, job) in enumerate(self._jobs.items())]
        heapq.heapify(largest)
        while self.held_bytes > self._most_bytes // 8 * 7 and largest:
            before, place, job_id = largest[0]
            job = self._jobs[job_id]
            job.forget_oldest()
            if job.attempts:
                heapq.heapreplace(largest, (-job.held_bytes, place, job_id))
                self.held_bytes += before + job.held_bytes
            else:
                heapq.heappop(largest)
                del self._jobs[job_id]
                self.held_bytes += before


def _key(key: LogId) -> int:
    return key.task_index << 32 | key.attempt
