"""A pool's connection to the cluster's Controller: find it, start it if none runs, and ask it."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

import iris_ray
from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Actor
from iris_ray.actors.calls.asking_again import ask_again
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface, Question, ReportedEvent
from iris_ray.actors.protocol.marks import DEADLINE
from iris_ray.actors.protocol.messages import JobView, PoolProcess
from iris_ray.actors.protocol.version import NO_VERSIONS, VERSIONS_DO_NOT_FIT, require_fitting_controller
from iris_ray.errors import ControllerUnavailableError, DeposedError, UnknownRecordError, VersionMismatchError
from iris_ray.processes.identity import ProcessIdentity

START_TIMEOUT_S = 120.0
STARTED_POLL_S = 0.05
PATIENT_ANSWER_TIMEOUT_S = 10.0
AWAY_S = 20 * 60.0
"""The time that a pool waits for the Controller. An operator can end one that hangs, and no job is lost: jobs that wait
report twice a minute, and would end if the pool gave up."""

# What a plain Ray driver needs of its environment. Anything else may be a secret, or someone's runtime environment.
_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "RAY_AUTH_MODE",
              "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY",
              "RAY_TLS_CA_CERT")  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")


def bootstrap_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the process that starts the Controller: of the caller's only what Ray needs."""
    passed = {name: environ[name] for name in _PASSED_ON if name in environ}
    return passed | {"PYTHONPATH": str(Path(iris_ray.__file__).parents[1])}


