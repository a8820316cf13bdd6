"""A task's process as an actor of Ray, for what a fork can't be: GPUs, containers, and hooks of Ray's workers."""

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.clocks import Moment
from iris_ray.actors.protocol.host_interface import TaskInterface
from iris_ray.actors.protocol.messages import ProcessReady, TaskLaunch
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.processes.identity import ProcessIdentity


class ActorProcess:
    """The process of a `TaskProcess` actor; see `TaskRunner`.

    Args:
        handle: of the actor.
    """

    is_fork = False
    zygote_ended = False

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle
        self._actor = Actor[TaskInterface](handle)

    async def versions(self) -> dict[str, Any]:
        return await self._actor.call(TaskInterface.versions)

    async def ready(self) -> ProcessReady:
        return await self._actor.call(TaskInterface.ready)

    async def run(self, launch: TaskLaunch) -> TaskEnd | None:
        """Have it run a task. Ray does not notice its end as long as a forked child has copies of its connections."""
        try:
            return await self._actor.call(TaskInterface.run, launch)
        except RayTaskError as error:  # this process can't unpickle the answer
            return TaskEnd(EndKind.RAISED, Moment.now(), None, str(error.cause), str(error))
        except OutOfMemoryError:
            why = "the task process was killed by Ray, because the host's memory was nearly used up"
            return TaskEnd(EndKind.OUT_OF_MEMORY, Moment.now(), error=why)
        except RayError:
            return None

    def let_exit(self) -> None:
        self._actor.call(TaskInterface.exit)

    def kill(self) -> None:
        """Have Ray end it: Ray reports a death that it did not cause as a failure."""
        ray.kill(self._handle)

    def exit_code(self) -> int | None:
        return None

    def orphans(self) -> list[ProcessIdentity]:
        return []

    async def left_nothing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is left to do."""
