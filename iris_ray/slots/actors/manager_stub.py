"""What may be asked of a SlotManager: one method for each of its own."""

from typing import Any

from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import remote_method
from iris_ray.slots.actors.messages import Ask
from iris_ray.slots.actors.slot_manager import SlotManager


class ManagerStub:
    """The SlotManager behind an actor handle. It can be sent to other processes.

    Args:
        handle: the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self.maker = remote_method(handle, SlotManager.maker)
        self.start = remote_method(handle, SlotManager.start)
        self.close = remote_method(handle, SlotManager.close)
        self.register = remote_method(handle, SlotManager.register)
        self.remove = remote_method(handle, SlotManager.remove)
        self.submit = remote_method(handle, SlotManager.submit)
        self.taken = remote_method(handle, SlotManager.taken)
        self.cancel = remote_method(handle, SlotManager.cancel)
        self.renew = remote_method(handle, SlotManager.renew)
        self.evict = remote_method(handle, SlotManager.evict)
        self.prewarm = remote_method(handle, SlotManager.prewarm)
        self.status = remote_method(handle, SlotManager.status)
        self.hold_host = remote_method(handle, SlotManager.hold_host)
        self.empty_runner = remote_method(handle, SlotManager.empty_runner)

    def stream(self, ask: Ask) -> Any:
        """Return Ray's generator of references to the pieces of an answer; see `SlotManager.stream`."""
        return self.handle.stream.options(num_returns="streaming").remote(ask)

    def __reduce__(self) -> tuple[Any, ...]:
        return ManagerStub, (self.handle,)
