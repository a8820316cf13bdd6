"""Tasks in containers: the arguments and environment of `docker run`, the engine, the container's record and run."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from types import FrameType

from iris_ray.actors.host.exit_status import ProgramExit, in_words
from iris_ray.actors.protocol.task_files import OUTPUT_DIR, TaskFiles, write_whole
from iris_ray.docker.core import CONTAINER_LABEL, ContainerSpec, container_name
from iris_ray.errors import ContainerEngineError
from iris_ray.model.job_info import JobInfo, job_info_of
from iris_ray.model.multislice import MEGASCALE_PREFIX
from iris_ray.model.outcomes import EndKind
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.settings import CONTAINER_ENGINE

_OF_THE_HOST = ("TPU_", MEGASCALE_PREFIX)
_OF_THE_HOST_TOO = ("CLOUD_TPU_TASK_ID", "JAX_PLATFORMS", "PJRT_DEVICE")
"""Prefixes and names of the variables that describe a task's chips and slice."""

_CHANGES_THE_CLIENT = ("LD_", "XDG_", "CONTAINERS_", "STORAGE_", "PODMAN_", "SSL_CERT_")
_CHANGES_THE_CLIENT_TOO = frozenset(
    {
        *("PATH", "HOME", "TMPDIR", "NOTIFY_SOCKET", "REGISTRY_AUTH_FILE"),
        *("CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINER_SSHKEY"),
        *("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS", "DOCKER_TLS_VERIFY"),
        *("DOCKER_API_VERSION", "DOCKER_CONTENT_TRUST", "DOCKER_CONTENT_TRUST_SERVER", "DOCKER_DEFAULT_PLATFORM"),
        *("GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK"),
    }
)


def container_environment(
    environ: Mapping[str, str], spec: ContainerSpec, task: JobInfo, secrets: str | None = None
) -> dict[str, str]:
    """Return the variables of the container.

    The user's variables override those that describe the host's chips. Variables that identify the task and the
    attempt's ``MEGASCALE_*`` variables override the user's. On a single slice all ``MEGASCALE_*`` variables are left
    out, the user's included.

    Args:
        environ: the environment of the task's process.
        spec: the user's container.
        task: the task's place in its gang.
        secrets: the directory with the files of the user's secrets; None without any.
    """
    told = {name: v for name, v in environ.items() if name.startswith(_OF_THE_HOST) or name in _OF_THE_HOST_TOO}
    megascale = {name: value for name, value in told.items() if name.startswith(MEGASCALE_PREFIX)}
    user = {name: v for name, v in spec.env.items() if megascale or not name.startswith(MEGASCALE_PREFIX)}
    marks = {name: environ[name] for name in (TOKEN_VARIABLE, TaskFiles.VARIABLE, OUTPUT_DIR) if name in environ}
    files = {name: f"{secrets}/{name}" for name in spec.secrets}
    return {"PYTHONUNBUFFERED": "1"} | told | user | files | megascale | task.to_env() | marks


def run_arguments(
    name: str, spec: ContainerSpec, variables: Mapping[str, str], task: JobInfo, secrets: str | None = None
) -> list[str]:
    """Return the arguments with which the engine's client runs a container in the foreground.

    The user's options come after ours, and so override them.
    """
    ours = ["--privileged", "--net=host", "--ipc=host", f"--name={name}", f"--label={CONTAINER_LABEL}={name}"]
    mounts = [f"--volume={path}:{path}" for path in _directories(variables, task)]
    mounts += [f"--volume={secrets}:{secrets}:ro"] if secrets else []
    env = [f"--env={n}={v}" if changes_the_client(n) else f"--env={n}" for n, v in sorted(variables.items())]
    return ["run", *ours, *mounts, *env, *spec.options, spec.image, *spec.command]


def client_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the engine's client: this process's own, and the variables to pass on."""
    return dict(environ) | {name: value for name, value in variables.items() if not changes_the_client(name)}


def changes_the_client(name: str) -> bool:
    """Return whether a variable changes what the engine's client does, such as which daemon it talks to."""
    return name.startswith(_CHANGES_THE_CLIENT) or name in _CHANGES_THE_CLIENT_TOO


def _directories(variables: Mapping[str, str], task: JobInfo) -> list[str]:
    """Return the directories to mount: of the task's files and its output, and the job's own with its token."""
    parts = variables.get(TaskFiles.VARIABLE), task.local_dir
    mounted = [str(Path(part).parent) for part in parts if part]
    return list(dict.fromkeys([*mounted, *filter(None, [variables.get(OUTPUT_DIR)])]))


# -- engine ------------------------------------------------------------------------------------------------------------

KNOWN = ("docker", "podman")
"""Tried in this order where the host's environment names no engine, by its command or path."""

ANSWER_S, LEAST_ANSWER_S = 30.0, 1.0
"""The limit for the time in which an engine answers, and the time that it gets even if its caller has less left."""
REMOVAL_S = 120.0
"""The time in which a killed container has to be gone: the kernel may have much memory to free."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container.

    Attributes:
        status: such as ``"created"``, ``"running"``, ``"exited"``.
        exit_code: of its program; 128 plus the signal's number if a signal killed it.
        out_of_memory: whether the kernel killed it for lack of memory.
    """

    status: str
    exit_code: int
    out_of_memory: bool


