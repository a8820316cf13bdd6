"""Runs one attempt of a gang in processes of this machine, one for each task, without Ray.

Of a gang with more tasks than `MOST_AT_ONCE` the tasks take turns: such a run tries a function, not how tasks meet.
"""

import contextlib
import os
import pickle
import secrets
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError

from iris_ray.actors.host.exit_status import ProcessExit, diagnose
from iris_ray.actors.host.owned import end_owned
from iris_ray.actors.host.task_environment import PORTS_HELD, hold_ports, kept_in_memory, task_environment
from iris_ray.actors.pool.attempt_end import FAILED_EXIT_S
from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.gang_run import failure_error
from iris_ray.actors.pool.launch import launch_plan
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace, RunRequest, TaskLaunch
from iris_ray.actors.protocol.payloads import load
from iris_ray.actors.protocol.task_files import OUTPUT_DIR, LocalRun, TaskFiles, write_whole
from iris_ray.client.user_function import callers_error
from iris_ray.local.mode import ModeKind
from iris_ray.local.process import LocalProcess
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.membership import Membership
from iris_ray.model.options import EACH_SLICE
from iris_ray.model.outcomes import EndKind, HostEvidence, TaskEnd, TaskKey
from iris_ray.model.verdict import judge_gang
from iris_ray.model.workers import TPU
from iris_ray.processes.tree import ProcessTree, end_processes
from iris_ray.settings import MODE
from iris_ray.terminal import print_line

