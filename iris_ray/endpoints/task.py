"""Names under which the tasks of a job find each other's addresses.

A task records its endpoint in the cluster's key-value store, which outlives the Controller. The record counts only
while that attempt of the task runs, so nothing has to remove it. A run without Ray keeps files instead.
"""

import json
import time

from iris_ray.actors.calls.controller_connection import RESTART_S, ControllerConnection
from iris_ray.actors.calls.names import endpoint_key
from iris_ray.actors.calls.ray_internals import ClusterStore, is_connected
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.task_files import LocalRun
from iris_ray.errors import EndpointNotFoundError, InvalidRequestError, NoClusterError
from iris_ray.model.checks import TIMEOUT, Holds, is_name, require, shown, unknown
from iris_ray.model.job_info import JobInfo
from iris_ray.model.lifecycle import ACTIVE
from iris_ray.model.plain_values import plain
from iris_ray.task.job_info import get_job_info

ASK_AGAIN_S = 0.2


def register_endpoint(name: str, address: str) -> None:
    """Let the other tasks of this job, and of its group, find ``address`` under ``name`` while this attempt lasts.

    Registering a name again replaces its address.

    Args:
        name: the endpoint's name, which the others give to `lookup_endpoint`.
        address: any text that tells them how to reach it, such as ``"10.0.0.2:8080"``.

    Raises:
        InvalidRequestError: called outside a task, or an argument is not a str, or can't be stored.
        NoClusterError: called in a process that the task has started, which is not connected to the cluster.
    """
    me, key = _task(name)
    require("address", address, Holds(is_name, "a str, such as 10.0.0.2:8080"))
    run = LocalRun.of_this_task()
    record = json.dumps([_index(me, run), me.attempt, plain(str, address, "address")]).encode()
    if run is not None:
        run.put(key, record)
    else:
        _store().put(key, record)


def lookup_endpoint(name: str, timeout: float = 0.0, *, member: str | None = None) -> str:
    """Return the address that a task of this job, or of another job of its group, has registered under a name.

    Args:
        name: the endpoint's name.
        timeout: seconds to wait until a task registers it; ``math.inf`` waits for ever.
        member: the name of the other job in the group; None: this job.

    Raises:
        EndpointNotFoundError: no running task has registered the name.
        ControllerUnavailableError: no Controller answered within the timeout, nor within 20 s.
        InvalidRequestError: called outside a task, the name is not a str, or the timeout is not a number.
        UnknownNameError: the group has no such job, or this job is in no group.
        NoClusterError: called in a process that the task has started, which is not connected to the cluster.
    """
    me, key = _task(name)
    job_id = me.job_id
    if member is not None and (job_id := me.group_jobs.get(member, "")) != me.job_id:
        if not job_id:
            raise unknown(f"job in the group of {me.job_id} with the name", member, me.group_jobs)
        key = endpoint_key(job_id, plain(str, name, "the endpoint's name"))
    require("timeout", timeout, TIMEOUT)
    deadline = time.monotonic() + timeout
    while (address := _registered(me, job_id, key, deadline - time.monotonic())) is None:
        if time.monotonic() > deadline:
            waited = f" within {timeout:g} s" if timeout else ""
            raise EndpointNotFoundError(f"no running task of {job_id} has registered {name!r}{waited}")
        time.sleep(ASK_AGAIN_S)
    return address


def endpoint_of_attempt(name: str, task_index: int, attempt: int) -> str | None:
    """Return the address that an attempt of a task of this job has registered under a name; None if it has not.

    Ask no Controller. The caller knows from somewhere else whether that attempt runs.
    """
    me, key = _task(name)
    run = LocalRun.of_this_task()
    found = _store().get(key) if run is None else run.get(key)
    if found is None:
        return None
    index, number, address = json.loads(found)
    here = task_index if run is not None else task_index // me.processes_per_host
    return str(address) if (index, number) == (here, attempt) else None


def endpoints_of(job_id: str, prefix: str) -> dict[str, str]:
    """Return the addresses that running tasks of a job have registered under names with a prefix. For any process.

    Raises:
        NoClusterError: this process is connected to no cluster.
        UnknownNameError: there is no such job.
        ControllerUnavailableError: no Controller answered within 20 s.
    """
    start = endpoint_key(job_id, "")
    records = {key: json.loads(record) for key, record in _store().items(start + prefix).items()}
    if not records:
        return {}
    tasks = ControllerConnection(patience_s=RESTART_S).ask_all(ControllerInterface.list_tasks, job_id)
    running = {(task.task_index, task.attempt) for task in tasks if task.state in ACTIVE}
    return {
        key.removeprefix(start): str(address)
        for key, (index, attempt, address) in records.items()
        if (index, attempt) in running
    }


def _registered(me: JobInfo, job_id: str, key: str, left_s: float) -> str | None:
    run = LocalRun.of_this_task()
    found = _store().get(key) if run is None else run.get(key)
    if found is None:
        return None
    index, attempt, address = json.loads(found)
    is_own = job_id == me.job_id
    if is_own and (index, attempt) == (_index(me, run), me.attempt):
        return str(address)
    if run is not None:
        return None if run.has_ended(index) else str(address)
    if is_own and me.in_gang and attempt != me.attempt:  # it may have had more tasks
        return None
    controller = ControllerConnection(patience_s=max(left_s, RESTART_S))
    holder = controller.ask(ControllerInterface.task_status, job_id, index)
    return str(address) if holder.attempt == attempt and holder.state in ACTIVE else None


def _index(me: JobInfo, run: LocalRun | None) -> int:
    """Return this task's index as the Controller counts, to which a host's processes are one task."""
    return me.task_index if run is not None else me.task_index // me.processes_per_host


def _store() -> ClusterStore:
    if not is_connected():
        raise NoClusterError(
            "this process is not connected to the Ray cluster, because it was started by a task; look endpoints up in"
            " the task's own process, and pass the addresses on"
        )
    return ClusterStore()


def _task(name: str) -> tuple[JobInfo, str]:
    me = get_job_info()
    if me is None:
        raise InvalidRequestError("endpoints are for tasks of a job; this process is not one")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"the endpoint's name is {shown(name)}; give a str")
    return me, endpoint_key(me.namespace, plain(str, name, "the endpoint's name"))
