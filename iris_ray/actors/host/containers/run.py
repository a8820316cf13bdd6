"""What the process of a task runs in place of a user's function: a program in a container.

The engine's client runs as a child of this process, prints where it prints, and ends with the container.
"""

import os
import signal
import threading
from types import FrameType

from iris_ray.actors.host.containers.command import client_environment, container_environment, run_arguments
from iris_ray.actors.host.containers.engine import ContainerEngine, ContainerState, find_engine
from iris_ray.actors.host.containers.record import ContainerRecord, end_container
from iris_ray.actors.host.exits.program_exit import ProgramExit
from iris_ray.actors.host.exits.status import in_words
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.model.container import ContainerSpec, container_name
from iris_ray.model.job_info import job_info_of
from iris_ray.model.outcomes import EndKind

BY_SIGTERM = 128 + signal.SIGTERM
AGAIN_S = 0.5
"""Seconds after which a SIGTERM is passed on once more to a container that does not run yet."""
KEPT_S = 5.0
"""How long the removal of a container that has ended may delay the task's result; its host removes it otherwise."""


def run_in_container(spec: ContainerSpec) -> None:
    """Run a program in a container until it ends. SIGTERM reaches it, and so do notices, as files.

    Raises:
        ContainerEngineError: no container engine answers on this host.
        ProgramExit: the program has failed, or it has ended after a notice.
    """
    task, files = job_info_of(os.environ), TaskFiles.of_this_task()
    assert task is not None, "runs in a task"
    assert files is not None, "which has its files"
    engine, name = find_engine(), container_name(task)
    variables = container_environment(os.environ, spec, task)
    ContainerRecord(engine.path, name).write(files)
    relay = _SigtermRelay(engine, name, files)
    code = engine.run(run_arguments(name, spec, variables, task), client_environment(os.environ, variables))
    relay.over.set()
    state = engine.state(name)
    end_container(files, KEPT_S)
    end = container_exit(engine.name, code, state)
    if os.path.exists(files.notice) and end.code in (0, BY_SIGTERM):
        raise ProgramExit(0, "the container ended after a notice")  # as a function that calls sys.exit() then
    if end.code:
        raise end


def container_exit(engine: str, client_code: int, state: ContainerState | None) -> ProgramExit:
    """Return how a container has ended.

    Args:
        engine: the engine's name.
        client_code: how its client ended: an exit code, or the negative number of a signal.
        state: what the engine says about the container.
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
    """Passes each SIGTERM that this process gets on to the container, as soon as that runs.

    A notice comes with one. If it came before this process could listen, the notice itself tells.
    """

    def __init__(self, engine: ContainerEngine, name: str, files: TaskFiles) -> None:
        self._engine = engine
        self._name = name
        self._files = files
        self._told = False
        self.over = threading.Event()
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if os.path.exists(files.notice):
            self._on_sigterm()

    def _on_sigterm(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        if (has_notice := os.path.exists(self._files.notice)) and self._told:
            return
        self._told = has_notice
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        while not self.over.is_set() and not self._engine.terminate(self._name):
            self.over.wait(AGAIN_S)
