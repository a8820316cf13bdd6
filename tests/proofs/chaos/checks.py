"""What must hold of the lines that the tasks of a job have written."""

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tests.proofs.chaos.jobs import Line, Running

LAUNCH_S = 15.0
"""How long after a disturbance an attempt may have ended that did not start because of it."""
CUT_OFF_RUNS_S = 75.0
"""How long the tasks of a host that is cut off, or frozen, may go on after its attempt is over."""


@dataclass(frozen=True)
class KnownAttempt:
    """An attempt as the Controller remembers it.

    Attributes:
        number: its number.
        slices: where it was.
        at: when it began, or if it did not, when it ended; by the monotonic clock.
        began: whether it began.
    """

    number: int
    slices: Collection[str]
    at: float
    began: bool = True


@dataclass
class Disturbances:
    """When which slices were disturbed: a host did not answer, or was lost and the Controller could not know yet."""

    _all: list[tuple[str, float, float]] = field(default_factory=list)

    def add(self, slice_name: str, seconds: float) -> None:
        """Note that a slice is disturbed from now on."""
        now = time.monotonic()
        self._all.append((slice_name, now, now + seconds))

    def attempts(self, lines: list[Line], known: Collection["KnownAttempt"]) -> int:
        """How many attempts of a job began while one of their slices was disturbed.

        Args:
            lines: what its tasks have written. Those on the disturbed slice may not have begun, or none at all.
            known: its attempts, as far as the Controller knows.
        """
        slices = {attempt.number: attempt.slices for attempt in known}
        disturbed = {
            start["attempt"]
            for start in lines
            if "start" in start
            if any(self._during(n, start["at"], 0.0) for n in {start["slice"], *slices.get(start["attempt"], ())})
        }
        for attempt in known:
            if any(self._during(name, attempt.at, 0.0 if attempt.began else LAUNCH_S) for name in attempt.slices):
                disturbed.add(attempt.number)
        return len(disturbed)

    def explain(self, slice_name: str, at: float) -> bool:
        """Whether a task on the slice could not be told to stop: a host, or one of our processes, did not answer."""
        return self._during(slice_name, at, CUT_OFF_RUNS_S)

    def _during(self, slice_name: str, at: float, after_s: float) -> bool:
        return any(name == slice_name and begin < at < end + after_s for name, begin, end in self._all)


def check_steps(job: Running, lines: list[Line], took_part_in_the_end: bool) -> int:
    """One task's lines: each attempt goes on without a gap from a checkpoint, and the last one gets to the end.

    The checkpoint may be of any attempt before: on a host that is cut off, one that is over runs for up to a minute
    more, and saves.

    Returns:
        How many steps were done again.
    """
    redone, upcoming, last, furthest = 0, 0, -1, -1
    for line in lines:
        who = f"job {job.number} task {line['index']} attempt {line['attempt']}"
        if "start" in line:
            saved = line["start"]
            # The checkpoint is task 0's; others may have been behind it.
            assert line["index"] or saved <= furthest + 1, f"{who} starts at {saved} after {furthest}"
            redone += max(0, last + 1 - saved)
            upcoming = saved
        elif "step" in line:
            assert line["step"] == upcoming, f"{who}: step {line['step']} after {upcoming - 1}"
            last, upcoming = line["step"], upcoming + 1
            furthest = max(furthest, last)
    if took_part_in_the_end:  # with nothing to do, perhaps: task 0 may have written its last checkpoint before
        assert upcoming == job.steps, f"job {job.number}: its last step is {upcoming - 1} of {job.steps}"
    return redone


def overlaps(lines: list[Line], disturbances: Disturbances) -> Iterator[str]:
    """Tasks that went on when the next attempt had begun, on slices where nothing happened that explains it."""
    began: dict[int, float] = {}
    for line in lines:
        if "start" in line:
            began[line["attempt"]] = min(line["at"], began.get(line["attempt"], line["at"]))
    for start in (line for line in lines if "start" in line):
        attempt, index = start["attempt"], start["index"]
        next_began = min((at for other, at in began.items() if other > attempt), default=math.inf)
        last = max(line["at"] for line in lines if (line["attempt"], line["index"]) == (attempt, index))
        if last > next_began and not disturbances.explain(start["slice"], next_began):
            over = last - next_began
            yield f"task {index} of attempt {attempt} on {start['slice']} went on for {over:.1f} s beside the next"