class ContainerEngine:
    """A container engine of this host, docker or podman, by the path of its command."""

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def problem(self) -> str | None:
        """Return why this engine can't run containers, in its own words; None if it can."""
        code, said = self._ask("version")
        return None if code == 0 else said or f"its exit code is {code}"

    def run(self, arguments: list[str], environ: Mapping[str, str]) -> int:
        """Run the engine's client until it ends, and return its exit code. It prints where this process prints."""
        return subprocess.run([self.path, *arguments], env=environ, stdin=subprocess.DEVNULL, check=False).returncode

    def state(self, name: str) -> ContainerState | None:
        """Return the state of a container; None if there is none or the engine does not answer."""
        form = "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}"
        code, said = self._ask("container", "inspect", f"--format={form}", name)
        try:
            status, exit_code, out_of_memory = said.split()
            return ContainerState(status, int(exit_code), out_of_memory == "true") if code == 0 else None
        except ValueError:
            return None

    def terminate(self, name: str) -> bool:
        """Send SIGTERM to a container's program; return whether it runs."""
        return self._ask("kill", "--signal=TERM", name)[0] == 0

    def remove(self, name: str, timeout_s: float = REMOVAL_S) -> str | None:
        """Kill a container if it runs, and remove it. Block until it is gone.

        Returns:
            None once it is gone, or why it may still be there after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while (problem := self._removed_now(name, deadline)) is not None:
            if time.monotonic() > deadline:
                return problem
            time.sleep(POLL_S)
        return None

    def _removed_now(self, name: str, deadline: float) -> str | None:
        code, found = self._ask("ps", "--all", "--quiet", f"--filter=label={CONTAINER_LABEL}={name}", by=deadline)
        if code != 0:
            return found or f"{self.name} does not answer"
        if not found:
            return None
        self._ask("kill", name, by=deadline)  # without it, podman would send a SIGTERM and wait
        self._ask("rm", "--force", "--volumes", name, by=deadline)
        return f"{self.name} has not removed it"

    def _ask(self, *arguments: str, by: float = math.inf) -> tuple[int, str]:
        """Run a command of the engine. Return its exit code and its output, or its errors if it fails.

        The exit code is -1 if the engine does not answer, within `ANSWER_S` or until the time ``by``.
        """
        within_s = min(ANSWER_S, max(LEAST_ANSWER_S, by - time.monotonic()))
        try:
            done = subprocess.run(
                [self.path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=within_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return -1, str(error)
        said = done.stderr if done.returncode else done.stdout
        return done.returncode, said.decode(errors="replace").strip()


def find_engine(environ: Mapping[str, str] = os.environ) -> ContainerEngine:
    """Return the first engine of this host that answers.

    Raises:
        ContainerEngineError: none does; the message says why, for each.
    """
    wanted = CONTAINER_ENGINE.read(environ)
    problems = []
    for command in (wanted,) if wanted else KNOWN:
        path = shutil.which(command)
        problem = "there is no such command" if path is None else ContainerEngine(path).problem()
        if path is not None and problem is None:
            return ContainerEngine(path)
        problems.append(f"{command}: {problem}")
    raise ContainerEngineError(
        f"no container engine answers on this host ({'; '.join(problems)}). Install docker or podman there and let the"
        f" user of Ray use it; {CONTAINER_ENGINE.name} names another one"
    )


# -- record ------------------------------------------------------------------------------------------------------------


OWNER = "docker"
MEMORY, SECRETS = "/dev/shm", "iris-ray-secrets-"
"""Where the secrets of containers are: directories that only the account of Ray, and root, can enter. An engine's
daemon can't mount the anonymous files that other tasks get."""


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    """The container of a task, recorded among the files of the task's process before the container starts.

    A container isn't a child of the task's process, so it would outlive the task. The record lets the TPUHostActor, the
    reaper and the next actor on the host end the container together with the task's processes.

    Attributes:
        engine: the path of its engine's command.
        name: its name.
        secrets: the directory in memory with the files of its secrets; None without any.
    """

    engine: str
    name: str
    secrets: str | None = None

    def write(self, files: TaskFiles) -> None:
        files.all_owned.mkdir(exist_ok=True)
        write_whole(files.owned(OWNER), json.dumps(asdict(self)).encode())

    @staticmethod
    def read(files: TaskFiles) -> "ContainerRecord | None":
        """Return the container of a task; None if it has none.

        Raises:
            OSError: the disk can't read the record for now. The container may run.
        """
        try:
            found = json.loads(files.owned(OWNER).read_text())
            secrets = found.get("secrets")
            return ContainerRecord(str(found["engine"]), str(found["name"]), secrets and str(secrets))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None


