"""Hosts for slots: ordinary jobs hold hosts, or slices, for a SlotManager."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from iris_ray.actors.calls.asking import Actor, Reference
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.controller.node_table import attributes_of
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.client.client import launch
from iris_ray.client.connection import current_user
from iris_ray.client.job_request import make_request
from iris_ray.client.placement import Placement, on_slices, placement_of
from iris_ray.errors import IrisError
from iris_ray.model.constraints import Attributes, AttributeValue
from iris_ray.model.options import default_of
from iris_ray.model.requirement import BYTES_PER_GB, ResourceSpec
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.slots.actors.gpu_memory import NoLibraryError, gpu_memory_in_time
from iris_ray.slots.actors.messages import SlotHosts, runner_names
from iris_ray.slots.actors.runner_agent import RunnerAgent
from iris_ray.slots.actors.runners import HostHere
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.task.job_info import get_job_info
from iris_ray.task.preemption import POLL_S, PreemptionNotice, preemption_notice

_Agent = ray.remote(RunnerAgent)


def hold_host(
    manager: Actor[SlotManager],
    runner: str,
    kind: DeviceKind,
    devices: int,
    memory: int | Sequence[int] | None,
    whole_slice: bool,
) -> None:
    """Hold this host for the slots of a manager, as a task. Return when the manager is gone or gives the host back.

    After a preemption notice the slots finish their requests and end; then the gang moves.

    Args:
        manager: the SlotManager.
        runner: the runner's name. If each host of a slice is a runner, the host's number follows after a dot.
        kind, devices, memory: the devices that slots use here, and the bytes of each; None: those that NVIDIA's driver
            says.
        whole_slice: whether all hosts of the slice are one runner.

    Raises:
        RuntimeError: the host's agent is gone, or the driver does not say the memory or the order of its GPUs, which is
            needed; the job is tried again.
    """
    try:
        here = _here(runner, kind, devices, memory, whole_slice)
    except NoLibraryError as error:  # no try would end otherwise
        print(f"runner {runner} can hold no slots: {error}", flush=True)
        ray.get(manager.call(SlotManager.give_up_runner, runner, str(error)))
        return
    held, agent_gone = manager.call(SlotManager.hold_host, here), here.agent.call(RunnerAgent.watch)
    try:
        while (notice := preemption_notice()) is None:
            done, _ = ray.wait([held, agent_gone], timeout=POLL_S)
            if held in done and _is_unwanted(held):
                return
            if done:
                raise RuntimeError(f"the agent of runner {here.runner_id} is gone")
        _leave(notice, manager, here, held)
    finally:
        ray.kill(here.agent.handle)  # Ray's worker does not exit before all calls that it has made have ended


def _leave(notice: PreemptionNotice, manager: Actor[SlotManager], here: HostHere, held: Reference[bool]) -> None:
    print(f"runner {here.runner_id} ends its slots: {notice.reason}", flush=True)
    empty = manager.call(SlotManager.empty_runner, here.runner_id, notice.reason)
    done, _ = ray.wait([empty, held])
    if held in done and _is_unwanted(held):
        return
    notice.saved()


def _is_unwanted(held: Reference[bool]) -> bool:
    """Return whether the manager has given the host back, or is gone; if not, the host's agent is gone."""
    try:
        unwanted: bool = ray.get(held)
    except RayError:
        return True
    return unwanted


def _here(
    runner: str, kind: DeviceKind, devices: int, memory: int | Sequence[int] | None, whole_slice: bool
) -> HostHere:
    me, group = get_job_info(), ray.util.get_current_placement_group()
    assert me is not None, "a runner is a task"
    assert group is not None, "a task runs in a reservation"
    is_slice = bool(me.slice_name)
    bundle = me.worker_id if is_slice else 0
    if is_slice:  # the live nodes' own count of chips wins over the rule for the type
        devices = int(group.bundle_specs[bundle][TPU])
    variables = {name: os.environ[name] for name in (TOKEN_VARIABLE, TaskFiles.VARIABLE)}
    if whole_slice:  # a slot's process finds its peers on other hosts by its task's place in the gang
        variables |= me.to_env()
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    options = _Agent.options(num_cpus=0, max_concurrency=1000, scheduling_strategy=strategy)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus, totals = gpus_here(visible, memory) if kind is DeviceKind.GPU else ((), ())
    sizes = () if isinstance(memory, int) else tuple(memory or totals)
    return HostHere(
        runner_id=f"{runner}.{me.worker_id}" if me.num_tasks > 1 and not whole_slice else runner,
        job_id=me.job_id,
        attempt=me.attempt,
        kind=kind,
        devices=devices,
        memory=memory if isinstance(memory, int) else min(sizes),
        attributes=_attributes(),
        agent=Actor(options.remote(variables)),
        group=group,
        bundle=bundle,
        gpus=gpus,
        sizes=sizes,
        totals=totals,
        variables=variables,
        host=me.worker_id if whole_slice else 0,
        hosts=me.num_tasks if whole_slice else 1,
    )


