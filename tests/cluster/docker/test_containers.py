"""Gangs whose tasks run programs in containers: by a stand-in for docker, and by podman where that can run."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from iris_ray import IrisClient, Secret, TaskState, run_docker_on_pod
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.errors import JobCancelledError, TaskCrashedError
from iris_ray.model.parts import slice_of
from iris_ray.settings import CONTAINER_ENGINE
from iris_ray.testing import SimulatedCluster
from tests.support.clusters import Clusters
from tests.support.containers import Podman, StandIn
from tests.support.gangs import alive
from tests.support.leaks import places_with
from tests.support.proofs import in_long
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

ODD = "a b\"c'd\n$e\\ ü"
SECRET = "s3cret"
WAIT = "touch {0}/runs-$IRIS_ATTEMPT-$IRIS_TASK_INDEX; while [ ! -e {0}/finish ]; do sleep 0.1; done"

Engine = StandIn | Podman


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command that hosts use as their engine: a link that tests lead to one or the other."""
    return tmp_path_factory.mktemp("switch") / "engine"


@pytest.fixture(scope="module")
def slices(clusters: Clusters, switch: Path) -> Iterator[SimulatedCluster]:
    clusters.give_back_and_end()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTAINER_ENGINE.name, str(switch))
        with SimulatedCluster({"v4-16": 3}, quiet=True) as cluster:
            yield cluster


@pytest.fixture(scope="module", params=[*in_long(StandIn), Podman])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine: Engine = request.param(tmp_path_factory.mktemp("engine"))
    if isinstance(engine, Podman) and (problem := engine.problem()):
        pytest.skip(problem)
    return engine


@pytest.fixture
def engine(installed: Engine, slices: SimulatedCluster, switch: Path) -> Iterator[Engine]:
    """The engine of all hosts, which have three slices."""
    for _ in range(3 - len(slices.slice_names)):
        slices.add_slice("v4-16")
    switch.unlink(missing_ok=True)
    switch.symlink_to(installed.path)
    yield installed
    installed.clear()


class Run:
    """A run in a thread of its own, whose programs see a directory of the test."""

    def __init__(self, directory: Path, script: str, **options: Any) -> None:
        self._directory = directory
        self.name = directory.name[-20:]
        self._end: Future[None] = Future()
        self._call: Callable[[], None] = lambda: run_docker_on_pod(
            Podman.IMAGE,
            ["sh", "-c", script.format(directory)],
            tpu_type="v4-16",
            name=self.name,
            container_options=[f"--volume={directory}:{directory}"],
            **options,
        )
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._end.set_result(self._call())
        except BaseException as error:
            self._end.set_exception(error)

    @property
    def job(self) -> str:
        return next(job.job_id for job in IrisClient().list_jobs() if job.name == self.name)

    def wait_for_tasks(self, count: int, attempt: int = 1) -> None:
        wait_until(lambda: len(list(self._directory.glob(f"runs-{attempt}-*"))) == count or self._end.done())
        assert not self._end.done(), self._end.exception()

    def finish(self) -> None:
        (self._directory / "finish").touch()

    def result(self) -> None:
        wait_until(self._end.done, 120)
        return self._end.result()

    def clear(self) -> None:
        """End it if it still runs: the test has failed."""
        if not self._end.done():
            IrisClient().cancel(self.job)
            wait_until(self._end.done)


Start = Callable[..., Run]


@pytest.fixture
def start(engine: Engine, tmp_path: Path) -> Iterator[Start]:
    """Starts a run."""
    started: list[Run] = []

    def start(script: str, **options: Any) -> Run:
        started.append(Run(tmp_path, script, **options))
        return started[-1]

    yield start
    for run in started:
        run.clear()


def pids(engine: Engine) -> list[int]:
    return [pid for name in engine.containers() if (pid := engine.pid(name))]


def test_two_programs_share_a_slice_each_on_its_part(engine: Engine, tmp_path: Path) -> None:
    script = "echo $TPU_WORKER_ID $TPU_PROCESS_BOUNDS $TPU_TOPOLOGY $IRIS_SLICE_NAME > {0}/told; " + WAIT
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name, script, topology="2x2x1"))
    for run in runs:
        run.wait_for_tasks(1)
    told = [(tmp_path / name / "told").read_text().split() for name in ("one", "other")]
    assert [facts[:3] for facts in told] == [["0", "1,1,1", "2x2x1"]] * 2
    one, other = (facts[3] for facts in told)
    assert one != other
    assert slice_of(one) == slice_of(other), "the part that breaks up the least"
    for run in runs:
        run.finish()
        run.result()


@pytest.mark.way_in
def test_programs_have_variables_and_print_for_tasks(engine: Engine, start: Start, tmp_path: Path) -> None:
    script = 'printf %s "$ODD" > {0}/odd-$IRIS_TASK_INDEX; echo "$MEGASCALE_SLICE_ID of $MEGASCALE_NUM_SLICES"'
    run = start(script, num_slices=2, env={"ODD": ODD, "TOKEN": SECRET})
    run.result()
    assert [(tmp_path / f"odd-{index}").read_text() for index in range(4)] == [ODD] * 4
    printed = [IrisClient().fetch_task_logs(run.job, index).data.decode().split() for index in range(4)]
    assert printed == [["0", "of", "2"]] * 2 + [["1", "of", "2"]] * 2
    assert engine.containers() == []
    if isinstance(engine, StandIn):
        assert SECRET not in str(engine.calls("run"))


