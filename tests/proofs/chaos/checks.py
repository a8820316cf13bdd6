"""What must hold of the lines that the tasks of a job have written."""

import math
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tests.proofs.chaos.jobs import Line, Running, checksum, numbers_at

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
            task["attempt"]
            for task in lines
            if "slice" in task
            if any(self._during(n, task["at"], 0.0) for n in {task["slice"], *slices.get(task["attempt"], ())})
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
            # The checkpoint in the bucket is task 0's; others may have been behind it. In memory is what the hosts that
            # are left have kept, and their tasks may have been ahead: nothing in these programs waits for all of them.
            ahead = line["index"] or line.get("memory")
            assert ahead or saved <= furthest + 1, f"{who} starts at {saved} after {furthest}"
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
        if "slice" in line:
            began[line["attempt"]] = min(line["at"], began.get(line["attempt"], line["at"]))
    for task in (line for line in lines if "slice" in line):
        attempt, index = task["attempt"], task["index"]
        next_began = min((at for other, at in began.items() if other > attempt), default=math.inf)
        last = max(line["at"] for line in lines if (line["attempt"], line["index"]) == (attempt, index))
        if last > next_began and not disturbances.explain(task["slice"], next_began):
            over = last - next_began
            yield f"task {index} of attempt {attempt} on {task['slice']} went on for {over:.1f} s beside the next"


NOT_WHOLE = re.compile(r"Step (\d+) is not whole")
"""How a MemoryCheckpointer says that a step has failed."""


@dataclass
class InMemory:
    """What an attempt has kept in the memory of its hosts, as far as its tasks have written that down.

    Attributes:
        number: its number.
        slices: where it was.
        starts: for each of its tasks that has restored, the line that says so.
        kept: by task, the steps that it has begun to keep.
        noticed: steps that are whole because a task has waited for that.
        warned: of what its MemoryCheckpointers have warned.
        first, last: when its tasks wrote their first and last lines.
    """

    number: int
    slices: set[str] = field(default_factory=set)
    starts: list[Line] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)
    noticed: list[int] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    first: float = math.inf
    last: float = 0.0

    @property
    def whole(self) -> int:
        """The newest step that is known to be whole, 0 if there is none: a save begins when the one before is done."""
        failed = {int(found[1]) for text in self.warned if (found := NOT_WHOLE.match(text))}
        steps = [step for own in self.kept.values() for step in own[:-1]] + self.noticed
        return max((step for step in steps if step not in failed), default=0)

    @property
    def done_by(self) -> list[int]:
        """Which attempt has done each step before this one's first."""
        by: list[int] = self.starts[0]["by"]
        return by

    @property
    def source(self) -> str:
        """From where it went on."""
        return "memory" if self.starts[0]["memory"] else "the bucket" if self.starts[0]["bucket"] else "nothing"

    def stays_whole_in(self, later: "InMemory", others: Collection[tuple[str, float]]) -> bool:
        """Whether a later attempt must find this one's whole steps.

        They share a slice that no other job took between, which removes them there, and no process warned.
        """
        taken = {name for name, at in others if self.last < at < later.first}
        return bool(self.whole and self.slices & later.slices - taken) and not (self.warned or later.warned)


def in_memory(lines: list[Line]) -> list[InMemory]:
    """What the attempts of a job have kept in memory, in their order."""
    attempts: dict[int, InMemory] = {}
    for line in lines:
        attempt = attempts.setdefault(line["attempt"], InMemory(line["attempt"]))
        attempt.first, attempt.last = min(attempt.first, line["at"]), max(attempt.last, line["at"])
        if "slice" in line:
            attempt.slices.add(line["slice"])
        elif "memory" in line:
            attempt.starts.append(line)
        elif "kept" in line:
            attempt.kept.setdefault(line["index"], []).append(line["kept"])
        elif "saved" in line:
            attempt.noticed.append(line["saved"])
        elif "warned" in line:
            attempt.warned.append(line["warned"])
    return [attempt for _, attempt in sorted(attempts.items())]


def wrong_numbers(lines: list[Line]) -> Iterator[str]:
    """Tasks whose numbers are not, to the bit, those of a run without faults at that step."""
    boxes = {(line["attempt"], line["index"]): line["box"] for line in lines if "box" in line}
    for line in lines:
        if "sum" in line:
            first, end = boxes[line["attempt"], line["index"]]
            step = line["start"] if "start" in line else line["step"] + 1
            if line["sum"] != checksum(numbers_at(step)[first:end]):
                where = "restores" if "start" in line else "comes to"
                yield f"task {line['index']} of attempt {line['attempt']} {where} wrong numbers at step {step}"


def wrong_restores(attempts: list[InMemory], others: Collection[tuple[str, float]] = ()) -> Iterator[str]:
    """Attempts that do not go on from where they should.

    All tasks of an attempt begin at one step. Of an earlier attempt only what it has done itself comes back. No attempt
    is skipped of which memory must still have a whole step, or the bucket a newer one, and no whole step is lost.

    Args:
        others: when tasks of other jobs began on which slices.
    """
    earlier: list[InMemory] = []
    for attempt in (each for each in attempts if each.starts):
        first = attempt.starts[0]
        start, done_by, who = first["start"], attempt.done_by, f"attempt {attempt.number}"
        if any(
            (line["start"], line["by"], line["memory"]) != (start, done_by, first["memory"]) for line in attempt.starts
        ):
            yield f"the tasks of {who} begin at different steps: {attempt.starts}"
        source = next((each for each in earlier if done_by and each.number == done_by[-1]), None)
        if source is not None:
            if done_by != (source.done_by + [source.number] * len(done_by))[:start]:
                yield f"{who} begins with steps of {sorted(set(done_by))} that attempt {source.number} never had so"
        elif start:
            yield f"{who} begins at step {start} of an attempt that nobody knows"
        if first["bucket"] and done_by and done_by[-1] < first["bucket"][-1]:
            newer = f"step {len(first['bucket'])} of attempt {first['bucket'][-1]}"
            yield f"{who} goes on from step {start} of attempt {done_by[-1]}, and the bucket has {newer}"
        for other in earlier:
            if source is not None and other.number > source.number and other.stays_whole_in(attempt, others):
                yield f"{who} goes on from attempt {source.number}, and attempt {other.number} had a whole step"
        before = next((each for each in reversed(earlier) if each.whole), None)
        if before is not None and before.stays_whole_in(attempt, others) and start < before.whole:
            shared = ", ".join(before.slices & attempt.slices)
            yield f"{who} begins at step {start}; {shared} had step {before.whole} of attempt {before.number}"
        earlier.append(attempt)
