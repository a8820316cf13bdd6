"""For the cluster tests: functions for gangs that leave a trace, and looks at the cluster from outside."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from iris_ray import IrisClient, ResourceSpec, get_job_info, run_on_pod_ray, tpu_device
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import JobView
from iris_ray.actors.protocol.status import JobStatus, WorkerStatus
from iris_ray.client.caller_pool import pool_of_this_process
from iris_ray.testing import SimulatedCluster
from tests.support.proofs import a_seed
from tests.support.waiting import wait_until


class Trace:
    """A directory in which every task of a gang records that it started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def starts(self, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return what the tasks recorded, of one attempt or of all, by attempt and task index."""
        found = []
        for path in self.directory.glob("start-*.json"):
            text = path.read_text()
            if text:
                found.append(json.loads(text))
        return sorted((s for s in found if attempt in (None, s["attempt"])), key=lambda s: (s["attempt"], s["index"]))

    def wait_for_tasks(self, count: int, attempt: int = 1, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        return wait_until(lambda: len(s := self.starts(attempt)) == count and s, timeout_s)

    def finish(self) -> None:
        """Let the tasks return."""
        (self.directory / "finish").touch()

    def gang(self, during: Callable[[dict[str, Any]], Any] | None = None) -> Callable[[], dict[str, Any]]:
        """Return a function for a gang. It records which task it is and which tasks of earlier attempts still run,
        waits for `finish`, and returns that record.

        Args:
            during: called with the record instead of the wait; its result is returned.
        """
        directory = str(self.directory)

        def traced() -> Any:
            import json
            import os
            import threading
            import time
            from pathlib import Path

            from iris_ray import get_job_info

            me = get_job_info()
            assert me is not None
            others = [json.loads(text) for path in Path(directory).glob("start-*") if (text := path.read_text())]
            facts = {
                "beside": [one["pid"] for one in others if one["attempt"] < me.attempt and alive(one["pid"])],
                "job": me.job_id,
                "attempt": me.attempt,
                "index": me.task_index,
                "slice": me.slice_name,
                "slice_id": me.slice_id,
                "worker_id": me.worker_id,
                "coordinator": me.coordinator_address,
                "pid": os.getpid(),
                "main_thread": threading.current_thread() is threading.main_thread(),
                "megascale": {k: v for k, v in os.environ.items() if k.startswith("MEGASCALE_")},
            }
            path = Path(directory) / f"start-{me.attempt}-{me.task_index}.json"
            with path.open("x") as file:  # fails if the same attempt starts twice
                file.write(json.dumps(facts))
            if during is not None:
                return during(facts)
            while not (Path(directory) / "finish").exists():
                time.sleep(0.02)
            return facts

        return traced

    def gang_that_raises_when_told(self) -> Callable[[], Any]:
        """Return a gang's function that raises in its first attempt once `tell` is called; see `gang`."""
        directory = self.directory

        def raise_when_told(facts: dict[str, Any]) -> str:
            while not (directory / "finish").exists():
                if facts["attempt"] == 1 and (directory / "told").exists():
                    raise ConnectionError("peer went away")
                time.sleep(0.02)
            name: str = facts["slice"]
            return name

        return self.gang(raise_when_told)

    def tell(self) -> None:
        (self.directory / "told").touch()


def slice_of_this_task() -> str:
    """The name of the slice that the calling task runs on."""
    info = get_job_info()
    assert info is not None
    return info.slice_name


class Crowd:
    """Four random jobs at a time on three v4-16 slices: some wait, some fail once and are tried again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seed = a_seed(11)
        self.chance = random.Random(self.seed)
        self._started = 0
        self._seen = 0
        self._jobs: dict[int, CrowdJob] = {}
        print(f"seed {self.seed}")

    def fill_up(self) -> None:
        while len(self._jobs) < 4:
            directory = self._directory / str(self._started)
            directory.mkdir()
            self._jobs[self._started] = self._start(self._started, Trace(directory))
            self._started += 1

    def keep_busy_until_a_task_starts(self, timeout_s: float = 120.0) -> None:
        """Return when a task has started since the last call, so that a loop of kills lets the jobs go on."""

        def has_started() -> bool:
            self.check_ended()
            self.fill_up()
            return len(list(self._directory.glob("*/start-*.json"))) > self._seen

        wait_until(has_started, timeout_s)
        self._seen = len(list(self._directory.glob("*/start-*.json")))

    def check_ended(self) -> None:
        """Check the jobs that have ended since the last call."""
        for number in [number for number, job in self._jobs.items() if job.results.done()]:
            self._check(number, self._jobs.pop(number))

    def check_all(self) -> None:
        """Wait for all jobs, and check them."""
        for number, job in self._jobs.items():
            self._check(number, job)
        print(f"{self._started} jobs")

    def _start(self, number: int, trace: Trace) -> "CrowdJob":
        slices = self.chance.choice([1, 2, 3])
        work = self._work(number, trace, {0} if self.chance.random() < 0.3 else set())
        ref = run_on_pod_ray.remote(work, "v4-16", num_slices=slices, max_retries_failure=1)
        return CrowdJob(ref.future(), trace, 2 * slices, gangs=1)

    def _work(self, number: int, trace: Trace, failing: set[int]) -> Callable[[], Any]:
        """Return a function that returns the number after a while; the tasks of these indices fail first."""
        seconds, directory = self.chance.uniform(0.0, 2.0), trace.directory

        def work(start: dict[str, Any]) -> int:
            time.sleep(seconds)
            failed = directory / f"failed-{start['index']}"
            if start["index"] in failing and not failed.exists():
                failed.touch()
                raise ValueError("once")
            return number

        return trace.gang(work)

    def _check(self, number: int, job: "CrowdJob") -> None:
        """Check the results, that each attempt started once, and that a gang is charged for its own failure alone."""
        wait_until(job.results.done, 120)
        assert job.results.result() == [number] * job.tasks, f"seed {self.seed}"
        for first_task in range(job.gangs):
            starts = [start for start in job.trace.starts() if start["index"] == first_task]
            view = job_view(starts[0]["job"], first_task)
            failed = (job.trace.directory / f"failed-{first_task}").exists()
            assert (view.failures, view.preemptions, len(starts)) == (failed, 0, 1 + failed), f"seed {self.seed}"
            assert starts[-1]["attempt"] == view.attempt, f"seed {self.seed}"


class CrowdOfTasks(Crowd):
    """Four random jobs at a time whose tasks fail by themselves: on a part of a host, or on one of two v4-8 slices."""

    def _start(self, number: int, trace: Trace) -> "CrowdJob":
        tasks = self.chance.choice([1, 2])
        failing = {index for index in range(tasks) if self.chance.random() < 0.3}
        device = self.chance.choice([None, tpu_device("v4-8")])
        need = ResourceSpec(cpu=0.5, replicas=tasks, device=device)
        work = self._work(number, trace, failing)
        return CrowdJob(IrisClient().submit(work, resources=need, max_retries_failure=1), trace, tasks, gangs=tasks)


@dataclass(frozen=True)
class CrowdJob:
    results: "Future[list[Any]]"
    trace: Trace
    tasks: int
    gangs: int


def the_controller() -> ControllerConnection:
    """Return a connection to this cluster's Controller, which may just be coming back."""
    return ControllerConnection(patience_s=60.0)


def all_jobs() -> list[JobStatus]:
    """Return all jobs that this cluster's Controller knows."""
    return the_controller().ask_all(ControllerInterface.list_jobs)


def all_workers() -> list[WorkerStatus]:
    """Return all live hosts that this cluster's Controller knows."""
    return the_controller().ask_all(ControllerInterface.list_workers)


def ask_as_a_pool(call: Callable[[Any], Any]) -> Any:
    """Return the Controller's answer to a call that only pools make, and wait for it while the Controller restarts."""

    def ask() -> tuple[Any] | None:
        controller = find_controller()
        if controller is None:
            return None
        try:
            return (ray.get(call(controller), timeout=10),)
        except RayError:
            return None

    (answer,) = wait_until(ask)
    return answer


def controller_pid() -> int:
    """Return the pid of this cluster's Controller."""
    return the_controller().ask(ControllerInterface.about)["pid"]


def kill_controller() -> None:
    """End its process with SIGKILL, and wait until it is gone; Ray starts another."""
    pid = controller_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))


