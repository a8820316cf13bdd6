"""What the cluster tests share: functions for gangs that leave a trace, and looks at the cluster from outside."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

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
            path.write_text(json.dumps(facts))
            if during is not None:
                return during(facts)
            while not (Path(directory) / "finish").exists():
                time.sleep(0.02)
            return facts

        return traced


def free_chips() -> float:
    """TPU chips in the cluster that nobody has claimed."""
    return ray.available_resources().get("TPU", 0.0)


def job_view(job_id: str) -> JobView:
    """How the Controller sees a job."""
    controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    return ray.get(controller.report.remote(job_id, []))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