MOST_AT_ONCE = 64
"""So many tasks run at a time: each is a Python process."""
POLL_S = 0.02
LAST_LINES_S = 2.0
ADDRESS = "127.0.0.1"
ON_CPU = {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
"""The tasks share this machine, so they run on its CPU unless the user's variables say otherwise."""


def run_gang(request: RunRequest) -> list[Any]:
    """Run a request on the largest number of slices whose tasks can run at once, or else on the smallest number.

    Return its results by task. The first task that fails ends the others. After success the processes have
    ``exit_grace`` seconds for threads and exit handlers, and the first that fails has `FAILED_EXIT_S`.

    Raises:
        ray.exceptions.RayTaskError: a task's own error, also an instance of the exception that it raised.
        TaskCrashedError: a task's process ended without returning or raising.
    """
    place = local_place(request)
    tasks: dict[TaskKey, LocalTask] = {}
    with (
        tempfile.TemporaryDirectory(prefix="iris-ray-", ignore_cleanup_errors=True) as folder,
        ended_at_last(tasks, run := LocalRun(Path(folder))),
    ):
        _say(request, place)
        launches = _launches(request, place)
        token = secrets.token_hex(16)

        def tell(ends: Mapping[TaskKey, TaskEnd]) -> None:
            """Tell all tasks which slices have returned."""
            left = {key.slice_id for key in launches if key not in ends}
            returned = frozenset(range(len(place.names))) - left
            members = Membership(1 + len(returned), dict.fromkeys(sorted(left), 1), returned, token)
            for launch in launches.values():
                write_whole(run.files(launch.info.task_index).membership, members.to_json().encode())

        by_slice = request.spec.failure_domain == EACH_SLICE
        if by_slice:
            tell({})
        waiting = deque(launches.items())

        def start_next(running: int) -> None:
            while waiting and running < MOST_AT_ONCE:
                key, launch = waiting.popleft()
                tasks[key] = LocalTask(request, launch, run)
                running += 1

        ends = _wait(len(launches), tasks, start_next, tell if by_slice else None)
        verdict = judge_gang(ends, {key: HostEvidence() for key in ends})
        if verdict.cause is not None:
            for key in tasks.keys() - {verdict.cause}:
                tasks[key].kill()
            tasks[verdict.cause].process.wait(min(request.exit_grace, FAILED_EXIT_S))
            where = f"{place.in_words(verdict.cause)}: {getattr(verdict.result, 'error', '')}"
            raise _as_of_a_cluster(failure_error(request.spec.name, request.spec.job_id, where, verdict.result))
        deadline = time.monotonic() + request.exit_grace
        for task in tasks.values():
            task.process.wait(max(0.0, deadline - time.monotonic()))
    return [load(end.payload) for _, end in sorted(ends.items())]


def local_place(request: RunRequest) -> AttemptPlace:
    """Return a place for a gang, all of whose hosts are this machine."""
    spec = request.spec
    counts = spec.coscheduling.num_groups if spec.coscheduling else (1,)
    per_slice = spec.replicas * spec.processes_per_host
    fitting = [count for count in counts if count * per_slice <= MOST_AT_ONCE] or [min(counts)]
    slices = tuple(
        tuple(
            HostPlace(f"{slice_id}-{host}", ADDRESS, f"{spec.device}-{slice_id}", host) for host in range(spec.replicas)
        )
        for slice_id in range(max(fitting))
    )
    bundle, per_host = {TPU: spec.resources[TPU]}, spec.processes_per_host
    return AttemptPlace(AttemptOrder(AttemptId(spec.job_id, 1), slices, bundle, 0, 0, processes_per_host=per_host))


class LocalTask:
    """One task of a gang in a process of its own. This process prints its output, each line with the task's label."""

    def __init__(self, request: RunRequest, launch: TaskLaunch, run: LocalRun) -> None:
        self._index, self._run, self._label = launch.info.task_index, run, launch.label
        local_dir = run.local_dir(self._index)
        local_dir.mkdir()
        run.output_dir(self._index).mkdir()
        launch_file = run.launch_file(self._index)
        launch_file.write_bytes(pickle.dumps((launch.pickled_function, request.process.preload)))
        self.process = LocalProcess(
            "iris_ray.local.task_process",
            launch_file,
            _environment(request, replace(launch, info=replace(launch.info, local_dir=str(local_dir))), run),
            piped=True,
        )
        self._printer = threading.Thread(target=self._print, daemon=True)
        self._printer.start()

    def end(self) -> TaskEnd | None:
        """Return how the task has ended, or None while it runs."""
        code = self.process.exit_code()  # first, since a process that has ended has written its file
        with contextlib.suppress(FileNotFoundError):
            end: TaskEnd = pickle.loads(self._run.end_file(self._index).read_bytes())
            return end
        if code is None:
            return None
        return diagnose(ProcessExit(time.time(), self._run.files(self._index).started.exists(), False, code, None))

    def kill(self) -> None:
        """End the task's process, and what it owns."""
        self.process.kill()
        for left in end_owned(self._run.files(self._index)):
            print(f"iris_ray: {left} still runs", file=sys.stderr)

    def finish_printing(self) -> None:
        """Wait a moment until all output is printed. A process that outlives the task may keep its output open."""
        self._printer.join(LAST_LINES_S)

    def _print(self) -> None:
        assert self.process.output is not None
        is_read = True
        with self.process.output as lines:
            for line in lines:  # to the end, so that the task can write
                text = line.decode(errors="replace").rstrip("\n")
                try:
                    if is_read:
                        print_line(f"({self._label} pid={self.process.pid}) {text}")
                except BrokenPipeError:
                    is_read = False


@contextlib.contextmanager
def ended_at_last(tasks: Mapping[TaskKey, LocalTask], run: LocalRun) -> Iterator[None]:
    """End all tasks and what they have started at the end of the block, and print the rest of their output."""
    try:
        yield
    finally:
        for task in tasks.values():
            task.kill()
        stats = [task.process.stat for task in tasks.values()]
        if stats and stats[0] is not None:  # nothing of the run is older than its first task
            started = ProcessTree(stats[0].identity, str(run.directory), variable=LocalRun.VARIABLE)
            for left in end_processes(started.search(), started.search):
                print(f"iris_ray: {left} still runs", file=sys.stderr)
        for task in tasks.values():
            task.finish_printing()


def _launches(request: RunRequest, place: AttemptPlace) -> dict[TaskKey, TaskLaunch]:
    ports: dict[str, list[tuple[int, ...]]] = {name: [] for name in place.names}
    used: set[int] = set()
    for key in place.tasks():
        held = hold_ports(ADDRESS, PORTS_HELD, used)  # a few at a time: a process may have 1,024 open files
        ports[place.name(key)].append(tuple(one.getsockname()[1] for one in held))
        used.update(ports[place.name(key)][-1])
        for one in held:
            one.close()
    launches: dict[str, list[TaskLaunch]] = {}
    for gang in _gangs(place, request.spec):
        launches |= launch_plan(request, gang, ports)
    return {key: launches[place.name(key)][place.process(key)] for key in place.tasks()}


def _gangs(place: AttemptPlace, spec: JobSpec) -> Iterator[AttemptPlace]:
    """Yield the place of each gang of a job: of the whole job, or of each slice."""
    if spec.is_one_gang:
        yield place
        return
    for number, hosts in enumerate(place.order.slices):
        attempt = place.order.attempt._replace(gang=number)
        yield AttemptPlace(replace(place.order, attempt=attempt, slices=(hosts,)))


def _environment(request: RunRequest, launch: TaskLaunch, run: LocalRun) -> dict[str, str]:
    user, inherited = request.process.runtime_env.get("env_vars", {}) | launch.env, ON_CPU | os.environ
    changes = task_environment(
        inherited, {}, user, launch.info, launch.multislice, launch.num_cpus, 0.0, launch.tpu_process
    )
    files = run.files(launch.info.task_index)
    ours = {LocalRun.VARIABLE: str(run.directory), TaskFiles.VARIABLE: files.prefix, MODE.name: ModeKind.SIMPLE.value}
    ours[OUTPUT_DIR] = str(run.output_dir(launch.info.task_index))
    environ = inherited | changes | ours | {name: kept_in_memory(text) for name, text in launch.secret_files.items()}
    return {name: value for name, value in environ.items() if value is not None}


def _wait(
    count: int,
    tasks: Mapping[TaskKey, LocalTask],
    start_next: Callable[[int], None],
    tell: Callable[[Mapping[TaskKey, TaskEnd]], None] | None,
) -> dict[TaskKey, TaskEnd]:
    """Return the ends of all tasks, or of those that have ended when one has failed.

    Args:
        count: how many tasks there are in all.
        tasks: those that were started.
        start_next: starts more of them, given how many run.
        tell: hears of each end.
    """
    heard, ends = 0, dict[TaskKey, TaskEnd]()
    while True:
        start_next(len(tasks) - len(ends))
        running = [(key, task) for key, task in tasks.items() if key not in ends]
        ends |= {key: end for key, task in running if (end := task.end()) is not None}
        if len(ends) == count or any(end.kind is not EndKind.RETURNED for end in ends.values()):
            return ends
        if tell is not None and len(ends) > heard:
            heard = len(ends)
            tell(ends)
        time.sleep(POLL_S)


def _as_of_a_cluster(error: Exception) -> BaseException:
    """Return the error as Ray gives it to callers, as an instance of the user's exception, too."""
    if not isinstance(error, RayTaskError):
        return error
    travelled: RayTaskError = pickle.loads(pickle.dumps(error))
    rebuilt: BaseException = travelled.as_instanceof_cause()
    return callers_error(rebuilt)


def _say(request: RunRequest, place: AttemptPlace) -> None:
    count = place.num_ranks
    turns = f", {MOST_AT_ONCE} at a time: tasks that wait for each other don't end" * (count > MOST_AT_ONCE)
    print(f"iris_ray: {request.spec.job_id} runs in {count} local process{'es' * (count > 1)}{turns}", file=sys.stderr)
    parts = [part for part in request.process.runtime_env if part != "env_vars" and not part.startswith("_")]
    if parts:  # on a cluster Ray would set these up
        print(
            f"iris_ray: {', '.join(parts)} of the runtime_env left out: the tasks use the packages of this machine",
            file=sys.stderr,
        )
