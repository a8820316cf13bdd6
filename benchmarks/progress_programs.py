"""The programs whose lost time `benchmarks/progress.py` measures, and what their tasks note meanwhile.

`train` is the demo's training run with a keeper of its state: in memory, by Orbax, or none. `train_with_levanter` is
`examples/train_levanter.py`. They run in the tasks of a gang. This module imports neither JAX nor Ray.
"""

import functools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

EXAMPLES = Path(__file__).parents[1] / "examples"
PHASES = ("called", "imported", "joined", "restored", "compiled", "stepped")
"""What a task notes in this order. From one to the next: imports, joining, restoring, compiling, the first step."""
TICK_S = 0.01
ROW = 1024
STEP_S = 0.02
"""The demo's steps take a millisecond; these sleep, as those of a larger model would compute."""


class Notes:
    """What a task notes for the benchmark, as lines of JSON, and the time of its last tick: it was alive then."""

    def __init__(self, directory: str) -> None:
        import iris_ray

        me = iris_ray.get_job_info()
        assert me is not None
        self._lines = (Path(directory) / f"notes-{me.attempt}-{me.task_index}").open("a")
        self.note(pid=os.getpid(), slice=me.slice_name)
        self.mark("called")
        self._last_tick = os.open(Path(directory) / f"tick-{me.attempt}-{me.task_index}", os.O_CREAT | os.O_WRONLY)
        threading.Thread(target=self._tick, daemon=True).start()

    def mark(self, phase: str) -> None:
        self.note(phase=phase, time=time.time())

    def note(self, **facts: Any) -> None:
        self._lines.write(json.dumps(facts) + "\n")
        self._lines.flush()

    def _tick(self) -> None:
        while True:
            os.pwrite(self._last_tick, f"{time.time():.3f}".encode(), 0)
            time.sleep(TICK_S)


class Keeper(Protocol):
    """Keeps a program's state."""

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """Return the next step and the state, if any is kept."""

    def save(self, step: int, state: Any, now: bool) -> None:
        """Save the state with which this step begins. Return once the program may go on or, if ``now``, once it is."""


class NoKeeper:
    """Keeps nothing: what the same processes take without a restore."""

    def __init__(self, directory: str, every: int) -> None: ...

    def restore(self, like: Any) -> tuple[int, Any] | None:
        return None

    def save(self, step: int, state: Any, now: bool) -> None: ...


class MemoryKeeper:
    """The hosts' memory."""

    def __init__(self, directory: str, every: int) -> None:
        from iris_ray.checkpoint import MemoryCheckpointer

        self._memory = MemoryCheckpointer(every=every)
        self.restore = self._memory.restore

    def save(self, step: int, state: Any, now: bool) -> None:
        self._memory.save(step, state, now=now)


class OrbaxKeeper:
    """Orbax's own manager with asynchronous saves to a directory that all hosts share."""

    def __init__(self, directory: str, every: int) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._directory = Path(directory) / "orbax"
        self._made: Any = None

    @property
    def _manager(self) -> Any:
        if self._made is None:  # it looks for devices
            self._made = self._ocp.CheckpointManager(
                self._directory, options=self._ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
            )
        return self._made

    def restore(self, like: Any) -> tuple[int, Any] | None:
        step = self._manager.latest_step()
        if step is None:
            return None
        return step, self._manager.restore(step, args=self._ocp.args.StandardRestore(like))

    def save(self, step: int, state: Any, now: bool) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(state), force=True)
        if now:
            self._manager.wait_until_finished()


KEEPERS: dict[str, Any] = {"memory": MemoryKeeper, "orbax": OrbaxKeeper, "none": NoKeeper}
_PRELOAD = ["jax", "sklearn.datasets", "iris_ray.jax", "iris_ray.checkpoint"]  # the demo imports all of them
PRELOAD = {
    "memory": _PRELOAD,
    "orbax": [*_PRELOAD, "orbax.checkpoint"],
    "none": _PRELOAD,
}


