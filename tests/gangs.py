"""What the cluster tests share: functions for gangs that leave a trace, and looks at the cluster from outside."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from iris_ray import run_on_pod_ray
from iris_ray.actors.controller_client import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.messages import JobView


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.05)
    return value


class Trace:
    """A directory in which every task of a gang writes down that it started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def starts(self, attempt: int | None = None) -> list[dict[str, Any]]:
        """What the tasks wrote, of one attempt or of all, in the order of task indices."""
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
        """A function that writes down who it is, waits for `finish`, and returns what it wrote down.

        Args:
            during: called with that, after it is written down, in place of the wait; its result is returned.
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
            facts = {
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


class Crowd:
    """Four random jobs at a time on three v4-16 slices: some wait, some fail once and are tried again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.seed = random.randrange(10**6)
        self.chance = random.Random(self.seed)
        self._started = 0
        self._jobs: dict[int, tuple[Any, Trace, int]] = {}
        print(f"seed {self.seed}")

    def fill_up(self) -> None:
        while len(self._jobs) < 4:
            self._jobs[self._started] = self._start(self._started)
            self._started += 1

    def check_ended(self) -> None:
        """The jobs that have ended since the last time ended as they should."""
        for number in [n for n, (ref, *_) in self._jobs.items() if ray.wait([ref], timeout=0)[0]]:
            self._check(number, *self._jobs.pop(number))

    def check_all(self) -> None:
        """All jobs end, and as they should."""
        for number, job in self._jobs.items():
            self._check(number, *job)
        print(f"{self._started} jobs")

    def _start(self, number: int) -> tuple[Any, Trace, int]:
        directory = self._directory / str(number)
        directory.mkdir()
        seconds, fails = self.chance.uniform(0.0, 2.0), self.chance.random() < 0.3
        trace = Trace(directory)

        def work(start: dict[str, object]) -> int:
            time.sleep(seconds)
            if fails and start["index"] == 0 and not (directory / "failed").exists():
                (directory / "failed").touch()
                raise ValueError("once")
            return number

        slices = self.chance.choice([1, 2, 3])
        ref = run_on_pod_ray.remote(trace.gang(work), "v4-16", num_slices=slices, max_retries_failure=1)
        return ref, trace, 2 * slices

    def _check(self, number: int, ref: Any, trace: Trace, tasks: int) -> None:
        """The right results; charged for its failure and for nothing else."""
        assert ray.get(ref, timeout=120) == [number] * tasks, f"seed {self.seed}"
        job = job_view(trace.starts()[0]["job"])
        failed = (trace.directory / "failed").exists()
        assert (job.failures, job.preemptions) == (int(failed), 0), f"seed {self.seed}"


def ask_controller(method: str, *args: Any) -> Any:
    """The answer of this cluster's Controller, which may just be coming back."""

    def ask() -> Any:
        try:
            controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
            return ray.get(getattr(controller, method).remote(*args), timeout=10)
        except (RayError, ValueError):
            return None

    return wait_until(ask)


def controller_pid() -> int:
    """The process of this cluster's Controller."""
    return ask_controller("about")["pid"]


def free_chips() -> float:
    """TPU chips in the cluster that nobody has claimed."""
    return ray.available_resources().get("TPU", 0.0)


def job_view(job_id: str) -> JobView:
    """How the Controller sees a job."""
    return ask_controller("report", job_id, [])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
