"""The jobs of a chaos run, whose tasks count steps and write down each one. Some keep a state of JAX in memory, too."""

import contextlib
import functools
import json
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import iris_ray
from iris_ray import JobInfo
from tests.support.gangs import alive, birth

STEP_S, CHECKPOINT_EVERY, MEMORY_EVERY = 0.05, 20, 4
NUMBERS = 1 << 12
"""Elements of the state of a job that keeps one."""
Line = dict[str, Any]
"""What a task writes down: that it is there, where it starts, a step, a save; with its attempt, index and the time."""


def counting(directory: str, steps: int) -> Callable[[], tuple[int, int]]:
    """A function whose every task goes from its gang's checkpoint to the last step, and leaves a line for each."""
    Bucket.make(directory)

    def count() -> tuple[int, int]:
        with arrived(directory) as (me, line):
            bucket = Bucket(directory, me)
            start, _ = bucket.read()
            line(start=start)
            for step in range(start, steps):
                time.sleep(STEP_S)
                line(step=step)
                notice = iris_ray.preemption_notice()
                if notice or (step + 1) % CHECKPOINT_EVERY == 0:
                    bucket.write(step + 1)
                if notice:
                    line(saved=step + 1)
                    notice.saved()
            return me.task_index, steps

    return count


def keeping(directory: str, steps: int, sharded: bool) -> Callable[[], tuple[int, int]]:
    """A function that counts as `counting` does, and with every step changes a state that its gang keeps in memory.

    The state has numbers that follow from the step alone, and the attempt that has done each step. The lines have
    checksums of the numbers.

    Args:
        sharded: whether each task has a part of the numbers; if not, each slice has all of them.
    """
    Bucket.make(directory)

    def keep() -> tuple[int, int]:
        with arrived(directory) as (me, line):
            import jax
            from jax.sharding import NamedSharding, PartitionSpec

            import iris_ray.jax
            from iris_ray.checkpoint import MemoryCheckpointer

            class Said(logging.Handler):
                def emit(self, record: logging.LogRecord) -> None:
                    line(**{"warned" if record.levelno >= logging.WARNING else "said": record.getMessage()})

            logging.getLogger("iris_ray.checkpoint").addHandler(Said())
            logging.getLogger("iris_ray.checkpoint").setLevel(logging.INFO)
            iris_ray.jax.initialize()
            mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(me.num_slices, -1), ("slice", "host"))
            over = NamedSharding(mesh, PartitionSpec(("slice", "host") if sharded else "host"))
            bucket = Bucket(directory, me)
            in_bucket, by_in_bucket = bucket.read()

            def state_at(step: int) -> dict[str, Any]:
                whole = numbers_at(step)
                numbers = jax.make_array_from_callback(whole.shape, over, lambda index: whole[index])
                by = np.zeros(steps, np.int32)
                by[:step] = by_in_bucket
                return {"numbers": numbers, "by": by}

            def of(state: dict[str, Any]) -> int:
                (shard,) = state["numbers"].addressable_shards
                return checksum(np.asarray(shard.data))

            advance = jax.jit(advanced)
            with MemoryCheckpointer(MEMORY_EVERY) as memory:
                kept = memory.restore(state_at(in_bucket), at_least=in_bucket)
                start, state = kept or (in_bucket, state_at(in_bucket))
                (shard,) = state["numbers"].addressable_shards
                box = shard.index[0].indices(NUMBERS)[:2]
                by = state["by"][:start].tolist()
                line(start=start, memory=kept is not None, bucket=by_in_bucket, by=by, box=box, sum=of(state))
                for step in range(start, steps):
                    time.sleep(STEP_S)
                    numbers = advance(state["numbers"], np.uint32(step))
                    by = state["by"].copy()
                    by[step] = me.attempt
                    state = {"numbers": numbers, "by": by}
                    line(step=step, sum=of(state))
                    notice = iris_ray.jax.agreed_notice(step)
                    if memory.save(step + 1, state, now=notice is not None):
                        line(kept=step + 1)
                    if (step + 1) % CHECKPOINT_EVERY == 0 or (notice and not memory.outlives(notice)):
                        bucket.write(step + 1, by[: step + 1].tolist())
                    if notice:
                        line(saved=step + 1)
                        notice.saved()
            return me.task_index, steps

    return keep