def end_container(files: TaskFiles, timeout_s: float = REMOVAL_S) -> list[str]:
    """End the container of a task and remove it and its secrets, if it has one. Block until it is gone.

    Returns:
        The container if it still runs after ``timeout_s`` seconds, as ``container <name> (<why>)``; or its secrets, if
        they can't be removed.

    Raises:
        OSError: as `ContainerRecord.read`.
    """
    record = ContainerRecord.read(files)
    if record is None:
        return []
    problem = ContainerEngine(record.engine).remove(record.name, timeout_s)
    if problem is not None:
        return [f"container {record.name} ({problem})"]
    if record.secrets is not None and os.path.normpath(record.secrets).startswith(f"{MEMORY}/{SECRETS}"):
        try:
            shutil.rmtree(record.secrets)
        except FileNotFoundError:
            pass
        except OSError as error:
            return [f"the secrets of container {record.name} ({error})"]
    with contextlib.suppress(OSError):
        files.owned(OWNER).unlink(missing_ok=True)
    return []


# -- run ---------------------------------------------------------------------------------------------------------------

BY_SIGTERM = 128 + signal.SIGTERM
AGAIN_S = 0.5
"""The pause before another SIGTERM to a container that does not run yet."""
KEPT_S = 5.0
"""The time by which removing an ended container may delay the task's result. After that, the host removes it."""


def run_in_container(spec: ContainerSpec) -> None:
    """Run a program in a container until it ends, in place of a user's function. SIGTERM and notices reach it.

    Raises:
        ContainerEngineError: no container engine answers on this host.
        ProgramExit: the program has failed, or it has ended after a notice.
    """
    task, files = job_info_of(os.environ), TaskFiles.of_this_task()
    assert task is not None, "runs in a task"
    assert files is not None, "which has its files"
    engine, name = find_engine(), container_name(task)
    texts = {variable: Path(os.environ[variable]).read_bytes() for variable in spec.secrets}
    secrets = f"{MEMORY}/{SECRETS}{token_hex(8)}" if texts else None
    ContainerRecord(engine.path, name, secrets).write(files)
    if secrets is not None:
        os.mkdir(secrets, 0o700)
    for variable, text in texts.items():
        _write_secret(f"{secrets}/{variable}", text)
    variables = container_environment(os.environ, spec, task, secrets)
    relay = _SigtermRelay(engine, name, files)
    arguments = run_arguments(name, spec, variables, task, secrets)
    try:
        code = engine.run(arguments, client_environment(os.environ, variables))
    finally:
        relay.end()
    state = engine.state(name)
    end_container(files, KEPT_S)
    end = container_exit(engine.name, code, state)
    if os.path.exists(files.notice) and end.code in (0, BY_SIGTERM):
        raise ProgramExit(0, "the container ended after a notice")  # like a function that calls sys.exit()
    if end.code:
        raise end


def _write_secret(path: str, text: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    with open(file, "wb") as opened:
        opened.write(text)


def container_exit(engine: str, client_code: int, state: ContainerState | None) -> ProgramExit:
    """Return how a container has ended.

    Args:
        engine: the engine's name.
        client_code: exit code of the engine's client, or the negative number of the signal that killed it.
        state: the state of the container, if the engine knows it.
    """
    if state is None or state.status in ("created", "configured", "initialized"):
        code = client_code if client_code > 0 else 125
        return ProgramExit(code, f"{engine} could not start the container, or lost it; the task's output says why")
    if state.status not in ("exited", "dead", "stopped", "removing"):
        code = client_code if client_code > 0 else 1
        return ProgramExit(code, f"{engine}'s client {in_words(client_code)} though its container was {state.status}")
    if state.out_of_memory:
        why = "the kernel killed the container's program, because memory was used up"
        return ProgramExit(state.exit_code or 1, why, EndKind.OUT_OF_MEMORY)
    if 128 < state.exit_code <= 128 + signal.NSIG:
        how = in_words(128 - state.exit_code)
        return ProgramExit(state.exit_code, f"the container's program {how}", EndKind.CRASHED)
    return ProgramExit(state.exit_code, f"the container's program {in_words(state.exit_code)}")


class _SigtermRelay:
    """Passes each SIGTERM of this process on to the container, as soon as the container runs.

    A notice comes with a SIGTERM. If that came before this handler was installed, the notice's file shows it.
    The thread that passes them on starts before the container: a full process table would refuse it later.

    Raises:
        ContainerEngineError: the host has no room for a thread.
    """

    def __init__(self, engine: ContainerEngine, name: str, files: TaskFiles) -> None:
        self._engine = engine
        self._name = name
        self._files = files
        self._told = False
        self._over = threading.Event()
        self._wanted: SimpleQueue[bool] = SimpleQueue()
        try:
            threading.Thread(target=self._pass_on, daemon=True).start()
        except RuntimeError as error:
            raise ContainerEngineError(f"this host can't start another thread for a container: {error}") from None
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if os.path.exists(files.notice):
            self._on_sigterm()

    def _on_sigterm(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        if (has_notice := os.path.exists(self._files.notice)) and self._told:
            return
        self._told = has_notice
        self._wanted.put(True)

    def end(self) -> None:
        """Pass nothing on any more."""
        self._over.set()
        self._wanted.put(False)

    def _pass_on(self) -> None:
        while self._wanted.get():
            while not self._over.is_set() and not self._engine.terminate(self._name):
                self._over.wait(AGAIN_S)
