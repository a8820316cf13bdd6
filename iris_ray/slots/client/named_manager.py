"""Makes SlotManagers, and finds them by name."""

import os
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.ray_internals import driver_lives
from iris_ray.client.connection import current_user
from iris_ray.errors import InvalidSlotError, SlotNameTakenError, UnknownNameError
from iris_ray.slots.actors.messages import Maker
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.core.policy import ServingPolicy

NAMESPACE = "iris_ray.slots"
MOST_CALLS = 100_000
"""Concurrent calls of a manager, one for each request that waits or runs; more would wait in Ray, without a timeout."""
ANSWER_S = 10.0
ENDS_S = 30.0
"""How long a manager may take to end after its driver."""
LOOK_S = 0.2

_SlotManager = ray.remote(SlotManager)


class Found(NamedTuple):
    """A manager, whether it was made just now, and whether this process has made it, now or before."""

    manager: Actor[SlotManager]
    is_new: bool
    is_ours: bool


def make_or_find(policy: ServingPolicy, name: str | None) -> Found:
    """Make a manager, or find the one of this name that a process of the same Ray job has made.

    A manager whose driver has ended is about to end, too: the call waits until its name is free.

    Raises:
        SlotNameTakenError: the driver of another Ray job has made a manager of this name.
        InvalidSlotError: the name is not a str, or empty.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidSlotError(f"SlotClient: name is {name!r}; give a str that is not empty, or None")
    me, limit = _this_process(), time.monotonic() + ENDS_S
    while True:
        manager = None if name is None else _of_name(name)
        if manager is None:
            try:
                return Found(_made(policy, name, me), is_new=True, is_ours=True)
            except ValueError:  # another process has taken the name just now
                if name is None or time.monotonic() > limit:
                    raise
        elif (found := _attached(manager, name, me)) is not None:
            return found
        elif time.monotonic() > limit:
            raise SlotNameTakenError(f"the models under the name {name!r} should have ended by now; try again later")
        time.sleep(LOOK_S)


def find(name: str) -> Actor[SlotManager]:
    """Return the manager of a name, of any process.

    Raises:
        UnknownNameError: there is none.
    """
    if (manager := _of_name(name)) is None:
        raise UnknownNameError(
            f"no process serves models under the name {name!r}; start the one that creates SlotClient(…, name={name!r})"
        )
    return manager


def _made(policy: ServingPolicy, name: str | None, maker: Maker) -> Actor[SlotManager]:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    named = {} if name is None else {"name": name, "namespace": NAMESPACE}
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": MOST_CALLS, "scheduling_strategy": here, **named}
    return Actor(_SlotManager.options(**options).remote(policy, maker))


def _attached(manager: Actor[SlotManager], name: str | None, me: Maker) -> Found | None:
    """Return the manager if this Ray job has made it, or None if it is about to end with its driver."""
    maker = _maker_of(manager)
    if maker is not None and maker.ray_job == me.ray_job:
        return Found(manager, is_new=False, is_ours=maker == me)
    if maker is not None and driver_lives(maker.ray_job):
        raise SlotNameTakenError(_words(name, maker))
    return None


def _of_name(name: str) -> Actor[SlotManager] | None:
    try:
        return Actor(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return None


def _maker_of(manager: Actor[SlotManager]) -> Maker | None:
    """Return the maker of a manager; None if it does not answer, because it ends."""
    try:
        found: Maker = ray.get(manager.call(SlotManager.maker), timeout=ANSWER_S)
    except ActorDiedError:
        ray.kill(manager.handle)  # else Ray finds its name again and again in the process that has made it
        return None
    except (RayError, TimeoutError):
        return None
    return found


def _this_process() -> Maker:
    context = ray.get_runtime_context()
    where = f"process {os.getpid()} on {ray.util.get_node_ip_address()}"
    return Maker(current_user(), context.get_job_id(), context.get_worker_id(), where)


def _words(name: str | None, maker: Maker) -> str:
    return (
        f"{maker.user} serves models under the name {name!r} already, in {maker.where}, Ray job {maker.ray_job}. "
        f"SlotClient.connect({name!r}) attaches to these models; give another name for models of your own. The name is "
        f"free once that process has closed its client, or has ended"
    )
