"""Fray's interface to jobs and actors, on a Ray cluster."""

import logging
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from iris_ray.actors.calls.controller_connection import RESTART_S, ControllerConnection, find_controller
from iris_ray.actors.calls.ray_internals import is_connected
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.children import adopt, as_child
from iris_ray.client.client import IrisClient, launch, require_may_detach
from iris_ray.client.connection import current_user
from iris_ray.errors import InvalidRequestError, NotPermittedError, UnknownNameError
from iris_ray.fray.actor_handle import ActorGroup
from iris_ray.fray.actor_server import actor_request, host_here
from iris_ray.fray.current import require_fray
from iris_ray.fray.job_handle import JobHandle
from iris_ray.fray.job_request import fray_request, inherited_place
from iris_ray.model.checks import require
from iris_ray.model.options import OPTIONS, PriorityBand
from iris_ray.task.job_info import get_job_info

if TYPE_CHECKING:
    from fray.actor import ActorHandle as FraysHandle
    from fray.actor import HostedActor
    from fray.types import ActorConfig, EnvironmentConfig, JobRequest, ResourceConfig

log = logging.getLogger(__name__)

_submitting = threading.Lock()
"""Held while a job is looked up and submitted: two threads that submit the same job would both miss the other's."""
_submitted: set[str] = set()
"""The ids of jobs that this process has submitted or adopted."""


class Client:
    """Fray's client, for ``fray.current_client.set_current_client``. It is also the current one in tasks of its jobs.

    Args:
        iris: a client whose process has joined the cluster, such as ``IrisClient.remote("HOST:6379")`` on one of its
            nodes; None: `IrisClient()`, which joins the cluster of ``RAY_ADDRESS`` or of this machine, unless the
            process has joined one.
        detached: whether its jobs go on when this process ends. Not in a task, whose jobs end with it.
        children: what happens to the jobs that tasks of its jobs, or its actors, submit when these restart: they "end",
            or the next attempts "adopt" them. None: as in the job of this process's task; "end" outside of tasks.
            Actors that a task or an actor makes end in any case when it restarts.

    Raises:
        FrayMissingError: Fray is not installed here.
        NoClusterError: there is no cluster to connect to.
        InvalidRequestError: ``detached`` in a task, a client that reaches nothing but a dashboard, or another value of
            ``children``.
    """

    def __init__(self, iris: IrisClient | None = None, *, detached: bool = False, children: str | None = None) -> None:
        require_fray()
        require("children", children, OPTIONS["children"].check)
        if detached:
            require_may_detach()
        if iris is not None and not iris.is_direct:
            raise InvalidRequestError(
                "Fray's client needs a process that has joined the cluster, and this client reaches only its dashboard;"
                " run the script on a node of the cluster: iris-ray submit --ray-job sends it there"
            )
        self._iris = IrisClient() if iris is None else iris
        self._detached = detached
        self._children = children
        self._jobs: list[JobHandle] = []
        self._groups: list[ActorGroup] = []

    def submit(self, request: "JobRequest", adopt_existing: bool = True) -> JobHandle:
        """Put a job into the cluster's queue; return as soon as it is there.

        The client looks the name up among this user's unfinished jobs; in a task, only among jobs that the task's job
        has submitted. Two processes that submit a name at the same moment may both submit a job.

        Args:
            request: the job.
            adopt_existing: whether to return an unfinished job of this name, whichever process submitted it. In a task,
                a job that an earlier attempt of the task has left (``children="adopt"``) is returned only if the
                request is the same; otherwise it is ended, and the log says what differs. It may have succeeded
                meanwhile; then the handle has its end.

        Raises:
            fray.client.JobAlreadyExists: there is one, and ``adopt_existing`` is False; the error has its handle.
            InvalidRequestError: an option can't work; nothing was acquired.
            UnsupportedOptionError: iris_ray does not support an option; a subclass of InvalidRequestError.
        """
        region = region_here()
        made = in_allowed_band(fray_request(request, Client, region, self._children))
        if adopt_existing:
            made = as_child(made, inherited_place(request.resources, region), one_of_a_name=True)
        with _submitting:
            job_id = unfinished_job(request.name)
            if job_id is not None and job_id not in _submitted and adopt_existing:
                adopted = adopt(made)
                job_id = unfinished_job(request.name) if adopted is None else adopted.job_id
            if job_id is None:
                job_id = launch(made, self._detached).job_id
                self._jobs.append(JobHandle(job_id))
                _submitted.add(job_id)
                return self._jobs[-1]
        if adopt_existing:
            return JobHandle(job_id)
        from fray.client import JobAlreadyExists

        raise JobAlreadyExists(request.name, JobHandle(job_id))

    def host_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        actor_config: "ActorConfig | None" = None,
        **kwargs: Any,
    ) -> "HostedActor":
        """Make an object in this process, and let other processes of the cluster call its methods.

        Returns:
            Its handle, and ``shutdown()``.

        Raises:
            UnsupportedOptionError: Ray encrypts its messages (``RAY_USE_TLS``); calls of actors would not be encrypted.
        """
        return host_here(actor_class, args, kwargs, name, actor_config)

    def create_actor(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        resources: "ResourceConfig | None" = None,
        actor_config: "ActorConfig | None" = None,
        environment: "EnvironmentConfig | None" = None,
        **kwargs: Any,
    ) -> "FraysHandle":
        """Make an actor in a task of its own, and wait until it takes calls.

        Raises like `create_actor_group`, and like `ActorGroup.wait_ready`.
        """
        group = self._create(actor_class, args, kwargs, name, 1, resources, actor_config, environment)
        return group.wait_ready()[0]

    def create_actor_group(
        self,
        actor_class: type,
        *args: Any,
        name: str,
        count: int,
        resources: "ResourceConfig | None" = None,
        actor_config: "ActorConfig | None" = None,
        environment: "EnvironmentConfig | None" = None,
        **kwargs: Any,
    ) -> ActorGroup:
        """Make actors, each in a task of one job; returns as soon as the job is in the queue.

        Args:
            actor_class, args, kwargs: the class of all actors, and its arguments. `fray.actor.current_actor` tells the
                actors apart.
            name: the group's name.
            count: the number of actors; on TPU slices of several VMs a multiple of the VMs.
            resources: the resources of each actor; one CPU if left out.
            actor_config: how many methods run at a time, and how often an actor comes back: after preemptions
                ``max_restarts`` times (100 if left out), after failures ``max_task_retries`` times (0 if left out).
            environment: variables and packages.

        Raises:
            InvalidRequestError: an option can't work; nothing was acquired.
        """
        return self._create(actor_class, args, kwargs, name, count, resources, actor_config, environment)

    def shutdown(self, wait: bool = True) -> None:
        """End the actors that this client has made in tasks. Jobs that are not detached end with this process.

        Args:
            wait: whether to wait until the jobs that this client has submitted have ended. It never waits for jobs
                that it has found by name.
        """
        for group in self._groups:
            with suppress(UnknownNameError):  # it has ended, and the Controller keeps only the newest ended jobs
                group.shutdown()
        for job in self._jobs if wait else ():
            with suppress(UnknownNameError):
                job.wait(raise_on_failure=False)
        self._groups.clear()
        self._jobs.clear()

    def _create(self, actor_class: type, args: tuple[Any, ...], kwargs: dict[str, Any], *asked: Any) -> ActorGroup:
        every = (*asked, region_here(), self._children)
        request = in_allowed_band(actor_request(Client, actor_class, args, kwargs, *every))
        name, count, *_ = asked
        self._groups.append(ActorGroup(launch(request, self._detached).job_id, name, count))
        return self._groups[-1]


