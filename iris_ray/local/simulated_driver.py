"""The driver of a simulated run: ``python -m iris_ray.local.simulated_driver JOB_FILE PARENT``."""

import contextlib
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import cloudpickle

from iris_ray.actors.calls.controller_connection import RESTART_S, ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.caller_pool import pool_of_this_process
from iris_ray.client.job_progress import results_of
from iris_ray.client.user_function import callers_error
from iris_ray.errors import IrisError
from iris_ray.local.mode import LOSSES, PlannedFault
from iris_ray.local.run import outcome_file
from iris_ray.model.lifecycle import TaskState
from iris_ray.processes.subtree import end_with_parent
from iris_ray.terminal import show_each_line
from iris_ray.testing import SimulatedCluster

POLL_S = 0.2


class FaultPlayer:
    """Injects faults, in their order, into a cluster while a job runs. A new slice replaces each lost one."""

    def __init__(self, cluster: SimulatedCluster, faults: Sequence[PlannedFault], request: RunRequest) -> None:
        self._cluster = cluster
        self._left = list(faults)
        self._job_id = request.spec.job_id
        self._device = str(request.spec.device)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> list[PlannedFault]:
        """Stop when the job is over. Return the faults that did not happen."""
        self._over.set()
        self._thread.join()
        return self._left

    def _play(self) -> None:
        if not self._left or not self._wait_until_it_runs():
            return
        started = time.monotonic()
        while self._left and not self._over.wait(max(0.0, started + self._left[0].after_s - time.monotonic())):
            self._do(self._left.pop(0))

    def _wait_until_it_runs(self) -> bool:
        while not self._over.wait(POLL_S):
            with contextlib.suppress(IrisError):  # the Controller does not know the job yet
                tasks = ControllerConnection(patience_s=RESTART_S).ask_all(ControllerInterface.list_tasks, self._job_id)
                if all(task.state is TaskState.RUNNING for task in tasks):
                    return True
        return False

    def _do(self, fault: PlannedFault) -> None:
        print(f"iris_ray: {fault.text}", file=sys.stderr)
        name, host = f"{self._device}-{fault.slice_number}", fault.host or 0
        if fault.action == "preempt":
            self._cluster.preempt_slice(name, fault.notice_s)
        elif fault.action == "kill" and fault.host is None:
            self._cluster.preempt_slice(name)
        elif fault.action == "kill":
            self._cluster.kill_host(name, host)
        elif fault.action == "freeze":
            self._cluster.freeze_host(name, host)
        elif fault.action == "thaw":
            self._cluster.thaw_host(name, host)
        if fault.action in LOSSES or fault.action == "add":
            self._cluster.add_slice(self._device)


def main(job_file: Path) -> None:
    request, slices, faults = pickle.loads(job_file.read_bytes())
    request = replace(request, spec=replace(request.spec, team=""))  # the simulated cluster has no teams
    outcome: Any
    with SimulatedCluster({request.spec.device: slices}) as cluster:
        results, _ = pool_of_this_process.submit(request)
        player = FaultPlayer(cluster, faults, request)
        try:
            outcome = results_of(request.spec.job_id, results)
        except KeyboardInterrupt:
            player.stop()
            raise
        except Exception as error:
            outcome = callers_error(error)
        for fault in player.stop():
            print(f"iris_ray: the run was over before {fault.text!r}", file=sys.stderr)
        pool_of_this_process.wait_for_tasks()
    outcome_file(job_file).write_bytes(cloudpickle.dumps(outcome))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    show_each_line()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it in its own processes
    try:
        main(Path(sys.argv[1]))
    except KeyboardInterrupt:  # the caller was interrupted as well, and says so
        sys.exit(128 + signal.SIGINT)
