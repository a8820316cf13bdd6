"""Turns Fray's `JobRequest` into a request of iris_ray: checked and complete, without a cluster."""

import functools
import json
import logging
import re
import subprocess
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.job_request import make_request
from iris_ray.client.placement import Placement, placement_of
from iris_ray.client.user_function import name_of, pickle_function
from iris_ray.errors import InvalidFunctionError, InvalidJobError, InvalidRequestError, UnsupportedOptionError
from iris_ray.fray.current import as_current_client
from iris_ray.model.checks import is_int
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import BYTES_PER_GB, ResourceSpec
from iris_ray.model.secret import SecretValue
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU_TOPOLOGY

if TYPE_CHECKING:
    from fray.client import Client as FraysClient
    from fray.types import Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig

try:
    from rigging.secrets import forwarded_secrets  # a dependency of Fray
except ImportError:  # Fray is not installed, or is an older release, which forwards none
    forwarded_secrets = None

MakesClient = Callable[[], "FraysClient"]
"""A function that makes a client of Fray, importable in tasks."""

log = logging.getLogger(__name__)

BANDS = {
    1: PriorityBand.PRODUCTION,
    2: PriorityBand.INTERACTIVE,
    3: PriorityBand.BATCH,
    4: PriorityBand.SYSTEM,
}
"""The bands for Fray's priorities, which are Iris's. 0 stands for the parent's band."""


_REFUSED_RESOURCES = {
    "image": "tasks run in the image of their Ray node",
    "container_profile": "tasks run in the container of their Ray node",
    "target_cluster": "connect to that cluster instead",
}
_REFUSED_ENVIRONMENT = {
    "docker_image": "tasks run in the image of their Ray node",
    "setup_scripts": "install what they install into the image, or ask for pip_packages",
}
_IGNORED_ENVIRONMENT = {
    "extras": "the image of the cluster must have them",
    "sync_packages": "the image of the cluster must have them",
}


def fray_request(
    request: "JobRequest", client: MakesClient, region: str | None = None, children: str | None = None
) -> RunRequest:
    """Check a job of Fray's and return it as a request of iris_ray.

    Args:
        request: the job.
        client: makes Fray's current client in each task.
        region: the region of the host of the task that submits the job, for a job that names none.
        children: as for `iris_ray.fray.Client`.

    Raises:
        InvalidRequestError: an option makes no sense; nothing was acquired.
        UnsupportedOptionError: iris_ray does not support an option that must not be ignored silently.
    """
    if getattr(request, "processes_per_task", 1) != 1:
        raise UnsupportedOptionError(
            f"processes_per_task is {request.processes_per_task}: each task is one process, with all its GPUs; leave it"
            " out, and start the others from it"
        )
    timeout = getattr(request, "timeout", None)  # older releases lack this field, and max_task_failures
    return task_request(
        InTask.of(_function_of(request.entrypoint), client),
        request.name,
        request.resources,
        fray_placement(request.resources, request.replicas or 1, gang=True, region=region),
        request.environment,
        **band_options(request.priority),
        max_retries_failure=request.max_retries_failure,
        max_retries_preemption=request.max_retries_preemption,
        max_task_failures=getattr(request, "max_task_failures", None),
        max_runtime=None if timeout is None else timeout.to_seconds(),
        children=children,
    )