def test_secrets_are_files_and_nowhere_else(engine: Engine, start: Start, tmp_path: Path) -> None:
    key = secrets.token_hex(20)
    copy = 'cat "$KEY" | tee {0}/read-$IRIS_TASK_INDEX > {0}/copy; rm {0}/copy; ' + WAIT
    run = start(copy, secrets={"KEY": Secret(key, as_file=True)})
    run.wait_for_tasks(2)
    read = [tmp_path / f"read-{index}" for index in range(2)]
    assert [path.read_text() for path in read] == [key] * 2
    for path in read:
        path.unlink()
    head = Path(ControllerConnection().ask(ControllerInterface.about)["services"]["history"]["path"]).parent
    places = places_with([key.encode()], head.parent, engine.path.parent / "none")
    assert len(places) == 2
    assert all(place.startswith("/dev/shm/iris-ray-secrets-") for place in places)
    assert not any(key in str(engine.inspect(name)) for name in engine.containers())
    run.finish()
    run.result()
    assert places_with([key.encode()], head.parent, engine.path.parent / "none") == []


def test_each_container_attempt_is_new_and_has_exit_code(engine: Engine, start: Start, tmp_path: Path) -> None:
    run = start(
        "touch {0}/runs-$IRIS_ATTEMPT-$IRIS_TASK_INDEX; [ $IRIS_TASK_INDEX = 0 ] || exit 3; sleep 60",
        max_retries_failure=1,
    )
    with pytest.raises(TaskCrashedError, match="the container's program exited with code 3"):
        run.result()
    task = IrisClient().task_status(run.job, 1)
    assert [attempt.exit_code for attempt in task.attempts] == [3, 3]
    assert {path.name for path in tmp_path.glob("runs-*-1")} == {"runs-1-1", "runs-2-1"}
    wait_until(lambda: engine.containers() == [])


def test_cancelled_containers_end(engine: Engine, start: Start) -> None:
    run = start(WAIT)
    run.wait_for_tasks(2)
    assert len(engine.containers()) == 2
    running = pids(engine)
    IrisClient().cancel(run.job)
    with pytest.raises(JobCancelledError):
        run.result()
    wait_until(lambda: not any(map(alive, running)) and engine.containers() == [])


def test_notice_reaches_programs_and_gang_moves(
    engine: Engine, start: Start, slices: SimulatedCluster, tmp_path: Path
) -> None:
    save = "trap 'touch {0}/saved-$IRIS_TASK_INDEX; exit 0' TERM; " + WAIT
    run = start(save)
    run.wait_for_tasks(2)
    first = IrisClient().task_status(run.job, 0)
    assert first.group is not None
    preemption = slices.preempt_slice(first.group, notice_s=90)
    run.wait_for_tasks(2, attempt=2)
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    task = IrisClient().task_status(run.job, 0)
    assert task.group != first.group
    assert (task.preemptions, task.failures) == (1, 0)
    run.finish()
    run.result()
    preemption.cancel()
    slices.preempt_slice(first.group)  # Ray is still draining it
    wait_until(lambda: engine.containers() == [])


@pytest.mark.way_in
def test_lost_slice_is_replaced_and_peers_containers_end(
    engine: Engine, start: Start, slices: SimulatedCluster, tmp_path: Path
) -> None:
    run = start(WAIT, num_slices=2)
    run.wait_for_tasks(4)
    before = pids(engine)
    assert len(before) == 4
    lost = IrisClient().task_status(run.job, 0).group
    assert lost is not None
    slices.preempt_slice(lost)
    run.wait_for_tasks(4, attempt=2)
    assert not any(map(alive, before))
    run.finish()
    run.result()
    assert IrisClient().task_status(run.job, 0).state is TaskState.SUCCEEDED
    wait_until(lambda: engine.containers() == [])


DRIVER = """
import sys, ray
from iris_ray import run_docker_on_pod
ray.init(sys.argv[1], log_to_driver=False)
directory = sys.argv[3]
run_docker_on_pod(
    sys.argv[2], ["sh", "-c", sys.argv[4].format(directory)], tpu_type="v4-16",
    container_options=[f"--volume={directory}:{directory}"],
)
"""


@pytest.mark.long
def test_containers_of_killed_driver_end(engine: Engine, slices: SimulatedCluster, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, slices.address, Podman.IMAGE, str(tmp_path), WAIT]
    with subprocess.Popen(command) as driver, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(driver.kill)
        wait_until(lambda: len(list(tmp_path.glob("runs-1-*"))) == 2)
        running = pids(engine)
        assert len(running) == 2
        os.kill(driver.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, running)) and engine.containers() == [])