class ControllerClient:
    """Asks the Controller for a pool. An unavailable Controller is asked again, so each question may arrive twice.

    Args:
        sender: the pool's process that asks.
        starter: a process of this machine that starts the Controller already, if the pool's caller has begun one.
    """

    def __init__(self, sender: PoolProcess, starter: ProcessIdentity | None = None) -> None:
        self.sender = sender
        self._starter = starter
        self._controller: Actor[ControllerInterface] | None = None
        self._has_met_one = False
        self._connecting = asyncio.Lock()

    async def connect(self) -> Actor[ControllerInterface]:
        """Find the Controller, or start it.

        Raises:
            ControllerUnavailableError: it could not be started; the message has the end of its output.
            VersionMismatchError: its version speaks another protocol.
        """
        async with self._connecting:
            if self._controller is None:
                controller = Actor[ControllerInterface](await get_or_start_controller(self._starter), "the Controller")
                if not await self._is_understood(controller):
                    return controller
                self._controller, self._has_met_one = controller, True
            return self._controller

    async def _is_understood(self, controller: Actor[ControllerInterface]) -> bool:
        """Return False if it does not answer yet. Raise VersionMismatchError if it speaks another protocol."""
        if not hasattr(controller.handle, "versions"):
            require_fitting_controller(NO_VERSIONS)
        reply = await controller.ask_once(ControllerInterface.versions)
        if isinstance(reply, Unreachable):
            return False
        require_fitting_controller(reply)
        return True

    async def ask(self, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the Controller's answer. Ask again while it is unavailable.

        Raises:
            ControllerUnavailableError: no answer within `AWAY_S`.
            SupersededError: a newer process of the pool has replaced this one.
        """
        return await self._ask_until_answered(
            lambda: self._ask_within(PATIENT_ANSWER_TIMEOUT_S, question, *args, **kwargs)
        )

    async def ask_once(self, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | Unreachable:
        """Return the Controller's answer, or `Unreachable`. Raise like `connect` if it has never met a Controller."""
        return await self._ask_within(getattr(question, DEADLINE, ANSWER_TIMEOUT_S), question, *args, **kwargs)

    async def report(self, job_id: str | None, events: Sequence[ReportedEvent], gang: int = 0) -> JobView | None:
        """Report events of this process. Return the state of a gang of the job. Raise like `ask`."""
        return await self._ask_until_answered(lambda: self._report_once(job_id, events, gang))

    async def _report_once(
        self, job_id: str | None, events: Sequence[ReportedEvent], gang: int
    ) -> JobView | Unreachable | None:
        """Report events, with the time of this try: `connect` may have waited for a Controller."""
        controller = await self._connected()
        if isinstance(controller, Unreachable):
            return controller
        message = job_id, list(events), gang, self.sender, time.time()
        return await self._ask_this(controller, PATIENT_ANSWER_TIMEOUT_S, ControllerInterface.report, *message)

    async def _ask_until_answered(self, ask: Callable[[], Awaitable[T | Unreachable]]) -> T:
        answer = await ask_again(ask, within_s=AWAY_S)
        if isinstance(answer, Unreachable):
            raise ControllerUnavailableError(
                f"{answer.reason}. Jobs can't be submitted or followed without it; try again later"
            )
        return answer

    async def _ask_within(
        self, deadline_s: float, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | Unreachable:
        controller = await self._connected()
        if isinstance(controller, Unreachable):
            return controller
        return await self._ask_this(controller, deadline_s, question, *args, **kwargs)

    async def _connected(self) -> Actor[ControllerInterface] | Unreachable:
        try:
            return await self.connect()
        except (ControllerUnavailableError, VersionMismatchError) as error:
            if not self._has_met_one:
                raise
            return Unreachable(str(error))  # it may be restarting

    async def _ask_this(
        self,
        controller: Actor[ControllerInterface],
        deadline_s: float,
        question: Question[P, T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T | Unreachable:
        try:
            reply = await controller.ask_within(deadline_s, question, *args, **kwargs)
        except (DeposedError, UnknownRecordError, ControllerUnavailableError) as error:
            reply = Unreachable(str(error))  # another Controller may answer
        if isinstance(reply, Unreachable) and self._controller is controller:
            self._controller = None  # it may have been replaced, so look it up before the next question
        return reply


def begin_to_start_controller() -> "subprocess.Popen[bytes] | None":
    """Begin to start the Controller, unless one runs. Return the process that starts it, at once.

    A failure is not reported: the pool then starts the Controller with `get_or_start_controller`, which raises it.
    """
    try:
        ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        command, options = _bootstrap()
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, **options, start_new_session=True)  # Ctrl-C is for the caller alone
    return None


def _bootstrap() -> tuple[list[str], dict[str, Any]]:
    """Return the command that starts the Controller, and the options of its process."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "iris_ray.actors.controller.bootstrap", address]
    return command, {"env": bootstrap_environment(os.environ), "cwd": "/", "stdin": subprocess.DEVNULL}


async def get_or_start_controller(starter: ProcessIdentity | None = None) -> ActorHandle:
    """Return the Controller's handle. The first caller starts it; concurrent callers get the same one.

    Args:
        starter: another process of this machine that starts it, for which this one waits.

    Raises:
        ControllerUnavailableError: it could not be started; the message has the end of its output.
        VersionMismatchError: the iris_ray that is installed on the head does not go with this one.
    """
    if starter is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                while starter.runs():
                    await asyncio.sleep(STARTED_POLL_S)
    try:
        return await asyncio.to_thread(ray.get_actor, CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        pass
    command, options = _bootstrap()
    own = await asyncio.create_subprocess_exec(
        *command, **options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            output, _ = await own.communicate()
    except TimeoutError:
        own.kill()
        raise ControllerUnavailableError(
            f"the cluster's Controller did not start within {START_TIMEOUT_S:g} s"
        ) from None
    if own.returncode != 0:
        last = output.decode(errors="replace").strip()[-2000:]
        if own.returncode == VERSIONS_DO_NOT_FIT:
            raise VersionMismatchError(last)
        raise ControllerUnavailableError(f"the cluster's Controller did not start:\n{last}")
    return await asyncio.to_thread(ray.get_actor, CONTROLLER_NAME, NAMESPACE)