def task_request(
    task: "InTask",
    name: str,
    resources: "ResourceConfig",
    placement: Placement,
    environment: "EnvironmentConfig | None",
    **options: Any,
) -> RunRequest:
    """Return the request of a job whose tasks run in an environment of Fray's; raises like `fray_request`.

    ``options`` are those of `IrisClient.submit`.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidRequestError(f"name is {name!r}; give a str without slashes")
    _refuse("resources", resources, _REFUSED_RESOURCES)
    _refuse("environment", environment, _REFUSED_ENVIRONMENT)
    for option, why in _IGNORED_ENVIRONMENT.items():
        if asked := getattr(environment, option, None):
            log.warning("job %s: %s %s are not installed; %s", name, option, list(asked), why)
    env = variables(environment, resources)
    made = make_request(task, placement, name, env=env, secrets=_secrets(name, environment, env), **options)
    if environment is None or not environment.pip_packages:
        return made
    runtime_env = {**made.process.runtime_env, "pip": list(environment.pip_packages)}
    return replace(made, process=replace(made.process, runtime_env=runtime_env))


def _secrets(job: str, environment: "EnvironmentConfig | None", env: Mapping[str, str]) -> dict[str, SecretValue]:
    """Return the secrets that a job names and, unless it is isolated, those of this process that Fray forwards.

    These are the tokens of Hugging Face, W&B and CoreWeave, and mounted secrets. What the job names, or has in ``env``,
    takes precedence. One that it does not name and that no task can get, such as a large file, does not fail the job.
    """
    named: Mapping[str, str] = getattr(environment, "secrets", None) or {}  # older releases have none
    for name in named:
        if not name.isidentifier():
            raise UnsupportedOptionError(f"the secret {name} would be a file of that name; tasks get variables only")
    found = {name: SecretValue(value) for name, value in named.items()}
    if getattr(environment, "secret_behavior", "inherit") == "inherit" and forwarded_secrets is not None:
        for name, value in forwarded_secrets(exclude={*named, *env}).items():
            try:
                if name.isidentifier():
                    found[name] = SecretValue(value)
            except InvalidRequestError as error:
                log.warning("job %s: the secret %s of this process is not forwarded: %s", job, name, error)
    return found


def variables(environment: "EnvironmentConfig | None", resources: "ResourceConfig") -> dict[str, str]:
    """Return the environment variables of the tasks: Fray's for the device, overridden by the job's own.

    ``IRIS_TASK_RESOURCES`` describes the task's share of its host in Iris's format. Marin's code reads its memory
    there; without it, it assumes unlimited memory.
    """
    own = environment.env_vars if environment is not None else {}
    return {**resources.device.default_env_vars(), "IRIS_TASK_RESOURCES": _in_words_of_iris(resources), **own}


def _in_words_of_iris(resources: "ResourceConfig") -> str:
    device = resources.device
    chips = {} if device.kind == "cpu" else {device.kind: {"variant": device.variant, "count": device.chip_count()}}
    amounts = {"cpu_millicores": round(resources.cpu * 1000), "memory_bytes": round(size_in_bytes(resources.ram))}
    return json.dumps({**amounts, "device": chips})


def band_of(priority: int) -> PriorityBand | None:
    """Return the band for a priority of Fray's; None for 0, that of the parent, which iris_ray knows.

    Raises:
        InvalidRequestError: there is no such priority.
    """
    if is_int(priority) and priority in (0, *BANDS):
        return BANDS.get(priority)
    raise InvalidRequestError(
        f"priority is {priority!r}; give 0 (as the parent), 1 (production), 2 (interactive), 3 (batch) or 4 (system)"
    )


def band_options(priority: int) -> dict[str, Any]:
    """Return the options of a job for a priority of Fray's; raises like `band_of`."""
    band = band_of(priority)
    reason = "its program has asked for Fray's priority 4" if band is PriorityBand.SYSTEM else None
    return {"priority": band, "priority_reason": reason}


def _refuse(whose: str, config: object, reasons: dict[str, str]) -> None:
    for option, why in reasons.items():
        if (asked := getattr(config, option, None)) not in (None, {}, [], ()):
            raise UnsupportedOptionError(f"{option} of the {whose} is {asked!r}: {why}")


# -- placement ---------------------------------------------------------------------------------------------------------

ANY_REGION = "*"
"""Fray's word for any region."""
ACCELERATOR_TYPE = "ray.io/accelerator-type"
TOPOLOGY = "ray.io/tpu-topology"
_NOT_PREEMPTIBLE = Constraint("preemptible", ConstraintOp.EQ, False)
"""A preference, not a constraint: all Marin's coordinators ask for it, but most clusters have no such label."""
_MEMORY_OF_GPU = re.compile(r"-\d+G$")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:i?b|bytes?)?", re.IGNORECASE)
_POWERS: dict[str, int] = {unit: 1024**power for power, unit in enumerate(("", "k", "m", "g", "t", "p"))}


def size_in_bytes(text: str) -> float:
    """Return bytes for an amount of memory as Fray reads it: units are binary, so "4g", "4gb" and "4GiB" are 4 × 2³⁰.

    Raises:
        InvalidRequestError: the text is not an amount.
    """
    found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise InvalidRequestError(f"{text!r} is not an amount of memory; give a str such as '4g' or '512m'")
    return float(found[1]) * _POWERS[found[2].lower()]


def fray_placement(resources: "ResourceConfig", replicas: int, gang: bool, region: str | None = None) -> Placement:
    """Return where a job's tasks go.

    Args:
        resources: the resources of each task.
        replicas: the number of tasks; on TPUs, of all slices together, as Fray counts them.
        gang: whether tasks with GPUs, or on slices of a single VM, are one gang. On larger slices they always are.
        region: where the tasks go unless ``resources`` say otherwise.

    Raises:
        InvalidRequestError: a value makes no sense, or two contradict each other.
    """
    device = resources.device
    amounts: dict[str, Any] = {"cpu": resources.cpu, "memory_gb": size_in_bytes(resources.ram) / BYTES_PER_GB}
    preferences: list[Constraint] = [] if resources.preemptible else [_NOT_PREEMPTIBLE]
    if device.kind == "tpu":
        placed = _on_slices(get_tpu_config(device.variant), replicas, gang, amounts)
        of_device = _of_tpu(resources)
    else:
        gpus, of_device = (device.chip_count() if device.kind == "gpu" else 0), ()
        together = CoschedulingConfig(ACCELERATOR_TYPE) if gpus and gang and replicas > 1 else None
        placed = placement_of(ResourceSpec(**amounts, replicas=replicas, gpu=gpus), together)
        if gpus and device.variant != "auto":
            named = [device.variant, *(resources.device_alternatives or ())]
            labels = dict.fromkeys((*named, *(_MEMORY_OF_GPU.sub("", name) for name in named)))
            of_device = (Constraint(ACCELERATOR_TYPE, ConstraintOp.IN, list(labels)),)
            preferences += [Constraint(ACCELERATOR_TYPE, ConstraintOp.IN, named)] if len(labels) > len(named) else []
    kept = (one for one in placed.constraints if one.key not in {constraint.key for constraint in of_device})
    constraints = (*kept, *of_device, *_of_place(resources, region))
    return replace(placed, constraints=constraints, preferences=(*preferences, *placed.preferences))


