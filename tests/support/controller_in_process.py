"""The command line against the real Controller, in this process, on a made-up cluster.

A conftest.py that imports `bare_cluster` and `world` offers these fixtures.
"""

import asyncio
import contextlib
import json
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from click.testing import Result
from ray.exceptions import ActorDiedError

import iris_ray
from iris_ray.actors.calls.controller_client import get_or_start_controller
from iris_ray.actors.controller import bootstrap
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.actors.protocol.version import PROTOCOL_VERSION
from iris_ray.cli import address
from iris_ray.cli.conventions import FAILED, OK
from iris_ray.client.caller_pool import FOLLOW_UP, pool_of_this_process
from iris_ray.errors import IrisError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import JobState
from iris_ray.model.teams import Team
from iris_ray.state import job_table
from iris_ray.state.events import TeamsSetEvent
from tests.support.cluster_in_process import ClusterInProcess
from tests.support.command_line import Terminal, invoke
from tests.support.hosts_in_process import Crash, Task
from tests.support.waiting import wait_until
from tests.support.worlds import gang_spec


class ControllerOf(Controller):
    """A Controller that a version of iris_ray has started. It keeps that version."""

    def __init__(
        self,
        read_nodes: Callable[[], NodeTable],
        end: Callable[[], object],
        version: str,
        protocol: int,
        history: Path | None,
    ) -> None:
        super().__init__(read_nodes, end, directory=lambda: history)
        self._of = version, protocol

    async def versions(self) -> dict[str, Any]:
        return {"version": self._of[0], "protocol": self._of[1]}

    async def about(self) -> dict[str, Any]:
        return await super().about() | {"version": self._of[0]}


