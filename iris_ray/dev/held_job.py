"""The job that holds slices for a person: its tasks, how it is found by its name, and the way to its hosts."""

import contextlib
import functools
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import iris_ray
from iris_ray.actors.protocol.task_files import write_whole
from iris_ray.client.connection import current_user
from iris_ray.dev.warm_process import HeldDirectory
from iris_ray.errors import ControllerUnavailableError, InvalidRequestError, TaskNotRunningError, TaskSetupError
from iris_ray.model.checks import part_of_id, unknown
from iris_ray.model.options import JobOptions

if TYPE_CHECKING:  # they import Ray, which takes longer than a whole run on hosts that are known
    from iris_ray.actors.protocol.status import JobStatus
    from iris_ray.terminal import LiveLine

IDLE_S, MOST_S = 3600.0, 12 * 3600.0
"""The defaults for the time without a run after which slices are given back, and for the time in all; seconds."""
PREFIX = "dev-"
"""The beginning of the names of held jobs."""
LOOK_S = 1.0
"""The interval between two checks of a task whether its host is used; seconds."""
END_S = 5.0
"""The time that a run has to end when its host is given back; seconds."""
POLL_S = 0.3
MOVES_S = 30.0
"""The time after which the cluster knows that a job has lost its hosts; seconds."""


@dataclass(frozen=True, slots=True)
class HeldHost:
    """The way to one held host, or to one of the processes of a host that has several.

    Attributes:
        index: of its task.
        label: its name for people.
        address, port, token: of its warm process.
    """

    index: int
    label: str
    address: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Held:
    """A held job whose hosts all wait for runs.

    Attributes:
        name: as the person has called it.
        cluster: the address by which it was found.
        job_id: of the job.
        hosts: in the order of the tasks.
    """

    name: str
    cluster: str
    job_id: str
    hosts: tuple[HeldHost, ...]


# -- on a held host ----------------------------------------------------------------------------------------------------


