"""Builds the checked, complete request of a job, without a cluster."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Unpack

from iris_ray.actors.host.task_environment import split_by_start
from iris_ray.actors.protocol.messages import HOST_SILENCE_S, NO_OWNER_YET, ProcessSpec, RunRequest
from iris_ray.actors.protocol.services import module_of
from iris_ray.client.connection import current_user, new_job_id
from iris_ray.client.placement import Placement, on_slices
from iris_ray.client.remote_options import (
    TaskOptions,
    function_and_options,
    plain_variables,
    require_env_travels,
    sent_variables,
)
from iris_ray.client.run_options import require_valid, takes
from iris_ray.client.user_function import name_of, pickle_function, require_no_arguments
from iris_ray.errors import InvalidFunctionError, InvalidRequestError
from iris_ray.model.checks import OneOf, Seconds, of_text, require
from iris_ray.model.job_spec import OPTIONS_OF_A_JOB, JobSpec, require_reason
from iris_ray.model.options import ACTOR, END, OPTIONS, JobOptions, PriorityBand
from iris_ray.model.secret import SecretValue
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import GPU
from iris_ray.settings import NOTIFY, PRIORITY, PRIORITY_REASON, TEAM, TEST_HOST_SILENCE_S
from iris_ray.task.job_info import get_job_info

MAX_NAME_LENGTH = 100
"""Limit for a job's name: it is a part of ids, of keys and of file names."""
MAX_SPEC_BYTES = 100_000
"""Limit for the pickled `JobSpec`, which the Controller writes into the cluster's key-value store."""

FORKABLE = {"env_vars", "working_dir", "py_modules", "excludes", "pip", "uv", "conda", "py_executable", "config"}
"""The parts of a runtime environment that also a fork can have."""

_FIELDS = {field.name for field in fields(RunRequest)}


@takes()
def make_pod_request(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int],
    name: str | None = None,
    **options: Unpack[JobOptions],
) -> RunRequest:
    """Return the request of a gang on whole slices; arguments and errors as for `run_on_pod`."""
    if isinstance(remote_fn, str):
        raise InvalidFunctionError(
            f"the first argument is the str {remote_fn!r}; the function comes first, then the type"
        )
    return make_request(remote_fn, on_slices(get_tpu_config(tpu_type), num_slices), name, **options)


@takes()
def make_request(
    remote_fn: Callable[[], Any] | Any, placement: Placement, name: str | None = None, **options: Unpack[JobOptions]
) -> RunRequest:
    """Check everything that can be checked without a cluster, and return the complete request.

    Args:
        remote_fn: a function without arguments, or a Ray remote function, whose options are honoured.
        placement: its tasks and their hosts.
        name: the job's name; None: the name in the remote function's options, or of the function.
        options: as for `IrisClient.submit`.

    Raises:
        InvalidRequestError: the first thing that is wrong, and how to mend it.
    """
    require_valid(options)
    placement = placement.on_parts(options["topology"])
    function, asked = function_and_options(remote_fn, placement.device)
    own_name = name_of(function)
    secrets = {
        name: SecretValue(one.value, one.as_file, stored=one.stored) for name, one in (options["secrets"] or {}).items()
    }
    stored = tuple(sorted({one.stored for one in secrets.values() if one.stored}))
    spec = _make_spec(name or asked.name or own_name.strip("<>"), placement, asked, stored, options)
    if spec.notify:
        module_of("notify", "destination").destinations_of(spec)  # refuses invalid ones before anything is connected
    require_no_arguments(function, own_name)
    sent = {name: value for name, value in sent_variables().items() if name not in secrets}
    env = sent | asked.env | plain_variables(options["env"] or {})
    require_env_travels(env)
    # Without TPU a task must not have JAX imported before it is told to keep off its host's chips.
    preload = tuple(options["preload"]) if placement.device else ()
    _require_secret(secrets, env, preload)
    at_start, at_run = split_by_start(env, preload)
    runtime_env = asked.runtime_env | ({"env_vars": at_start} if at_start else {})
    return RunRequest(
        spec=spec,
        pickled_function=pickle_function(function, own_name),
        env=at_run,
        process=ProcessSpec(
            runtime_env, preload, spec.processes_per_host, _starts_as_actor(options, spec, runtime_env)
        ),
        secrets=secrets,
        **_options_that_travel(options),
    )


def _starts_as_actor(options: JobOptions, spec: JobSpec, runtime_env: Mapping[str, Any]) -> bool:
    """Return whether the task processes have to be actors of Ray, or are wanted as actors.

    Ray names an actor's GPUs in its variables, and starts its own workers only in a container or with a hook.
    """
    return options["start"] == ACTOR or bool(spec.resources.get(GPU) or runtime_env.keys() - FORKABLE - {"_ray_commit"})