class ControllerInProcess(ClusterInProcess):
    """A cluster with a command line.

    Attributes:
        makes_controller: what the next bootstrap starts.
        installed_on_head: the versions that are installed there, or None.
        before_bootstrap: called when a process that is to start a Controller begins.
    """

    def __init__(self, directory: Path, slices: Mapping[str, int]) -> None:
        super().__init__(directory, slices)
        self.makes_controller: Callable[[], Controller] = lambda: self.controller_of(iris_ray.__version__)
        self.before_bootstrap: Callable[[], object] = lambda: None
        self.installed_on_head: dict[str, Any] | None = None
        self._controllers: list[Controller] = []

    @contextlib.contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator["ControllerInProcess"]:
        """Within, this process is a driver of the cluster. In the end the state's invariants must hold."""
        self.install(monkeypatch)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._start_process)
        monkeypatch.setattr(bootstrap, "installed_on_head", lambda: self.installed_on_head)
        monkeypatch.setattr(address, "answers", lambda _: True)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        try:
            yield self
            for controller in self._controllers[-1:]:
                self._in_loop(controller._state.check)
        finally:
            self.ray.end()
            for thread in threading.enumerate():
                if thread.name == FOLLOW_UP:  # it would call the real Ray, which starts a cluster for that
                    thread.join(20)
            pool_of_this_process.__init__()  # type: ignore[misc]  # its pool was of this cluster

    # -- its Controller --------------------------------------------------------------------------------------------

    def new_controller(self) -> Controller:
        self._controllers.append(self.makes_controller())
        return self._controllers[-1]

    def controller_of(self, version: str, protocol: int = PROTOCOL_VERSION) -> Controller:
        return ControllerOf(self.read_nodes, self.restart_controller, version, protocol, self.history)

    def start_controller(self) -> None:
        """Start the Controller as the first job of a cluster does."""
        asyncio.run(get_or_start_controller())

    def replace_controller(self, when: Callable[[], bool]) -> None:
        """Stop the Controller as an operator does. Start another one when something is true; no job does so before."""
        may_start = threading.Event()
        self.before_bootstrap = lambda: may_start.wait(60)
        self.ray.kill(self.controller())
        wait_until(when)
        may_start.set()
        self.start_controller()

    def freeze_controller(self) -> None:
        """Stop the Controller as SIGSTOP does."""
        self.ray.freeze(self.controller())

    async def _start_process(self, *command: str, **_: Any) -> Any:
        assert command[1:3] == ("-m", bootstrap.__name__)
        output, code = await asyncio.to_thread(self._bootstrap, command[3])

        async def communicate() -> tuple[bytes, None]:
            return output.encode(), None

        return SimpleNamespace(communicate=communicate, returncode=code)

    def _bootstrap(self, address: str) -> tuple[str, int]:
        """Return what the process prints, and its exit code."""
        try:
            self.before_bootstrap()
            bootstrap.main(address)
        except IrisError as error:
            return str(error), bootstrap.exit_code(error)
        except Exception:
            return traceback.format_exc(), 1
        return "", 0

    def recorded(self) -> dict[str, bytes]:
        """Return what the Controller has written, by key, as records or in its log."""
        entries = [value for key, value in self.store.values.items() if key.startswith("log/") and value]
        logged = [value for entry in entries for value in pickle.loads(entry).items()]
        return {**self.store.values, **dict(logged)}

    # -- its jobs --------------------------------------------------------------------------------------------------

    def submit(self, job_id: str, slices: tuple[int, ...] = (1,), **changes: Any) -> str:
        """Submit a job on v4-16 slices from a pool of its own; return when the Controller has it."""
        values: dict[str, Any] = {"user": "ann", "max_retries_failure": 0} | changes
        return self.submitted(gang_spec(job_id, slices=slices, **values))

    def submitted(self, spec: JobSpec) -> str:
        """Submit a job from a pool of its own; return its id when the Controller has it."""
        pool = self.ray.create(SlicePoolManager, (), {})
        run, accepted = pool.run.remote(self.request(spec)).future(), pool.accepted.remote(spec.job_id).future()
        wait_until(lambda: accepted.done() or run.done())
        if not accepted.done() or not accepted.result():
            run.result()
        return spec.job_id

    def start(self, job_id: str, slices: tuple[int, ...] = (1,), **changes: Any) -> str:
        """Submit a job, and return when all its tasks run."""
        self.submit(job_id, slices, **changes)
        self.wait_for_attempt(job_id, 1)
        return job_id

    def jobs(self) -> list[str]:
        """Return the ids of all jobs."""
        return [job.job_id for job in self._ask("list_jobs")]

    def status(self, job_id: str) -> JobStatus:
        found: JobStatus = self._ask("job_status", job_id)
        return found

    def spec(self, job_id: str) -> JobSpec:
        """Return what the Controller was asked for."""
        return self._controllers[-1]._state.jobs[job_id].spec

    def has_avoided_hosts(self, job_id: str) -> bool:
        return bool(self._controllers[-1]._state.jobs[job_id].avoided)

    def state(self, job_id: str) -> JobState:
        return self.status(job_id).state

    def only_job(self) -> str:
        """Return the id of the only job that has not ended."""
        (job,) = (job for job in self._jobs() if not job.state.finished)
        return str(job.job_id)

    def has_running_job(self) -> bool:
        return any(job.state is JobState.RUNNING and not job.starting for job in self._jobs())

    def _jobs(self) -> list[JobStatus]:
        """Return the jobs that people have submitted."""
        return [job for job in self._ask("list_jobs") if job.spare_for is None]

    def wait_for_state(self, job_id: str, state: JobState) -> None:
        wait_until(lambda: self.state(job_id) is state and not self.status(job_id).starting)

    def wait_for_attempt(self, job_id: str, attempt: int) -> None:
        """Return when that attempt runs."""
        wait_until(lambda: self.status(job_id).attempt == attempt)
        self.wait_for_state(job_id, JobState.RUNNING)

    def wait_for_no_host(self, slice_name: str, number: int) -> None:
        """Return when the Controller knows that the host is gone."""
        node_id = self.node_id(slice_name, number)
        wait_until(lambda: node_id not in {worker.node_id for worker in self._ask("list_workers")})

    def succeed(self, job_id: str) -> None:
        """Make every task return None; return when nothing of the job is left."""
        for task in self._latest(job_id):
            self._in_loop(task.end.set_result, None)
        self.wait_for_state(job_id, JobState.SUCCEEDED)
        wait_until(lambda: not any(job_id in worker.tasks[0] for worker in self._ask("list_workers") if worker.tasks))

    def fail(self, job_id: str, index: int, how: str = "exited with code 3") -> None:
        """End the process of one task, as its text says; return when the job is charged for it."""
        failures = self.status(job_id).failures
        self._in_loop(self._latest(job_id)[index].end.set_exception, Crash(how))
        wait_until(lambda: self.status(job_id).failures > failures)

    def forget(self, job_id: str, **changes: Any) -> None:
        """Have the Controller forget a job that has ended, after another one with these changes."""
        with mock.patch.object(job_table, "FINISHED_JOBS_KEPT", 0):
            self.succeed(self.start(f"after-{job_id}", **changes))
            wait_until(lambda: job_id not in self.jobs())

    def prints(self, job_id: str, index: int, text: str) -> None:
        """Make the latest attempt of a task print something."""
        self._latest(job_id)[index].say(text)

    def says(self, job_id: str, step: int, status: str) -> None:
        """Make the first task of a job say how far it is."""
        first = self._latest(job_id)[0]
        first.heartbeat(step)
        first.report_status(status)

    def _latest(self, job_id: str) -> list[Task]:
        """Return the latest attempt of each task, by index."""
        latest = {task.info.task_index: task for task in self.tasks_of(job_id)}
        return [latest[index] for index in sorted(latest)]

    def set_teams(self, *teams: Team) -> None:
        """Replace the tree of teams."""
        self._in_loop(self._controllers[-1]._events.apply, [TeamsSetEvent(teams)])

    def part_of_controller(self, service: str) -> Any:
        """Return a service's part in the Controller."""
        return next(running.part for running in self._controllers[-1]._services if running.service.name == service)

    def _ask(self, method: str, *args: Any) -> Any:
        """Return the answer of the Controller; if none runs, wait for the next one."""
        deadline = time.monotonic() + 60.0
        while True:
            try:
                return getattr(self.controller(), method).remote(*args).future().result(60)
            except (ValueError, ActorDiedError):
                assert time.monotonic() < deadline, "no Controller came"
                time.sleep(0.02)

    def _in_loop(self, function: Callable[..., object], *args: Any) -> None:
        async def call() -> None:
            function(*args)

        self.ray.in_loop(call()).result(60)

    # -- the command line ------------------------------------------------------------------------------------------

    def iris(
        self, *arguments: str, code: int = OK, user: str = "ann", quotes: bool = False, input: bytes | None = None
    ) -> Result:
        """Run a command without a terminal; fail if it ends with another code.

        Args:
            arguments: of the command.
            code: the exit code that is expected; those of bad usage and of no cluster come with one line.
            user: who runs it.
            quotes: whether it quotes what another process has printed, which may be more than that line.
            input: what it reads from stdin.
        """
        done = invoke(*arguments, input=input, IRIS_USER=user, RAY_ADDRESS=None)
        assert done.exit_code == code, done.output
        lines = [line for line in done.stderr.splitlines() if "joined the Ray cluster at" not in line]
        assert quotes or code in (OK, FAILED) or len(lines) == 1, done.stderr
        return done

    def json(self, *arguments: str, code: int = OK) -> Any:
        return json.loads(self.iris(*arguments, "--json", code=code).stdout)

    @contextlib.contextmanager
    def meanwhile(self, story: Callable[[], None]) -> Iterator[None]:
        """Tell a story in a second thread while a command runs within; raise at the end what the story raises."""
        with ThreadPoolExecutor(1) as beside:
            told = beside.submit(story)
            yield
            told.result()

    def on_terminal(self, *arguments: str, person: Terminal) -> int:
        """Run a command on a terminal; return its exit code."""
        self.ray.has_pressed_ctrl_c = person.has_pressed_ctrl_c
        with mock.patch.dict(os.environ, IRIS_USER="ann"):
            return person.run(*arguments)


@pytest.fixture
def bare_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Three v4-16 slices of two hosts each, and no Controller yet."""
    (tmp_path / "hosts").mkdir()
    with ControllerInProcess(tmp_path / "hosts", {"v4-16": 3}).installed(monkeypatch) as world:
        yield world


@pytest.fixture
def world(bare_cluster: ControllerInProcess) -> ControllerInProcess:
    """The same, and its Controller runs."""
    bare_cluster.start_controller()
    return bare_cluster
