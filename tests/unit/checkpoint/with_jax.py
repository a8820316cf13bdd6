"""`MemoryCheckpointer` in one process with several devices of JAX."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.checkpoint import MemoryCheckpointer
from iris_ray.errors import CheckpointMismatchError, CheckpointTooLargeError, InvalidRequestError
from iris_ray.model.notices import NoticeKind
from iris_ray.task.preemption import PreemptionNotice


def state(seed: int) -> dict[str, Any]:
    """A state with every kind of leaf."""
    random, everywhere = np.random.default_rng(seed), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        "params": [jax.device_put(random.normal(size=(3, 5)).astype(np.float32), everywhere), jnp.full((), seed)],
        "bfloat16": jnp.arange(seed, seed + 7, dtype=jnp.bfloat16),
        "int4": jnp.arange(3, dtype=jnp.int4),
        "keys": jax.random.split(jax.random.key(seed), 3),
        "old key": jax.random.PRNGKey(seed),
        "empty": jnp.zeros((0, 4)),
        "numpy": random.normal(size=(2, 2)),
        "number of numpy": np.int16(seed),
        "words": np.array(["a", "bc"]),
        "column-major": np.asfortranarray(random.normal(size=(3, 2))),
        "step": seed,
        "rate": seed / 7,
        "warm": True,
        "name": f"run {seed}",
        "nothing": None,
        "tuple": ({},),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit by bit, with types and shardings."""

    def plain(leaf: Any) -> tuple[Any, ...]:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", leaf.dtype, plain(jax.random.key_data(leaf))
        if isinstance(leaf, jax.Array):
            return "jax", leaf.sharding, leaf.committed, leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()
        if isinstance(leaf, (np.ndarray, np.generic)):
            return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
        return type(leaf), leaf

    same_tree = str(jax.tree.structure(one)) == str(jax.tree.structure(other))
    return same_tree and [*map(plain, jax.tree.leaves(one))] == [*map(plain, jax.tree.leaves(other))]


def test_next_program_restores_every_kind_of_leaf(tmp_path: Path) -> None:
    with MemoryCheckpointer(directory=tmp_path) as memory:
        assert memory.restore(state(0)) is None
        for step in (1, 2, 3):
            assert memory.save(step, state(step))
    found = MemoryCheckpointer(directory=tmp_path).restore(state(0))
    assert found is not None
    assert found[0] == 3
    assert same(found[1], state(3))


def test_saved_step_stays_when_program_changes_its_arrays(tmp_path: Path) -> None:
    array, donated, deleted = np.ones(1000), jnp.ones(5_000_000), jnp.ones(5_000_000)
    next_step = jax.jit(lambda x: x + 1, donate_argnums=0).lower(donated).compile()
    with MemoryCheckpointer(directory=tmp_path) as memory:
        memory.save(1, [array, donated, deleted])
        deleted.delete()
        array += 1
        for _ in range(5):
            donated = next_step(donated)
        assert float(donated[0]) == 6
        found = memory.restore([array, donated, donated])
    assert found is not None
    assert [np.unique(leaf).tolist() for leaf in found[1]] == [[1.0]] * 3


def test_restored_arrays_stay_when_further_steps_are_saved(tmp_path: Path) -> None:
    with MemoryCheckpointer(directory=tmp_path) as memory:
        memory.save(1, jnp.full(100_000, 1.0))
        found = memory.restore(jnp.zeros(100_000))
        for step in range(2, 6):
            memory.save(step, jnp.full(100_000, float(step)))
        assert found is not None
        assert float(found[1].sum()) == 100_000


def test_only_multiples_of_every_are_kept_unless_now(tmp_path: Path) -> None:
    with MemoryCheckpointer(every=3, directory=tmp_path) as memory:
        assert [step for step in range(1, 8) if memory.save(step, {"x": step})] == [3, 6]
        assert memory.save(8, {"x": 8}, now=True)
        assert memory.restore({"x": 0}) == (8, {"x": 8})


def test_memory_older_than_the_bucket_is_left_alone(tmp_path: Path) -> None:
    """A gang that was elsewhere meanwhile, and saved there, finds its old memory when it comes back."""
    with MemoryCheckpointer(directory=tmp_path) as memory:
        memory.save(7, {"a": np.arange(3)})
    back = MemoryCheckpointer(directory=tmp_path)
    target = {"a": np.zeros(3, int)}
    assert (back.newest(at_least=8), back.restore(target, at_least=8)) == (None, None)
    assert back.newest(at_least=7) == 7
    found = back.restore(target, at_least=7)
    assert found is not None
    assert found[0] == 7
    assert back.save(9, target)


def test_time_of_each_save_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TaskFiles.VARIABLE, str(tmp_path / "task"))
    files = TaskFiles.of_this_task()
    assert files is not None
    with MemoryCheckpointer(directory=tmp_path / "steps") as memory:
        for step in range(1, 4):
            memory.save(step, jnp.ones(100))
            memory._untold_s += 100.0
    before_first_step, _ = json.loads(files.marked.read_text())
    assert 300 < before_first_step["checkpoint_save"] < 310