def gpus_here(visible: str, memory: int | Sequence[int] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return this host's GPUs in the order of ``nvidia-smi``, and the bytes of each that NVIDIA's driver reports.

    Ray names GPUs in a random order if it was itself started with ``CUDA_VISIBLE_DEVICES``. If the driver does not
    answer, there are no bytes, and UUIDs keep Ray's order.

    Args:
        visible: the task's ``CUDA_VISIBLE_DEVICES``.
        memory: the bytes of each that slots may use, in the order of ``nvidia-smi``; None: all that the driver reports.

    Raises:
        NoLibraryError: nvidia-ml-py is not installed, and ``memory`` needs the driver's answer.
        RuntimeError: the driver did not answer, and ``memory`` needs it; or Ray has named no GPUs.
    """
    names = list(filter(None, visible.split(",")))
    numbered = all(name.isdecimal() for name in names)
    if numbered:
        names.sort(key=int)
    if not names:
        if memory is None:
            raise RuntimeError("Ray has set no CUDA_VISIBLE_DEVICES for this task, which has GPUs")
        return (), ()
    try:
        found = gpu_memory_in_time(names)
    except RuntimeError as error:
        if memory is None:
            why = f"the memory of this host's GPUs is not known: {error}; mend that, or give SlotHosts(memory=BYTES)"
            raise type(error)(why) from None
        if not numbered and not isinstance(memory, int) and len(set(memory)) > 1:
            why = (
                f"the order of {', '.join(names)} is not known, so neither is which of them has which memory: {error};"
                " mend that, or set CUDA_VISIBLE_DEVICES to numbers where Ray is started"
            )
            raise type(error)(why) from None
        print(f"slots here get their share of SlotHosts(memory=…), not of the whole GPU: {error}", flush=True)
        return tuple(names), ()
    in_order = sorted(zip(names, found, strict=True), key=lambda gpu: gpu[1].place)
    return tuple(name for name, _ in in_order), tuple(each.total for _, each in in_order)


def _attributes() -> Attributes:
    node_id = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == node_id]
    return {**attributes_of(node), "node-id": AttributeValue(node_id)}


# -- slot runners ------------------------------------------------------------------------------------------------------

CLOSED = "its slots are closed"
EXIT_GRACE_S = 5.0


def submit_runners(manager: Actor[SlotManager], hosts: Sequence[SlotHosts], name: str | None) -> tuple[str, ...]:
    """Submit the jobs that get hosts for a SlotManager; return their ids once the Controller has them.

    Args:
        manager: the SlotManager.
        hosts: the hosts to get.
        name: the prefix of the jobs' names; None: "slots".

    Raises:
        InvalidRequestError: no job could get such hosts; nothing was submitted.
        ControllerUnavailableError: the cluster's Controller could not be started or reached.
    """
    requests = list(_requests(manager, hosts, name or "slots"))
    launched: list[str] = []
    try:
        for request in requests:
            handle = launch(request, detached=False)
            launched.append(handle.job_id)
    except BaseException:  # else they would hold hosts for a manager that no client can reach
        cancel_runners(launched)
        raise
    return tuple(launched)


def require_possible(hosts: Sequence[SlotHosts], name: str) -> None:
    """Refuse hosts that `submit_runners` would refuse. Nothing is asked of a cluster.

    Raises:
        InvalidRequestError: no job could get such hosts.
    """
    nobody: Any = None
    list(_requests(nobody, hosts, name))


def cancel_runners(job_ids: Sequence[str]) -> None:
    """End the jobs, including those that wait. Jobs that have ended, or that the Controller has forgotten, stay."""
    for job_id in job_ids:
        with suppress(IrisError):
            ControllerConnection().ask(ControllerInterface.cancel, job_id, CLOSED, current_user())


def _requests(manager: Actor[SlotManager], hosts: Sequence[SlotHosts], name: str) -> Iterator[RunRequest]:
    for runner, each in runner_names(hosts):
        request = make_request(
            functools.partial(
                hold_host, manager, runner, each.kind, len(each.runner.devices), each.memory, each.whole_slices
            ),
            _placement(each),
            f"{name}-{runner}",
            constraints=list(each.constraints),
            preferences=list(each.preferences),
            tolerations=list(each.tolerations),
            priority=each.priority,
            max_retries_preemption=default_of("max_retries_preemption"),
            max_retries_failure=default_of("max_retries_preemption"),  # it fails only if its agent is gone
            keep_warm=0.0,
            exit_grace=EXIT_GRACE_S,
        )
        yield replace(request, spec=replace(request.spec, may_evict=False))


def _placement(hosts: SlotHosts) -> Placement:
    if hosts.tpu_type is not None:
        return on_slices(get_tpu_config(hosts.tpu_type), 1)
    if hosts.kind is DeviceKind.GPU:
        return placement_of(ResourceSpec(gpu=hosts.devices), None)
    memory = sum(device.memory for device in hosts.runner.devices)
    return placement_of(ResourceSpec(cpu=hosts.devices, memory_gb=memory / BYTES_PER_GB), None)
