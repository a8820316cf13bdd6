"""A pool's connection to the cluster's Controller: find it, start it if none runs, and ask it."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

import iris_ray
from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Actor
from iris_ray.actors.calls.asking_again import ask_again
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface, Question, ReportedEvent
from iris_ray.actors.protocol.messages import JobView, PoolProcess
from iris_ray.actors.protocol.version import NO_VERSIONS, VERSIONS_DO_NOT_FIT, require_fitting_controller
from iris_ray.errors import ControllerUnavailableError, DeposedError, UnknownRecordError, VersionMismatchError

START_TIMEOUT_S = 120.0
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
    """

    def __init__(self, sender: PoolProcess) -> None:
        self.sender = sender
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
                controller = Actor[ControllerInterface](await get_or_start_controller(), "the Controller")
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
        answer = await ask_again(
            lambda: self._ask_within(PATIENT_ANSWER_TIMEOUT_S, question, *args, **kwargs), within_s=AWAY_S
        )
        if isinstance(answer, Unreachable):
            raise ControllerUnavailableError(f"{answer.reason}; nothing can go on without it")
        return answer

    async def ask_once(self, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | Unreachable:
        """Return the Controller's answer, or `Unreachable`. Raise like `connect` if it has never met a Controller."""
        return await self._ask_within(ANSWER_TIMEOUT_S, question, *args, **kwargs)

    async def report(self, job_id: str | None, events: Sequence[ReportedEvent], gang: int = 0) -> JobView | None:
        """Report events of this process. Return the state of a gang of the job. Raise like `ask`."""
        return await self.ask(ControllerInterface.report, job_id, list(events), gang, self.sender)

    async def _ask_within(
        self, deadline_s: float, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | Unreachable:
        try:
            controller = await self.connect()
        except (ControllerUnavailableError, VersionMismatchError) as error:
            if not self._has_met_one:
                raise
            return Unreachable(str(error))  # it may be restarting
        try:
            reply = await controller.ask_within(deadline_s, question, *args, **kwargs)
        except (DeposedError, UnknownRecordError, ControllerUnavailableError) as error:
            reply = Unreachable(str(error))  # another Controller may answer
        if isinstance(reply, Unreachable) and self._controller is controller:
            self._controller = None  # it may have been replaced, so look it up before the next question
        return reply


async def get_or_start_controller() -> ActorHandle:
    """Return the Controller's handle. The first caller starts it; concurrent callers get the same one.

    Raises:
        ControllerUnavailableError: it could not be started; the message has the end of its output.
        VersionMismatchError: the iris_ray that is installed on the head does not go with this one.
    """
    try:
        return await asyncio.to_thread(ray.get_actor, CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        pass
    address = ray.get_runtime_context().gcs_address
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "iris_ray.actors.controller.bootstrap", address,
        env=bootstrap_environment(os.environ), cwd="/",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            output, _ = await starter.communicate()
    except TimeoutError:
        starter.kill()
        raise ControllerUnavailableError(
            f"the cluster's Controller did not start within {START_TIMEOUT_S:g} s"
        ) from None
    if starter.returncode != 0:
        last = output.decode(errors="replace").strip()[-2000:]
        if starter.returncode == VERSIONS_DO_NOT_FIT:
            raise VersionMismatchError(last)
        raise ControllerUnavailableError(f"the cluster's Controller did not start:\n{last}")
    return await asyncio.to_thread(ray.get_actor, CONTROLLER_NAME, NAMESPACE)