def test_program_without_a_job_keeps_steps_while_it_lives(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryCheckpointer()
    memory.save(4, {"x": 1.5})
    assert memory.restore({"x": 0.0}) == (4, {"x": 1.5})
    assert "unless you give directory=" in caplog.text
    assert MemoryCheckpointer().restore({"x": 0.0}) is None


def test_memory_of_a_killed_program_is_removed_by_the_next() -> None:
    program = (
        "import os; from iris_ray.checkpoint import MemoryCheckpointer as M; M().save(1, {}, now=True); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True)
    (odd := Path(f"/dev/shm/iris_ray-steps-{os.getuid()}-no number")).mkdir()
    before = set(Path("/dev/shm").glob("iris_ray-steps-*"))
    (own := MemoryCheckpointer()).save(1, {}, now=True)
    after = set(Path("/dev/shm").glob("iris_ray-steps-*"))
    assert len(before - after) >= 2
    assert odd not in after
    assert len(after - before) == 1
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True)
    assert own.restore({}) == (1, {}), "a living program's stays"


OTHER_STATES = [
    ({"a": jnp.ones((2, 3))}, r"its \['a'\] is float32\[2, 2\], and the target wants float32\[2, 3\]"),
    ({"a": jnp.ones((2, 2), jnp.bfloat16)}, r"float32\[2, 2\], and the target wants bfloat16"),
    ({"b": jnp.ones((2, 2))}, r"it has no \['b'\]"),
    ({}, r"it has \['a'\] .*, which the target has not"),
    ({"a": 1.0}, "the target wants a float"),
]


@pytest.mark.parametrize(("other", "why"), OTHER_STATES)
def test_step_of_another_state_is_refused_with_the_difference(other: Any, why: str, tmp_path: Path) -> None:
    with MemoryCheckpointer(directory=tmp_path) as memory:
        memory.save(1, {"a": jnp.ones((2, 2))})
    with pytest.raises(CheckpointMismatchError, match=f"step 1 of attempt 1 .*{why}"):
        MemoryCheckpointer(directory=tmp_path).restore(other)


def test_state_that_does_not_fit_is_refused_at_first_save(tmp_path: Path) -> None:
    with MemoryCheckpointer(directory=tmp_path) as memory:
        memory.save(1, jnp.ones(100))
    memory = MemoryCheckpointer(limit=1000, directory=tmp_path)
    with pytest.raises(CheckpointTooLargeError, match=r"take 8,064 bytes .* limit is 1,000"):
        memory.save(2, jnp.ones(1000))
    assert memory.restore(jnp.ones(100)) is not None, "and the step before is still there"


@pytest.mark.parametrize("leaf", [object(), print, np.array([None]), 1j])
def test_leaf_that_is_no_array_is_refused_by_name(leaf: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"\['a'\].* is .*can't be kept"):
        MemoryCheckpointer(directory=tmp_path).save(1, {"a": [leaf]})


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1.5}, {"keep": 1}, {"copies": "all"}, {"name": "a/b"}])
def test_arguments_that_can_not_work_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        MemoryCheckpointer(**wrong)


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_step_that_is_no_number_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="step"):
        MemoryCheckpointer(directory=tmp_path).save(step, {})


def test_damaged_newest_step_gives_way_to_none_not_to_wrong_numbers(tmp_path: Path) -> None:
    with MemoryCheckpointer(directory=tmp_path) as memory:
        memory.save(1, jnp.ones(1000))
    (data,) = (path for path in tmp_path.rglob("1-0-*.data") if path.with_suffix(".data").read_bytes().strip(b"\0"))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    assert MemoryCheckpointer(directory=tmp_path).restore(jnp.zeros(1000)) is None


def test_single_slice_does_not_outlive_the_loss_of_itself(tmp_path: Path) -> None:
    memory = MemoryCheckpointer(directory=tmp_path)
    memory.save(1, jnp.ones(3), now=True)
    outlived = {kind for kind in NoticeKind if memory.outlives(PreemptionNotice(kind, "", 0.0))}
    assert outlived == {NoticeKind.GROWTH}


PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from iris_ray.checkpoint import MemoryCheckpointer

def state(devices, spec, step):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: devices[0] * devices[1]]).reshape(devices), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    keys = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = np.random.default_rng(step).normal(size=(8, 24, 3)).astype(np.float32)
    return jax.device_put(array, sharding), jax.device_put(jax.random.split(jax.random.key(step), 8), keys)

def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

step = 0
memory = MemoryCheckpointer(directory=sys.argv[1])
for devices, spec in json.loads(sys.argv[2]):
    want = state(devices, spec, step)
    found = memory.restore(abstract(want)) if step else (0, want)
    assert found[0] == step
    for got, expected in zip(found[1], want):
        assert got.sharding == expected.sharding
    assert (np.asarray(found[1][0]) == np.asarray(want[0])).all()
    assert (jax.random.key_data(found[1][1]) == jax.random.key_data(want[1])).all()
    step += 1
    memory.save(step, state(devices, spec, step))
memory.wait()
"""
MESHES = [((2, 4), ("x", "y")), ((4, 2), ("y", "x")), ((1, 8), (None, "y")), ((8, 1), ()), ((2, 2), (("x", "y"),))]


def test_state_is_restored_on_another_mesh(tmp_path: Path) -> None:
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PATH": ""}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(MESHES)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