def region_here() -> str | None:
    """Return the region of this task's host; None outside a task, or without such a label."""
    if get_job_info() is None or not is_connected():
        return None
    labels: dict[str, str] = ray.get_runtime_context().get_node_labels()
    return labels.get("iris/region") or labels.get("region")


def in_allowed_band(request: RunRequest) -> RunRequest:
    """Return the request in the band PRODUCTION, and log that, if it is in SYSTEM and its user is not an operator."""
    spec = request.spec
    if spec.priority is not PriorityBand.SYSTEM or find_controller() is None:
        return request  # without a Controller nobody has said yet who is an operator
    try:
        what = "submit jobs in the band system"
        ControllerConnection(patience_s=RESTART_S).ask(ControllerInterface.require_operator, spec.user, what)
    except NotPermittedError as error:
        log.warning("job %s runs in the band production instead of system, Fray's priority 4: %s", spec.name, error)
        return replace(request, spec=replace(spec, priority=PriorityBand.PRODUCTION, priority_reason=None))
    return request


def unfinished_job(name: str) -> str | None:
    """Return the id of this user's newest unfinished job of a name; in a task, of a job that this job has submitted."""
    if find_controller() is None:
        return None  # no job has been submitted yet
    user, me = current_user(), get_job_info()
    parent = me.job_id if me else ""
    for job in reversed(ControllerConnection(patience_s=RESTART_S).ask_all(ControllerInterface.list_jobs)):
        known = (job.name, job.user, job.job_id.rpartition("/")[0])
        if known == (name, user, parent) and not job.state.finished:
            return job.job_id
    return None