def _on_slices(tpu: TPUConfig, replicas: int, gang: bool, amounts: dict[str, Any]) -> Placement:
    slices, left = divmod(replicas, tpu.vm_count)
    if left or slices < 1:
        raise InvalidJobError(
            f"replicas is {replicas}, but every {tpu.name} slice has {tpu.vm_count} VMs with one task each; give"
            f" ResourceConfig.with_tpu({tpu.name!r}, slice_count=…), which counts them, or a multiple of {tpu.vm_count}"
        )
    if tpu.vm_count == 1 and (slices == 1 or not gang):
        return placement_of(ResourceSpec(**amounts, replicas=replicas, device=tpu), None)
    return placement_of(ResourceSpec(**amounts, device=tpu), CoschedulingConfig(num_groups=slices))


def _of_tpu(resources: "ResourceConfig") -> tuple[Constraint, ...]:
    """Return constraints for the type of the slices or its alternatives, and for their topology."""
    device = resources.device
    types = [get_tpu_config(variant) for variant in (device.variant, *(resources.device_alternatives or ()))]
    if len({(tpu.vm_count, tpu.chips_per_vm) for tpu in types}) > 1:
        raise InvalidJobError(
            f"{', '.join(tpu.name for tpu in types)} can't stand in for each other: the numbers of their VMs, or of"
            " chips in a VM, differ"
        )
    shape = getattr(device, "topology", None)
    of_shape = (Constraint(TOPOLOGY, ConstraintOp.EQ, shape),) if shape else ()
    return (Constraint(TPU_TOPOLOGY, ConstraintOp.IN, [tpu.name for tpu in types]), *of_shape)


def inherited_place(resources: "ResourceConfig", region: str | None) -> tuple[Constraint, ...]:
    """Return the constraint for the region of the task that submits a job, for a job that names no place."""
    if resources.regions or resources.zone or region is None:
        return ()
    return (Constraint("region", ConstraintOp.IN, [region]),)


def _of_place(resources: "ResourceConfig", region: str | None) -> tuple[Constraint, ...]:
    """Return constraints for region and zone, which operators give as labels."""
    found = list(inherited_place(resources, region))
    regions = list(resources.regions or ())
    if ANY_REGION in regions and len(regions) > 1:
        raise InvalidRequestError(f"regions is {regions}: give regions, or {ANY_REGION!r} alone for any")
    if regions and ANY_REGION not in regions:
        found.append(Constraint("region", ConstraintOp.IN, regions))
    if resources.zone:
        found.append(Constraint("zone", ConstraintOp.EQ, resources.zone))
    return tuple(found)


# -- entrypoint --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, run without a shell. Its output is the task's output.

    Raises, when it is called:
        subprocess.CalledProcessError: the program ended with another exit code than 0, or by a signal.
        OSError: the program can't be started, for example because the host does not have it.
    """

    command: str
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        subprocess.run([self.command, *self.arguments], check=True)


@dataclass(frozen=True, slots=True)
class InTask:
    """A function that a task runs with our client as ``fray.current_client.current_client()``.

    It is unpickled after the client is set: modules that ask for the client when they are imported get ours, too. Its
    result is dropped, as Fray drops it.
    """

    pickled: bytes
    client: MakesClient

    @classmethod
    def of(cls, function: Callable[[], Any], client: MakesClient) -> "InTask":
        """Pickle a function; raises InvalidFunctionError if it can't be pickled."""
        return cls(pickle_function(function, name_of(function)), client)

    def __call__(self) -> None:
        with as_current_client(self.client()):
            function = cloudpickle.loads(self.pickled)
            try:
                function()
            except Exception:
                if not isinstance(function, Command):  # which prints its own
                    traceback.print_exc()  # handles of the job read it in the log
                raise


def _function_of(entrypoint: "Entrypoint") -> Callable[[], Any]:
    if (asked := entrypoint.callable_entrypoint) is not None:
        return functools.partial(asked.callable, *asked.args, **asked.kwargs)
    if (program := entrypoint.binary_entrypoint) is not None:
        return Command(program.command, tuple(program.args))
    raise InvalidFunctionError("the entrypoint has neither a function nor a program; see Entrypoint.from_callable")
