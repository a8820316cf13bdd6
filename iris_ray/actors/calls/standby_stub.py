"""What may be asked of a TaskProcess: one method for each of its own."""

from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Reference
from iris_ray.actors.protocol.messages import StandbyReady, TaskLaunch
from iris_ray.model.outcomes import TaskEnd


class StandbyStub:
    """The task process behind an actor handle. Each call returns Ray's reference to the answer.

    Args:
        handle: the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    def ready(self) -> Reference[StandbyReady]:
        """Have it say that it waits; see `TaskProcess.ready`."""
        ready: Reference[StandbyReady] = self._handle.ready.remote()
        return ready

    def run(self, launch: TaskLaunch) -> Reference[TaskEnd]:
        """Have it run its task; see `TaskProcess.run`."""
        end: Reference[TaskEnd] = self._handle.run.remote(launch)
        return end

    def end_leftovers(self, exclusive: bool) -> Reference[None]:
        """Have it end the task that ran there before; see `TaskProcess.end_leftovers`."""
        ended: Reference[None] = self._handle.end_leftovers.remote(exclusive)
        return ended

    def exit(self) -> None:
        """Have it end by itself, with its exit handlers. Return at once."""
        self._handle.exit.remote()
