"""The process that runs the user's function: one or several per host and attempt, never used twice.

It is a fork of the host's zygote (`forked_task.py`), or an actor. It waits until the whole gang is ready, and has
imported only Ray and iris_ray, so that modules that read the environment at import see the task's variables. User code
runs in the main thread, where signals arrive.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from iris_ray.actors.calls.clocks import Moment
from iris_ray.actors.calls.ray_internals import label_output
from iris_ray.actors.host.chips import LockProbe, NotFree, describe, in_use, lock_file
from iris_ray.actors.host.directories import LocalDirectories, can_not_start, host_directory
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.redirect import redirect_output, wait_until_drained
from iris_ray.actors.host.task_environment import (
    PORTS_HELD,
    bind_to_cpus,
    expect_chips,
    hold_ports,
    kept_in_memory,
    raylet_environment,
    task_environment,
)
from iris_ray.actors.host.user_code import flush_output, import_all, run_exit_handlers, run_function
from iris_ray.actors.protocol.messages import ProcessReady, TaskLaunch
from iris_ray.actors.protocol.services import call_hooks, installed_services, variables_of
from iris_ray.actors.protocol.task_files import TaskFiles, print_stacks_when_asked, survive_notices
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.job_info import JobInfo
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.processes.tree import TOKEN_VARIABLE, mark_forks


class TaskProcess:
    """Waits for one task, runs it, and returns how it ended as a value. See `TaskInterface`.

    Args:
        address: the host's IP address.
        avoid_ports: ports that earlier attempts used.
        preload: modules to import while the process waits.
        directory: returns the host's directory.
        raylet: the variables of the host's raylet; None: look for them among the parents of this process.
    """

    def __init__(
        self,
        address: str,
        avoid_ports: Collection[int],
        preload: tuple[str, ...] = (),
        directory: Callable[[], Path] = host_directory,
        raylet: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._token = secrets.token_hex(8)
        self._mark = mark_forks(self._token)
        if preload:  # only for tasks with chips, and JAX reads its options when it is imported
            expect_chips(os.environ)
        self._error = import_all(preload)
        self._held = hold_ports(address, PORTS_HELD, avoid_ports)
        # Read now, so that the launch does not wait for it.
        self._of_the_raylet = raylet_environment() if raylet is None else raylet
        with contextlib.suppress(OSError):  # a host that has no directory says so when it watches this process
            files = TaskFiles.of_process(directory(), os.getpid())
            call_hooks((service.in_process for service in installed_services()), files)

    def versions(self) -> dict[str, Any]:
        return versions_here()

    def ready(self) -> ProcessReady:
        ports = tuple(held.getsockname()[1] for held in self._held)
        return ProcessReady(*ProcessIdentity.of_this_process(), self._token, ports, self._error)

    def run(self, launch: TaskLaunch) -> TaskEnd:
        if launch.info.slice_name and (not_free := self._chips_in_use(launch.info)):
            kind = EndKind.CHIPS_TAKEN if not_free.ours else EndKind.HOST_UNFIT
            return TaskEnd(kind, Moment.now(), error=not_free.why)
        try:
            files = TaskFiles.of_process(self._directory(), os.getpid())
            local_dir = self._take_local_directory(launch)
            survive_notices(files)  # before `redirect_output` marks the start: then the host may send signals
            print_stacks_when_asked(files)
            pipe = redirect_output(self._directory(), launch)
        except OSError as error:
            return TaskEnd(EndKind.HOST_UNFIT, Moment.now(), error=can_not_start(error))
        for held in self._held:
            held.close()
        bind_to_cpus(launch.info)
        self._set_environment(replace(launch, info=replace(launch.info, local_dir=local_dir)), files)
        if pipe is None:
            label_output(launch.label)
        end = run_function(launch.pickled_function, files)
        flush_output()
        if pipe is not None:
            wait_until_drained(pipe)
        return end

    def exit(self) -> None:
        try:
            run_exit_handlers()
        finally:
            ray.actor.exit_actor()

    def _take_local_directory(self, launch: TaskLaunch) -> str:
        if not launch.info.slice_name:  # other jobs use the host, too
            return ""
        self._local_directories = LocalDirectories.of_host(self._directory())  # an attribute keeps the directory's lock
        return str(self._local_directories.take(launch.info.job_id, launch.files_token))

    def _chips_in_use(self, info: JobInfo) -> NotFree | None:
        """Return the other process that holds this host's chips, in words; None, within 10 µs, without one."""
        self._probe = LockProbe(lock_file())  # an attribute keeps it open: closing it would drop libtpu's later lock
        pid = self._probe.holder()
        if pid is None:
            return None
        not_free = in_use(describe([pid], ProcessLedger(self._directory())))
        return None if not_free.ours and info.processes_per_host > 1 else not_free  # the gang's own, which was faster

    def _set_environment(self, launch: TaskLaunch, files: TaskFiles) -> None:
        changes = task_environment(
            os.environ,
            self._of_the_raylet,
            launch.env,
            launch.info,
            launch.multislice,
            launch.num_cpus,
            launch.num_gpus,
            launch.tpu_process,
        )
        for name, value in changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        os.environ |= {name: kept_in_memory(text) for name, text in launch.secret_files.items()}
        os.environ[TOKEN_VARIABLE] = self._token
        os.environ[TaskFiles.VARIABLE] = files.prefix
        os.environ |= variables_of((service.variables for service in installed_services()), files, launch.info)
        call_hooks((service.in_task for service in installed_services()), files)
