"""The recovery that ``iris-ray cluster selftest`` times on the hosts."""

import json
import os
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from iris_ray.checkpoint.memory import MemoryCheckpointer
from iris_ray.task.jax import initialize
from iris_ray.task.job_info import get_job_info

STATE_SIDE = 4096
"""The state has a square matrix of this size for each device: 64 MiB."""


def recovery() -> dict[str, float]:
    """Keep a state in memory and crash in the first attempt; in the next, go on from it.

    Returns:
        The seconds that the save held the first attempt up, that its compilation took, from the crash to the next step,
        and of that for restoring and for compiling; and the MB of the state on each host.
    """
    initialize()
    me = get_job_info()
    assert me is not None
    noted = Path(me.local_dir, f"selftest-{me.local_index}.json")
    abstract: Any = jax.ShapeDtypeStruct
    count = jax.device_count()
    spread = NamedSharding(jax.make_mesh((count,), ("all",)), PartitionSpec("all"))  # type: ignore[no-untyped-call]
    like = abstract((count, STATE_SIDE, STATE_SIDE), "float32", sharding=spread)
    found, clock = {"mb": jax.local_device_count() * STATE_SIDE**2 * 4 / 1e6}, time.monotonic()

    def note(name: str) -> None:
        nonlocal clock
        found[name], clock = time.monotonic() - clock, time.monotonic()

    with MemoryCheckpointer(name="selftest") as memory:
        _, state = memory.restore(like) or (0, None)
        note("restoring")
        if state is None:
            state = jax.jit(lambda: jax.numpy.ones(like.shape), out_shardings=spread)()
        step: Any = jax.jit(_a_step).lower(state).compile()
        note("compiling")
        state = jax.block_until_ready(step(state))  # type: ignore[no-untyped-call]
        if noted.exists():
            before = json.loads(noted.read_text())
            return {
                **found,
                "saved": before["saving"],
                "compiled": before["compiling"],
                "away": time.time() - before["at"],
            }
        clock = time.monotonic()
        memory.save(1, state)
        note("saving")
        noted.write_text(json.dumps({**found, "at": time.time()}))
        memory.wait()  # until all processes have saved
        os._exit(3)


def _a_step(state: Any) -> Any:
    for _ in range(8):
        state = state / 2 + (state[:, :128, :] @ state[:, :, :128]).sum() * 1e-9
    return state
