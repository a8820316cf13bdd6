"""The jobs of a chaos run, whose tasks count steps and write down each one."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import iris_ray
from tests.support.gangs import alive, birth

STEP_S, CHECKPOINT_EVERY = 0.05, 20
Line = dict[str, Any]
"""What a task writes down: that it has started, made a step or saved; with its attempt, index and the time."""


def counting(directory: str, steps: int) -> Callable[[], tuple[int, int]]:
    """A function whose every task goes from its gang's checkpoint to the last step, and leaves a line for each."""

    def count() -> tuple[int, int]:
        me = iris_ray.get_job_info()
        assert me is not None
        checkpoint = Path(directory) / "checkpoint"
        start = int(checkpoint.read_text()) if checkpoint.exists() else 0
        if not (child := os.fork()):  # like a data loader's
            time.sleep(3600)
        who = {"attempt": me.attempt, "index": me.task_index}
        with (Path(directory) / f"lines-{me.task_index}").open("a") as lines:

            def line(**more: Any) -> None:
                lines.write(json.dumps({**who, "at": time.monotonic(), **more}) + "\n")
                lines.flush()

            def save(step: int) -> None:
                if me.task_index == 0:
                    unfinished = checkpoint.with_name(f"unfinished-{me.attempt}")
                    unfinished.write_text(str(step))
                    unfinished.replace(checkpoint)

            place = {"slice": me.slice_name, "worker": me.worker_id}
            line(start=start, pid=os.getpid(), child=child, born=[birth(os.getpid()), birth(child)], **place)
            for step in range(start, steps):
                time.sleep(STEP_S)
                line(step=step)
                if (step + 1) % CHECKPOINT_EVERY == 0:
                    save(step + 1)
                if notice := iris_ray.preemption_notice():
                    save(step + 1)
                    line(saved=step + 1)
                    notice.saved()
        return me.task_index, steps

    return count


@dataclass
class Running:
    """One job of the crowd.

    Attributes:
        job_id: its id. Its tasks may not have written anything yet.
        charges: what happened to it so far that may cost it an attempt, by budget.
    """

    number: int
    job_id: str
    directory: Path
    steps: int
    ref: Any
    slices: int | list[int]
    charges: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[Line]:
        """What its tasks have written, by task and in order."""
        return [line for path in sorted(self.directory.glob("lines-*")) for line in lines_in(path)]

    def latest(self) -> list[Line]:
        """The first lines of its newest attempt's tasks."""
        starts = [line for line in self.lines() if "start" in line]
        newest = max((line["attempt"] for line in starts), default=0)
        return [line for line in starts if line["attempt"] == newest]


def lines_in(path: Path) -> list[Line]:
    """What one task has written. The last line may not be complete yet."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def runs(start: Line) -> bool:
    """Whether the process that wrote the line is there. One with a process table of its own does not know its pid."""
    return alive(start["pid"]) and birth(start["pid"]) == start["born"][0]
