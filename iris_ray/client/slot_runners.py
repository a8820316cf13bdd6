"""Hosts for slots: each belongs to a job like any other, which keeps a host, or a slice, for a SlotManager."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from iris_ray.actors.slots.manager_stub import ManagerStub
from iris_ray.actors.slots.messages import SlotHosts
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.messages import RunRequest
from iris_ray.client.client import launch
from iris_ray.client.identity import current_user
from iris_ray.client.job_request import make_request
from iris_ray.client.keep_runner import keep_runner
from iris_ray.client.placement import Placement, on_slices, placement_of
from iris_ray.errors import IrisError
from iris_ray.model.options import default_of
from iris_ray.model.resources import BYTES_PER_GB, ResourceSpec
from iris_ray.model.topology import get_tpu_config
from iris_ray.slots.devices import DeviceKind

CLOSED = "its slots are closed"
EXIT_GRACE_S = 5.0


def submit_runners(manager: ManagerStub, hosts: Sequence[SlotHosts], name: str | None) -> tuple[str, ...]:
    """Submit the jobs that get hosts for a SlotManager; return their ids once the Controller has them.

    Args:
        manager: uses the hosts.
        hosts: which.
        name: what the jobs' names begin with; None: "slots".

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
    except BaseException:  # else they would hold hosts for a manager that nobody can reach
        cancel_runners(launched)
        raise
    return tuple(launched)


def cancel_runners(job_ids: Sequence[str]) -> None:
    """End the jobs, those that wait included. What has ended already, or is nobody's any more, is left alone."""
    for job_id in job_ids:
        with suppress(IrisError):
            ControllerConnection().cancel(job_id, CLOSED, current_user())


def _requests(manager: ManagerStub, hosts: Sequence[SlotHosts], name: str) -> Iterator[RunRequest]:
    wanted = [each for each in hosts for _ in range(each.count)]
    for number, each in enumerate(wanted):
        runner = f"{each.kind.value}-{number}"
        request = make_request(
            functools.partial(
                keep_runner, manager, runner, each.kind, len(each.runner.devices), each.memory, each.whole_slices
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
    return placement_of(ResourceSpec(cpu=hosts.devices, memory_gb=hosts.memory / BYTES_PER_GB), None)
