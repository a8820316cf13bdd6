"""What the task of a runner's job does: it keeps its host for slots until somebody else is to have it."""

import os

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from iris_ray.actors.calls.actor import Actor, Reference
from iris_ray.actors.controller.node_table import attributes_of
from iris_ray.actors.slots.runner_agent import RunnerAgent
from iris_ray.actors.slots.runners import HostHere
from iris_ray.actors.slots.slot_manager import SlotManager
from iris_ray.actors.wire.task_files import TOKEN_VARIABLE, TaskFiles
from iris_ray.model.constraints import Attributes, AttributeValue
from iris_ray.model.workers import TPU
from iris_ray.slots.devices import DeviceKind
from iris_ray.task.job_info import get_job_info
from iris_ray.task.preemption import POLL_S, PreemptionNotice, preemption_notice

_Agent = ray.remote(RunnerAgent)


def keep_runner(
    manager: Actor[SlotManager], runner: str, kind: DeviceKind, devices: int, memory: int, whole_slice: bool
) -> None:
    """Keep this host for the slots of a manager. Returns once the manager is gone, or has no use for it any more.

    At a notice the slots end first, with their requests; then the gang moves.

    Args:
        manager: the SlotManager.
        runner: its name for the job. If each host of a slice is a runner, the host's number follows after a dot.
        kind, devices, memory: what slots use here.
        whole_slice: whether all hosts of the slice are one runner.

    Raises:
        RuntimeError: the host's agent is gone; the job is tried again.
    """
    here = _here(runner, kind, devices, memory, whole_slice)
    kept, agent_gone = manager.call(SlotManager.keep_runner, here), here.agent.call(RunnerAgent.watch)
    try:
        while (notice := preemption_notice()) is None:
            done, _ = ray.wait([kept, agent_gone], timeout=POLL_S)
            if kept in done and _is_unwanted(kept):
                return
            if done:
                raise RuntimeError(f"the agent of runner {here.runner_id} is gone")
        _leave(notice, manager, here, kept)
    finally:
        ray.kill(here.agent.handle)  # Ray's worker does not exit before all calls that it has made have ended


def _leave(notice: PreemptionNotice, manager: Actor[SlotManager], here: HostHere, kept: Reference[bool]) -> None:
    print(f"runner {here.runner_id} ends its slots: {notice.reason}", flush=True)
    empty = manager.call(SlotManager.empty_runner, here.runner_id, notice.reason)
    done, _ = ray.wait([empty, kept])
    if kept in done and _is_unwanted(kept):
        return
    notice.saved()


def _is_unwanted(kept: Reference[bool]) -> bool:
    """Return whether the manager has no use for the host any more, or is gone; else the host's agent is."""
    try:
        unwanted: bool = ray.get(kept)
    except RayError:
        return True
    return unwanted


def _here(runner: str, kind: DeviceKind, devices: int, memory: int, whole_slice: bool) -> HostHere:
    me, group = get_job_info(), get_current_placement_group()
    assert me is not None, "a runner is a task"
    assert group is not None, "a task runs in a reservation"
    is_slice = bool(me.slice_name)
    bundle = me.worker_id if is_slice else 0
    if is_slice:  # what the live nodes report wins over the rule for the type
        devices = int(group.bundle_specs[bundle][TPU])
    variables = {name: os.environ[name] for name in (TOKEN_VARIABLE, TaskFiles.VARIABLE)}
    if whole_slice:  # a slot's process finds those on the other hosts by its task's place in the gang
        variables |= me.to_env()
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    options = _Agent.options(num_cpus=0, max_concurrency=1000, scheduling_strategy=strategy)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "") if kind is DeviceKind.GPU else ""
    return HostHere(
        runner_id=f"{runner}.{me.worker_id}" if me.num_tasks > 1 and not whole_slice else runner,
        job_id=me.job_id,
        attempt=me.attempt,
        kind=kind,
        devices=devices,
        memory=memory,
        attributes=_attributes(),
        agent=Actor(options.remote(variables)),
        group=group,
        bundle=bundle,
        gpus=tuple(filter(None, gpus.split(","))),
        variables=variables,
        host=me.worker_id if whole_slice else 0,
        hosts=me.num_tasks if whole_slice else 1,
    )


def _attributes() -> Attributes:
    """Return the attributes of this host, for the constraints of models: those that jobs see, and its node id."""
    node_id = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == node_id]
    return {**attributes_of(node), "node-id": AttributeValue(node_id)}