def train(directory: str, keeper_name: str, every: int, state_mb: float) -> None:
    """Train as the demo does until somebody ends it. Note each phase, step and save.

    Args:
        directory: for notes and for checkpoints; all hosts share it.
        keeper_name: who keeps the state.
        every: steps from one save to the next.
        state_mb: MB of random numbers that belong to the state, spread over all processes.
    """
    notes = Notes(directory)
    sys.path.insert(0, str(EXAMPLES))
    import jax
    import numpy as np
    import train_digits
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from sklearn.datasets import load_digits

    import iris_ray.jax

    abstract: Any = jax.ShapeDtypeStruct
    keeper: Keeper = KEEPERS[keeper_name](directory, every)
    notes.mark("imported")
    iris_ray.jax.initialize()
    rank, world = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    notes.mark("joined")

    spread, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    distribute: Any = jax.make_array_from_process_local_data
    digits: Any = train_digits
    params, rows = digits.fresh_parameters(), ballast_rows(state_mb, world)
    of_params = {name: abstract(array.shape, array.dtype, sharding=everywhere) for name, array in params.items()}
    like = {"params": of_params, "ballast": abstract((rows * world, ROW), np.float32, sharding=spread)}
    start, state = keeper.restore(like) or (0, None)
    if state is None:
        own = np.random.default_rng(rank).standard_normal((rows, ROW), dtype=np.float32)  # it does not compress
        state = {
            "params": {n: distribute(everywhere, a) for n, a in params.items()},
            "ballast": distribute(spread, own),
        }
    jax.block_until_ready(state)  # type: ignore[no-untyped-call]
    notes.mark("restored")

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)

    def batch_of(step: int) -> tuple[Any, Any]:
        chosen = np.random.default_rng(step).integers(len(images), size=128)[rank::world]
        return distribute(spread, images[chosen]), distribute(spread, labels[chosen])

    update = digits.update.lower(state["params"], *batch_of(start)).compile()
    notes.mark("compiled")
    for step in range(start, sys.maxsize):
        params, _ = jax.block_until_ready(update(state["params"], *batch_of(step)))  # type: ignore[no-untyped-call]
        state = {**state, "params": params}
        if step == start:
            notes.mark("stepped")
        notes.note(step=step, time=time.time())
        notice = iris_ray.jax.agreed_notice(step)
        if notice or (step + 1) % every == 0:
            began = time.time()
            keeper.save(step + 1, state, now=notice is not None)
            notes.note(saved=step + 1, time=time.time(), stall=time.time() - began)
        if notice:
            notice.saved()
        time.sleep(STEP_S)


def ballast_rows(state_mb: float, world: int) -> int:
    """Return how many rows of numbers each process has of so many MB."""
    return max(1, round(state_mb * 1e6 / 4 / ROW / world))


def train_with_levanter(directory: str, every: int) -> None:
    """Run the Levanter example for longer than the benchmark. Note its phases and steps."""
    notes = Notes(directory)
    sys.path.insert(0, str(EXAMPLES))
    import train_levanter

    notes.mark("imported")
    first = True

    def on_step(info: Any) -> None:
        nonlocal first
        for phase in ("compiled", "stepped") if first else ():
            notes.mark(phase)  # its first step compiles
        first = False
        notes.note(step=int(info.step), time=time.time())
        if (int(info.step) + 1) % every == 0:
            notes.note(saved=int(info.step) + 1, time=time.time(), stall=0.0)
        time.sleep(STEP_S)

    trainer: Any = train_levanter.Trainer  # type: ignore[attr-defined]
    _mark_after(notes, "joined", train_levanter, "initialize")
    _mark_after(notes, "restored", trainer, "initial_state")
    train_levanter.train(f"{directory}/levanter", steps=50_000, on_step=on_step, id="progress")


def _mark_after(notes: Notes, phase: str, owner: Any, name: str) -> None:
    """Mark a phase when this function of a module or class has returned."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def marking(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        notes.mark(phase)
        return result

    setattr(owner, name, marking)