def _require_secret(secrets: Mapping[str, SecretValue], env: Mapping[str, str], preload: Sequence[str]) -> None:
    """Refuse secrets that Ray's logs would show, or whose variables also have other values."""
    for name in split_by_start(dict.fromkeys(secrets, ""), preload)[0]:
        raise InvalidRequestError(
            f"secrets has {name}, which acts when a process starts; such variables travel as Ray's runtime_env, which"
            " Ray's own logs may show, so it can't be secret: give it another name, or set it in the function"
        )
    for name in secrets.keys() & env.keys():
        raise InvalidRequestError(f"{name} is in secrets and among the other variables; give it once")


def _options_that_travel(options: JobOptions) -> dict[str, Any]:
    """Return the options that are fields of a `RunRequest`, seconds as float."""
    asked: dict[str, Any] = {name: value for name, value in options.items() if name in _FIELDS - {"env", "secrets"}}
    if asked["host_silence"] is None:
        asked["host_silence"] = os.environ.get(TEST_HOST_SILENCE_S, HOST_SILENCE_S)
    in_seconds = {name for name, value in asked.items() if isinstance(OPTIONS[name].check, Seconds)}
    return {name: float(value) if name in in_seconds and value is not None else value for name, value in asked.items()}


def _make_spec(
    name: str, placement: Placement, asked: TaskOptions, stored_secrets: tuple[str, ...], options: JobOptions
) -> JobSpec:
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequestError(
            f"the job's name ({name[:20]}…) has {len(name)} characters, and the limit is {MAX_NAME_LENGTH};"
            " give a shorter one"
        )
    if not name.isprintable():
        raise InvalidRequestError(
            f"the job's name {name!r} has characters that can't be printed; it is a part of ids, so leave them out"
        )
    spec = JobSpec(
        job_id=new_job_id(name),
        owner=NO_OWNER_YET,
        name=name,
        user=current_user(),
        device=placement.device.name if placement.device else None,
        replicas=placement.replicas,
        coscheduling=placement.coscheduling,
        whole_groups=placement.whole_groups,
        resources={**placement.resources, **asked.resources},
        stored_secrets=stored_secrets,
        **_options_of_the_job(placement, options),
    )
    if (size := len(pickle.dumps(spec))) > MAX_SPEC_BYTES:
        raise InvalidRequestError(
            f"the request for job {name} takes {size:,} bytes, and the limit is {MAX_SPEC_BYTES:,}; give fewer or"
            " shorter constraints, preferences, tolerations and resources"
        )
    return spec


def _options_of_the_job(placement: Placement, options: JobOptions) -> dict[str, Any]:
    """Return the options that are fields of a `JobSpec`; constraints and preferences follow those of the placement."""
    asked = {name: value for name, value in options.items() if name in OPTIONS_OF_A_JOB}
    band = _own_band() if options["priority"] is None else options["priority"]
    return asked | {
        "constraints": (*placement.constraints, *options["constraints"]),
        "preferences": (*placement.preferences, *options["preferences"]),
        "team": options["team"] or _own_team(),
        "notify": (NOTIFY.read() or "").split() if options["notify"] is None else options["notify"],
        "priority": band,
        "priority_reason": _reason_for(band, options["priority_reason"]),
        "children": _own_children() if options["children"] is None else options["children"],
    }


def _reason_for(band: PriorityBand, given: str | None) -> str | None:
    """Return the reason for a job's band: that of the option, or of ``$IRIS_PRIORITY_REASON``.

    Raises:
        InvalidRequestError: the job is in the band SYSTEM without a reason, or has a reason in another band.
    """
    if band is not PriorityBand.SYSTEM:
        if given is not None:
            raise InvalidRequestError(
                f"priority_reason is given, and the job is in the band {band.name.lower()}; leave it out, or choose the"
                " band system"
            )
        return None
    reason = given or PRIORITY_REASON.read() or None
    require_reason(band, reason)
    require(PRIORITY_REASON.name, reason, of_text(OPTIONS["priority_reason"].check))
    return reason


def _own_team() -> str:
    """Return the team of this process's jobs: that of ``$IRIS_TEAM``.

    Raises:
        InvalidRequestError: no team can have that name.
    """
    named = TEAM.read() or ""
    require(TEAM.name, named, of_text(OPTIONS["team"].check))
    return named


def _own_children() -> str:
    """Return what happens to the children of this process's jobs: as to this one, if it is a task's."""
    me = get_job_info()
    return END if me is None else me.children


def _own_band() -> PriorityBand:
    """Return the band of this process's jobs: that of ``$IRIS_PRIORITY``, which a task has from its job.

    Raises:
        InvalidRequestError: there is no such band.
    """
    named = PRIORITY.read() or PriorityBand.INTERACTIVE.name
    bands = {band.name.lower(): band for band in PriorityBand}
    require(PRIORITY.name, named.lower(), OneOf(tuple(bands)))
    return bands[named.lower()]