def advanced(numbers: Any, step: Any) -> Any:
    """The numbers after a step, by JAX or NumPy. No two are ever the same."""
    return numbers * np.uint32(1664525) + step


@functools.cache
def numbers_at(step: int) -> Any:
    """The numbers of a run without faults when so many steps are done."""
    for earlier in range(0, step, 100):  # so that the recursion stays shallow
        numbers_at(earlier)
    return advanced(numbers_at(step - 1), np.uint32(step - 1)) if step else np.arange(NUMBERS, dtype=np.uint32)


def checksum(numbers: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(numbers).data)


class Bucket:
    """The checkpoint that task 0 of a gang writes, where all hosts see it: a step, and who has done those before.

    All tasks of an attempt read the same, though one of an earlier attempt may still write on a host that is cut off.
    """

    def __init__(self, directory: str, me: JobInfo) -> None:
        self._path = Path(directory) / "checkpoint"
        self._me = me

    def read(self) -> tuple[int, list[int]]:
        own = self._path.with_name(f"begins-{self._me.attempt}")
        with contextlib.suppress(FileExistsError):
            own.hardlink_to(self._path)
        step, by = json.loads(own.read_text())
        return step, by

    def write(self, step: int, by: list[int] | None = None) -> None:
        if self._me.task_index == 0:
            unfinished = self._path.with_name(f"unfinished-{self._me.attempt}")
            unfinished.write_text(json.dumps([step, by]))
            unfinished.replace(self._path)

    @staticmethod
    def make(directory: str) -> None:
        """Write the checkpoint of a job that has not begun."""
        (Path(directory) / "checkpoint").write_text("[0, []]")


@contextlib.contextmanager
def arrived(directory: str) -> Iterator[tuple[JobInfo, Callable[..., None]]]:
    """Have a task write down who it is, with a child like a data loader's. Gives a function that writes more lines."""
    me = iris_ray.get_job_info()
    assert me is not None
    if not (child := os.fork()):
        time.sleep(3600)
    with (Path(directory) / f"lines-{me.task_index}").open("a") as lines:

        def line(**more: Any) -> None:
            who = {"attempt": me.attempt, "index": me.task_index, "at": time.monotonic()}
            lines.write(json.dumps({**who, **more}) + "\n")
            lines.flush()

        place = {"slice": me.slice_name, "worker": me.worker_id}
        line(pid=os.getpid(), child=child, born=[birth(os.getpid()), birth(child)], **place)
        yield me, line


@dataclass
class Running:
    """One job of the crowd.

    Attributes:
        job_id: its id. Its tasks may not have written anything yet.
        keeps: whether it keeps a state in memory.
        charges: what happened to it so far that may cost it an attempt, by budget.
    """

    number: int
    job_id: str
    directory: Path
    steps: int
    ref: Any
    slices: int | list[int]
    keeps: bool = False
    charges: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[Line]:
        """What its tasks have written, by task and in order."""
        return [line for path in sorted(self.directory.glob("lines-*")) for line in lines_in(path)]

    def latest(self) -> list[Line]:
        """The first lines of its newest attempt's tasks."""
        arrivals = [line for line in self.lines() if "pid" in line]
        newest = max((line["attempt"] for line in arrivals), default=0)
        return [line for line in arrivals if line["attempt"] == newest]


def lines_in(path: Path) -> list[Line]:
    """What one task has written. The last line may not be complete yet."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def runs(arrival: Line) -> bool:
    """Whether the process that wrote the line is there. One with a process table of its own does not know its pid."""
    return alive(arrival["pid"]) and birth(arrival["pid"]) == arrival["born"][0]