def hold(idle_s: float, most_s: float, preload: Sequence[str]) -> None:
    """Hold this host until nobody has used it for long; the function of the job's tasks."""
    import ray

    from iris_ray.endpoints.task import register_endpoint
    from iris_ray.task.job_info import get_job_info
    from iris_ray.task.preemption import known_notice

    me = get_job_info()
    assert me is not None
    began = time.monotonic()
    before: float | None = None  # seconds in earlier attempts
    path = Path(me.local_dir) / f"dev-{me.local_index}"  # an attempt that was killed here has left its copy of the code
    with (
        _new_directory(path) as directory,
        warm_process(directory, ray.util.get_node_ip_address(), preload) as (warm, facts),
    ):
        several = f" process {me.local_index}" if me.processes_per_host > 1 else ""
        host = HeldHost(me.task_index, f"{me.slice_name}/{me.worker_id}{several}", **facts)
        register_endpoint(f"{PREFIX}{me.task_index}", json.dumps(asdict(host)))
        directory.used.touch()  # to import modules ahead is no idle time
        while warm.poll() is None:
            time.sleep(LOOK_S)
            with directory.taken() as is_free:
                idle_for = time.time() - directory.used.stat().st_mtime if is_free else 0.0
            if is_free and known_notice() is not None:
                sys.exit(0)  # nothing is lost, so the gang may move at once
            if idle_for > idle_s:
                return _give_back(directory, f"nothing has run on it for {idle_s / 60:g} minutes")
            if before is None:
                before = _held_before(me.job_id, me.task_index // me.processes_per_host)
            if (before or 0.0) + time.monotonic() - began > most_s:
                return _give_back(directory, f"it was held for {most_s / 3600:g} hours, as long as it may be")
    raise RuntimeError(f"the process that waits for runs has ended with code {warm.returncode}")


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[HeldDirectory]:
    """Make the directory of a held host, in place of an older one. Remove it at the end of the block."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    directory = HeldDirectory(path)
    directory.used.touch()
    try:
        yield directory
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _give_back(directory: HeldDirectory, why: str) -> None:
    print(f"iris_ray: the slice is given back: {why}", flush=True)
    with contextlib.suppress(OSError):  # on a full disk the file is there without the reason
        directory.over.write_text(why)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        with directory.taken() as is_free:
            if is_free:
                return
        time.sleep(POLL_S)


def _held_before(job_id: str, task_index: int) -> float | None:
    """Return the seconds from the job's first start to that of this attempt, as far as the Controller remembers.

    Both are by the Controller's clock, which may differ from that of this host. Return None if the Controller has not
    heard yet that the attempt runs.
    """
    from iris_ray.actors.calls.controller_connection import ControllerConnection
    from iris_ray.actors.protocol.controller_interface import ControllerInterface

    with contextlib.suppress(ControllerUnavailableError):
        task = ControllerConnection().ask(ControllerInterface.task_status, job_id, task_index)
        if task.started_at is None:
            return None
        starts = (one.started_at for one in task.attempts if one.started_at is not None)
        return task.started_at - min(starts, default=task.started_at)
    return 0.0


@contextlib.contextmanager
def warm_process(
    directory: HeldDirectory, address: str, preload: Sequence[str]
) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """Run the process that waits on a host within the block. Yield it and the way to it.

    Raises:
        TaskSetupError: it does not start.
    """
    token = secrets.token_hex(16)
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    environ = os.environ | {"PATH": os.pathsep.join(folders)}  # `python` is that of the task
    home = Path(iris_ray.__file__).parents[1]
    if home.name != "site-packages":
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-P", "-m", "iris_ray.dev.warm_process"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as warm:
        assert warm.stdin is not None
        assert warm.stdout is not None
        try:
            asked = {"address": address, "token": token, "directory": str(directory.path), "preload": list(preload)}
            with warm.stdin:
                warm.stdin.write(json.dumps(asked) + "\n")
            if not (answer := warm.stdout.readline()):
                raise TaskSetupError(f"the process that waits for runs does not start (code {warm.wait()})")
            facts = json.loads(answer)
            for problem in facts.pop("problems"):
                print(f"iris_ray: {problem}", flush=True)
            yield warm, facts | {"address": address, "token": token}
        finally:
            warm.kill()


# -- for the person ----------------------------------------------------------------------------------------------------


def submit(
    name: str, tpu_type: str, num_slices: int | list[int], idle_s: float, most_s: float, preload: Sequence[str],
    options: dict[str, Any],
) -> str:  # fmt: skip
    """Put a job that holds slices into the queue. Return its id.

    Raises:
        InvalidRequestError: this user has one of that name, or something can't work as written.
    """
    from iris_ray.client.client import IrisClient
    from iris_ray.model.job_spec import CoschedulingConfig
    from iris_ray.model.requirement import ResourceSpec, tpu_device
    from iris_ray.model.workers import TPU_NAME

    with contextlib.suppress(ControllerUnavailableError):  # the cluster's first job starts one
        _require_free(_of_name(name), name)
    job = IrisClient().submit(
        functools.partial(hold, idle_s, most_s, tuple(preload)),
        PREFIX + name,
        resources=ResourceSpec(device=tpu_device(tpu_type)),
        coscheduling=CoschedulingConfig(TPU_NAME, num_slices),
        detached=True,
        **cast(JobOptions, {"max_retries_failure": 3, "stall_timeout": 0.0, "exit_grace": END_S} | options),
    )
    holds = _of_name(name)
    if holds and holds[0].job_id != job.job_id:  # two at the same moment
        job.cancel()
        _require_free(holds, name)
    return job.job_id


def _require_free(jobs: Sequence["JobStatus"], name: str) -> None:
    if jobs:
        raise InvalidRequestError(
            f"you hold {name} already: {jobs[0].job_id}, {jobs[0].state.value}; use it (iris-ray dev run {name} -- …),"
            f" give it back (iris-ray dev stop {name}), or choose another --name"
        )


def all_held() -> list["JobStatus"]:
    """Return the held jobs of this user, the oldest first."""
    from iris_ray.actors.calls.controller_connection import ControllerConnection
    from iris_ray.actors.protocol.controller_interface import ControllerInterface

    user, jobs = current_user(), ControllerConnection().ask_all(ControllerInterface.list_jobs)
    return [job for job in jobs if job.user == user and job.name.startswith(PREFIX) and not job.state.finished]


def _of_name(name: str) -> list["JobStatus"]:
    return [job for job in all_held() if job.name == PREFIX + name]


def find(name: str) -> "JobStatus":
    """Return the held job of a name.

    Raises:
        UnknownNameError: this user holds none; the message has the names of their held jobs.
    """
    jobs = all_held()
    found = [job for job in jobs if job.name == PREFIX + name]
    if not found:
        raise unknown("held job of yours", name, [job.name.removeprefix(PREFIX) for job in jobs])
    return found[0]


def wait_for_hosts(name: str, cluster: str, job_id: str, line: "LiveLine", but: Held | None = None) -> Held:
    """Wait until all hosts of a held job wait for runs. Return the way to them, and remember it.

    Args:
        name, cluster, job_id: as in `Held`.
        line: says how it stands meanwhile.
        but: hosts that can't be reached: for `MOVES_S`, this waits for other hosts.

    Raises:
        TaskNotRunningError: the job has ended; the message says how.
    """
    from iris_ray.actors.calls.controller_connection import ControllerConnection
    from iris_ray.actors.protocol.controller_interface import ControllerInterface
    from iris_ray.client.job_progress import job_in_words
    from iris_ray.endpoints.task import endpoints_of

    controller, until = ControllerConnection(), time.monotonic() + MOVES_S
    while True:
        job = controller.ask(ControllerInterface.job_status, job_id)
        if job.state.finished:
            raise TaskNotRunningError(f"{job_id} has ended: {job.explanation}; hold another: iris-ray dev --help")
        facts = endpoints_of(job_id, PREFIX).values()
        hosts = tuple(sorted((HeldHost(**json.loads(one)) for one in facts), key=lambda host: host.index))
        count = sum(job.tasks.values()) * job.processes_per_host
        if len(hosts) == count and (but is None or hosts != but.hosts or time.monotonic() > until):
            held = Held(name, cluster, job_id, hosts)
            remember(held)
            return held
        line.show(job_in_words(job) if len(hosts) < count else "its hosts do not answer; it will have others")
        time.sleep(POLL_S)


# -- the way to the hosts, in a file -----------------------------------------------------------------------------------


def remembered(name: str, cluster: str) -> Held | None:
    """Return the way to a held job's hosts as it was the last time; None if it is not known."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(_file(name, cluster).read_text())
        return Held(name, cluster, found["job_id"], tuple(HeldHost(**host) for host in found["hosts"]))
    return None


def forget(name: str, cluster: str) -> None:
    """Forget the way to a held job's hosts."""
    _file(name, cluster).unlink(missing_ok=True)


def remember(held: Held) -> None:
    """Keep the way to a held job's hosts for the next run."""
    file = _file(held.name, held.cluster)
    with contextlib.suppress(OSError):  # the next run asks the cluster again
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, json.dumps({"job_id": held.job_id, "hosts": [asdict(host) for host in held.hosts]}).encode())


def _file(name: str, cluster: str) -> Path:
    """Return the file of a held job. It has tokens, so it lies in a directory that only this account can open."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iris_ray" / "dev"
    whose = hashlib.sha256(f"{current_user()} {cluster}".encode()).hexdigest()[:16]
    return home / f"{part_of_id(name)}-{whose}.json"
