"""Which step directories the hosts of a gang have after their tasks have mirrored them, over real sockets."""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.checkpoint import mirroring as module
from iris_ray.checkpoint.host import FileService
from iris_ray.checkpoint.mirroring import mirror
from iris_ray.checkpoint.peer_files import PeerFiles
from iris_ray.errors import InvalidRequestError, PeerFilesError
from tests.unit.model.test_job_info import INFO

TOKEN = "5ec2e7"


class Host:
    """A host that serves what the job has there.

    Attributes:
        files: the job's ``local_dir``.
    """

    def __init__(self, disk: Path, address: str) -> None:
        directories = LocalDirectories(disk, None)
        self.files = directories.take("job", TOKEN)
        self.service = FileService(address, directories)

    def save(self, *steps: int, by: str, folder: str = "steps") -> None:
        """Save these steps of a process, named by its place and what it has computed."""
        for step in steps:
            path = self.files / folder / str(step)
            (path / "state" / "d").mkdir(parents=True)
            (path / "state" / "d" / "shard").write_text(f"{by} at {step}" * 1000)
            (path / "state" / "empty").touch()

    def steps(self, folder: str = "steps") -> dict[int, str]:
        """Who has saved each step that is here."""
        found = {}
        for path in (self.files / folder).iterdir():
            if path.is_dir():
                assert (path / "state" / "empty").exists()
                text = (path / "state" / "d" / "shard").read_text()
                found[int(path.name)] = text[: len(text) // 1000].partition(" at ")[0]
        return found


class World:
    """The hosts of a cluster, and the attempts of a gang of two hosts a slice."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._monkeypatch = monkeypatch
        self._numbers = itertools.count(1)
        self.attempt = 0
        self.hosts: list[Host] = []

    def new(self, count: int) -> list[Host]:
        made = []
        for number in itertools.islice(self._numbers, count):
            (disk := self._directory / str(number)).mkdir()
            made.append(Host(disk, f"127.0.9.{number}"))
        self.hosts += made
        return made

    def task(self, gang: Sequence[Host], index: int, per_host: int = 1) -> None:
        """Be a task of the gang."""
        services = tuple(host.service.address for host in gang for _ in range(per_host))
        me = replace(INFO, task_index=index, num_tasks=len(services), num_slices=len(gang) // 2, attempt=self.attempt)
        me = replace(me, local_dir=str(gang[index // per_host].files), file_services=services)
        me = replace(me, processes_per_host=per_host, local_index=index % per_host)
        for name, value in me.to_env().items():
            self._monkeypatch.setenv(name, value)

    def begin(self, gang: Sequence[Host], only: Sequence[int] | None = None) -> int | None:
        """Begin an attempt: mirror in all tasks, or only in some, in any order. Return the step on which they agree."""
        self.attempt += 1
        order = list(range(len(gang)) if only is None else only)
        random.Random(self.attempt).shuffle(order)
        agreed = set()
        for index in order:
            self.task(gang, index)
            agreed.add(mirror(gang[index].files / "steps"))
        (step,) = agreed
        return step


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    for host in world.hosts:
        host.service.stop()


def saved(gang: Sequence[Host], *steps: int, by: str = "") -> None:
    """Save these steps on all hosts: hosts of equal place save the same."""
    for index, host in enumerate(gang):
        host.save(*steps, by=f"{by}place {index % 2}")


def test_new_hosts_get_newest_step_of_equal_place(world: World) -> None:
    gang = world.new(4)
    assert world.begin(gang) is None
    saved(gang, 5, 10)
    gang[2:] = world.new(2)
    assert world.begin(gang) == 10
    assert [host.steps() for host in gang] == [{10: "place 0"}, {10: "place 1"}] * 2
    saved(gang, 15)
    gang = [*world.new(2), *gang[:2], *world.new(2)]
    assert world.begin(gang) == 15
    assert [host.steps() for host in gang] == [{15: "place 0"}, {15: "place 1"}] * 3


@pytest.mark.parametrize(
    ("more_on", "agreed"),
    [([0], 5), ([0, 2], 5), ([0, 1], 10), ([1, 2], 10), ([0, 3], 10)],
)
def test_step_counts_only_if_every_place_has_it(world: World, more_on: list[int], agreed: int) -> None:
    gang = world.new(4)
    world.begin(gang)
    saved(gang, 5)
    for index in more_on:
        gang[index].save(10, by=f"place {index % 2}")
    assert world.begin(gang) == agreed
    assert [host.steps() for host in gang] == [{agreed: "place 0"}, {agreed: "place 1"}] * 2


def test_no_step_stays_if_one_place_has_none(world: World) -> None:
    gang = world.new(4)
    world.begin(gang)
    saved(gang, 5)
    gang = [gang[0], *world.new(1), gang[2], *world.new(1)]
    assert world.begin(gang) is None
    assert [host.steps() for host in gang] == [{}] * 4


def test_single_slice_keeps_newest_step_of_all_its_hosts(world: World) -> None:
    gang = world.new(2)
    world.begin(gang)
    saved(gang, 5, 10)
    gang[0].save(15, by="place 0")
    assert world.begin(gang) == 10
    assert [host.steps() for host in gang] == [{10: "place 0"}, {10: "place 1"}]


@pytest.mark.parametrize("missed", [1, 2])
def test_host_that_missed_attempts_brings_no_abandoned_step_back(world: World, missed: int) -> None:
    """Both timelines have a step 20; only that of the latest attempt counts."""
    gang = world.new(4)
    world.begin(gang)
    saved(gang, 10)
    for index in (2, 3):
        gang[index].save(20, by=f"abandoned place {index}")
    others = world.new(2)
    for _ in range(missed):
        assert world.begin([*gang[:2], *others]) == 10
    for host in (*gang[:2], *others):
        host.save(20, by="of today")
    returned = [gang[2], gang[1], gang[0], gang[3]]
    assert world.begin(returned) == 20
    assert [host.steps() for host in returned] == [{20: "of today"}] * 4


def test_host_that_missed_an_attempt_can_give_what_that_began_with(world: World) -> None:
    gang = world.new(4)
    world.begin(gang)
    saved(gang, 10)
    others = world.new(2)
    assert world.begin([*gang[:2], *others], only=[0, 1, 2]) == 10, "lost before its last task had mirrored"
    assert world.begin(gang) == 10
    assert [host.steps() for host in gang] == [{10: "place 0"}, {10: "place 1"}] * 2


def test_attempts_lost_while_they_mirror_lose_nothing(world: World) -> None:
    gang = world.new(4)
    world.begin(gang)
    saved(gang, 10)
    gang[0].save(20, by="place 0")
    for only in ([0], [3], [1, 2]):
        assert world.begin(gang, only) == 10
    gang[:2] = world.new(2)
    assert world.begin(gang) == 10


def test_host_of_an_attempt_that_others_never_heard_of_gives_nothing(world: World) -> None:
    """That attempt has its own step 20, and all of its other hosts were lost."""
    first, lost = world.new(2), world.new(2)
    world.begin([*first, *lost])
    saved([*first, *lost], 10)
    saved(first, 20)
    world.begin(lost)
    saved(lost, 20, by="abandoned ")
    assert world.begin(first) == 20
    gang = [lost[0], *first[1:], first[0], lost[1]]
    assert world.begin(gang) == 20
    assert [host.steps() for host in gang] == [{20: "place 0"}, {20: "place 1"}] * 2


def test_mark_remembers_few_attempts(world: World) -> None:
    gang = world.new(2)
    for step in range(20):
        assert world.begin(gang) == (step - 1 if step else None)
        saved(gang, step)
    (mark,) = (gang[0].files / "steps").glob(".mirrored *")
    assert mark.name == ".mirrored 20:18 19:17 18:16 17:15 16:14 15:13 14:12 13:11"


def test_unfinished_copies_and_files_of_others_are_no_steps(world: World) -> None:
    gang = world.new(2)
    saved(gang, 5)
    gang[0].save(9, by="nobody", folder="steps/.mirror")
    for name in ("7.orbax-checkpoint-tmp-3", "metadata", "8"):
        (gang[0].files / "steps" / name).write_text("a file")
    assert world.begin(gang) == 5
    left = {path.name for path in (gang[0].files / "steps").iterdir() if not path.name.startswith(".mirrored ")}
    assert left >= {"5", "7.orbax-checkpoint-tmp-3", "metadata"}
    assert ".mirror" not in left


def test_next_copy_is_used_if_one_breaks_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gang = world.new(6)
    world.begin(gang)
    saved(gang, 5)
    gang[0] = world.new(1)[0]
    fetch, tried = module._fetch_file, []

    def breaks(host: PeerFiles, source: str, target: Path, size: int) -> None:
        tried.append(host.address)
        if host.address == gang[2].service.address:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text("half")
            raise PeerFilesError("lost")
        fetch(host, source, target, size)

    monkeypatch.setattr(module, "_fetch_file", breaks)
    assert world.begin(gang) == 5
    assert gang[0].steps() == {5: "place 0"}
    assert {gang[2].service.address, gang[4].service.address} == {*tried}


def test_step_that_does_not_fit_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gang = world.new(4)
    saved(gang, 5)
    gang[3] = world.new(1)[0]
    monkeypatch.setattr(module, "room", lambda: 7)
    with pytest.raises(PeerFilesError, match=r"steps/5 has \d+ bytes, and 7 may be added"):
        world.begin(gang)
    assert gang[3].steps() == {}


def test_host_that_cannot_be_asked_stops_everybody(world: World) -> None:
    """A guess might differ from that of another task."""
    gang = world.new(4)
    saved(gang, 5)
    gang[2].service.stop()
    for index in range(2):
        world.task(gang, index)
        with pytest.raises(PeerFilesError, match="use another copy"):
            mirror(gang[index].files / "steps")
    assert [*gang[0].steps()] == [5]


def test_each_process_of_a_host_has_own_steps(world: World) -> None:
    gang = world.new(4)
    for index, host in enumerate(gang[:2]):
        for local in range(2):
            host.save(5, 10, by=f"place {index}.{local}", folder=f"steps/{local}")
    gang[0].save(15, by="place 0.0", folder="steps/0")
    world.attempt = 1
    for index in reversed(range(8)):
        world.task(gang, index, per_host=2)
        assert mirror(gang[index // 2].files / "steps" / str(index % 2)) == 10
    for index, host in enumerate(gang):
        for local in range(2):
            assert host.steps(f"steps/{local}") == {10: f"place {index % 2}.{local}"}


@pytest.mark.parametrize(
    ("directory", "per_host", "why"),
    [
        (lambda host: host.files, 1, "is not below"),
        (lambda host: host.files / ".." / "steps", 1, "is not below"),
        (lambda _: Path("/tmp/steps"), 1, "is not below"),
        (lambda host: host.files / "steps", 2, r"give each its own, .*\{me.local_dir\}/steps/\{me.local_index\}"),
    ],
)
def test_directory_that_others_cannot_see_is_refused(
    world: World, directory: Callable[[Host], Path], per_host: int, why: str
) -> None:
    gang = world.new(2)
    world.task(gang, 0, per_host)
    with pytest.raises(InvalidRequestError, match=why):
        mirror(directory(gang[0]))


def test_only_tasks_with_chips_mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no local_dir"):
        mirror(tmp_path)


def test_local_run_has_no_steps_to_mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in replace(INFO, local_dir=str(tmp_path)).to_env().items():
        monkeypatch.setenv(name, value)
    assert mirror(tmp_path / "steps") is None


# -- for Orbax's manager of replicated hosts, in real JAX processes ----------------------------------------------------

TRAIN = textwrap.dedent("""
    import json, os, sys
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from absl import flags
    from etils import epath
    from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager as replicator
    import iris_ray, iris_ray.jax
    from iris_ray.checkpoint.mirroring import mirror

    to, fails_after = int(sys.argv[1]), int(sys.argv[2])
    flags.FLAGS(["train"])
    me = iris_ray.get_job_info()
    steps = epath.Path(me.local_dir) / "steps"
    iris_ray.jax.initialize()
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()
    began = mirror(steps)

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("slices", "hosts"))
    by_host = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("hosts"))
    state = {"x": jax.make_array_from_callback((8,), by_host, lambda index: np.arange(8.0)[index])}
    manager = replicator.ReplicatorCheckpointManager(steps, global_mesh=mesh)
    first = manager.latest_step()
    if first is not None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_host), state)
        args = ocp.args.PyTreeRestore(shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes))
        state = manager.restore(first, args=ocp.args.Composite(state=args))["state"]
    for step in range((first or 0) + 1, to + 1):
        state = jax.jit(lambda state: {"x": state["x"] * 2 + 1})(state)
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        if step == fails_after:
            manager.wait_until_finished()
            os._exit(1)
    manager.close()
    (shard,) = state["x"].addressable_shards
    print(json.dumps([began, first, shard.data.tolist()]))
