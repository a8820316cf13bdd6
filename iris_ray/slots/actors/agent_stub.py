"""What may be asked of a RunnerAgent: one method for each of its own."""

from typing import Any

from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import remote_method
from iris_ray.slots.actors.runner_agent import RunnerAgent


class AgentStub:
    """The agent behind an actor handle. It can be sent to other processes.

    Args:
        handle: the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self.watch = remote_method(handle, RunnerAgent.watch)
        self.alive = remote_method(handle, RunnerAgent.alive)
        self.memory = remote_method(handle, RunnerAgent.memory)
        self.wait_gone = remote_method(handle, RunnerAgent.wait_gone)

    def __reduce__(self) -> tuple[Any, ...]:
        return AgentStub, (self.handle,)