def result_of(ref: Any, timeout_s: float = 90.0) -> Any:
    """Return the value of a reference, and wait for it; see `wait_until`."""
    wait_until(lambda: ray.wait([ref], timeout=0)[0], timeout_s)
    return ray.get(ref)


def free_chips() -> float:
    """Return how many TPU chips of the cluster are not claimed."""
    return ray.available_resources().get("TPU", 0.0)


def job_view(job_id: str, gang: int = 0) -> JobView:
    """Return the Controller's view of a gang of a job."""
    return ask_as_a_pool(lambda controller: controller.report.remote(job_id, [], gang))


def pool_pid() -> int:
    """Return the pid of this driver's SlicePoolManager."""
    pool = pool_of_this_process._pool
    assert pool is not None
    return ray.get(pool.handle.__ray_call__.remote(lambda _: os.getpid()))


def actor_pid(cluster: SimulatedCluster, slice_name: str, worker_id: int, kind: str) -> int:
    """Return the pid of one of our actors on a simulated host, by the name of its class."""
    (found,) = cluster.host_pids(slice_name, worker_id, f"ray::{kind}")
    return found


def alive(pid: int) -> bool:
    """Return whether that process still runs; one that has ended and is not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def birth(pid: int) -> str:
    """When a process began, by the kernel's count; empty if it is gone. A pid alone may by now be another process's."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