""")


def run(world: World, gang: Sequence[Host], to: int, fails_after: int = 0) -> list[list[object]]:
    """Run the program on a gang, and return what its tasks print."""
    world.attempt += 1
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    services = tuple(host.service.address for host in gang)
    tasks = []
    for index, host in enumerate(gang):
        me = replace(INFO, task_index=index, num_tasks=len(gang), slice_id=index // 2, worker_id=index % 2)
        me = replace(me, attempt=world.attempt, local_dir=str(host.files), file_services=services)
        me = replace(me, coordinator_address=coordinator)
        environ = {**os.environ, **me.to_env(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        command = [sys.executable, "-c", TRAIN, str(to), str(fails_after)]
        tasks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [task.communicate(timeout=120) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    if fails_after:
        return []
    return [json.loads(out.splitlines()[-1]) if out else pytest.fail(err) for out, err in said]


@pytest.mark.proof
@pytest.mark.parametrize("lost", [0, 1])
def test_orbax_resumes_from_hosts_steps_after_either_slices_loss(world: World, lost: int) -> None:
    pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint")
    gang = world.new(4)
    run(world, gang, to=9, fails_after=4)
    gang[2 * lost : 2 * lost + 2] = world.new(2)
    computed = [[x * 64 + 63 for x in range(start, start + 4)] for start in (0, 4)]
    assert run(world, gang, to=6) == [[4, 4, computed[index % 2]] for index in range(4)]
