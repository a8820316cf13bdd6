"""From Fray's `JobRequest` to a request of iris_ray: checked, and complete, without a cluster."""

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iris_ray.actors.wire.messages import RunRequest
from iris_ray.client.job_request import make_request
from iris_ray.client.placement import Placement
from iris_ray.errors import InvalidRequestError, UnsupportedOptionError
from iris_ray.fray.entrypoint import InTask, in_task
from iris_ray.fray.placement import fray_placement, size_in_bytes
from iris_ray.model.job_spec import PriorityBand

if TYPE_CHECKING:
    from fray.types import EnvironmentConfig, JobRequest, ResourceConfig

log = logging.getLogger(__name__)

BANDS = {0: PriorityBand.INTERACTIVE, 1: PriorityBand.PRODUCTION, 2: PriorityBand.INTERACTIVE, 3: PriorityBand.BATCH}
"""Fray's priorities are Iris's bands; 0 leaves it to the backend."""

_REFUSED_RESOURCES = {
    "image": "tasks run in the image of their Ray node",
    "container_profile": "tasks run in the container of their Ray node",
    "target_cluster": "connect to that cluster instead",
}
_REFUSED_ENVIRONMENT = {
    "docker_image": "tasks run in the image of their Ray node",
    "setup_scripts": "install what they install into the image, or ask for pip_packages",
    "secrets": "give them as env_vars",
}
_IGNORED_ENVIRONMENT = {
    "extras": "the image of the cluster must have them",
    "sync_packages": "the image of the cluster must have them",
}


def fray_request(request: "JobRequest") -> RunRequest:
    """Check a job of Fray's and return it as one of ours.

    Raises:
        InvalidRequestError: something makes no sense; nothing was acquired.
        UnsupportedOptionError: something that iris_ray does not do, and that must not be dropped without a word.
    """
    if getattr(request, "processes_per_task", 1) != 1:
        raise UnsupportedOptionError(
            f"processes_per_task is {request.processes_per_task}: each task is one process, with all its GPUs; leave it"
            " out, and start the others from it"
        )
    if getattr(request, "timeout", None) is not None:
        log.warning("job %s: timeout has no effect", request.name)
    return task_request(
        in_task(request.entrypoint),
        request.name,
        request.resources,
        fray_placement(request.resources, request.replicas or 1, tpu_gang=True),
        request.environment,
        priority=band_of(request.priority),
        max_retries_failure=request.max_retries_failure,
        max_retries_preemption=request.max_retries_preemption,
        max_task_failures=getattr(request, "max_task_failures", 0) or None,
    )


def task_request(
    task: InTask,
    name: str,
    resources: "ResourceConfig",
    placement: Placement,
    environment: "EnvironmentConfig | None",
    **options: Any,
) -> RunRequest:
    """Return the request of a job whose tasks run a function in an environment of Fray's; raises like `fray_request`.

    Args:
        options: as for `IrisClient.submit`.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidRequestError(f"name is {name!r}; give a str without slashes")
    _refuse("resources", resources, _REFUSED_RESOURCES)
    _refuse("environment", environment, _REFUSED_ENVIRONMENT)
    for option, why in _IGNORED_ENVIRONMENT.items():
        if asked := getattr(environment, option, None):
            log.warning("job %s: %s %s are not installed; %s", name, option, list(asked), why)
    made = make_request(task, placement, name, env=variables(environment, resources), **options)
    if environment is None or not environment.pip_packages:
        return made
    runtime_env = {**made.process.runtime_env, "pip": list(environment.pip_packages)}
    return replace(made, process=replace(made.process, runtime_env=runtime_env))


def variables(environment: "EnvironmentConfig | None", resources: "ResourceConfig") -> dict[str, str]:
    """Return the variables of the tasks.

    They are those that Fray gives to every task on such a device, the job's own, which win over them, and what a task
    has of its host in the words of Iris: Marin's code reads its memory there, and would believe in endless memory.
    """
    own = environment.env_vars if environment is not None else {}
    return {**resources.device.default_env_vars(), "IRIS_TASK_RESOURCES": _in_words_of_iris(resources), **own}


def _in_words_of_iris(resources: "ResourceConfig") -> str:
    """Return the JSON of Iris's message ``ResourceSpecProto``."""
    device = resources.device
    chips = {} if device.kind == "cpu" else {device.kind: {"variant": device.variant, "count": device.chip_count()}}
    amounts = {"cpu_millicores": round(resources.cpu * 1000), "memory_bytes": round(size_in_bytes(resources.ram))}
    return json.dumps({**amounts, "device": chips})


def band_of(priority: int) -> PriorityBand:
    """Return the band that a priority of Fray's means.

    Raises:
        InvalidRequestError: it means none.
    """
    if priority not in BANDS:
        raise InvalidRequestError(
            f"priority is {priority!r}; give 0 or 2 (interactive), 1 (production) or 3 (batch), as in Iris"
        )
    return BANDS[priority]


def _refuse(whose: str, config: object, reasons: dict[str, str]) -> None:
    for option, why in reasons.items():
        if (asked := getattr(config, option, None)) not in (None, {}, [], ()):
            shown = "given" if option == "secrets" else repr(asked)
            raise UnsupportedOptionError(f"{option} of the {whose} is {shown}: {why}")
