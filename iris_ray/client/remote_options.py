"""Translates the options of a Ray remote function for a gang: each is honoured, or refused with a reason."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.actor import ActorClass
from ray.remote_function import RemoteFunction
from ray.runtime_env import RuntimeEnv

from iris_ray.actors.calls.ray_internals import remote_function_parts
from iris_ray.errors import InvalidFunctionError, InvalidRequestError, UnsupportedOptionError
from iris_ray.model.topology import TPUConfig
from iris_ray.model.workers import GPU
from iris_ray.settings import SENT_VARIABLES


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The options of each task of a gang.

    Attributes:
        runtime_env: Ray's runtime environment, without ``env_vars``.
        env: the user's environment variables.
        resources: by Ray's resource names, without the chips: every task has all chips of its host.
        name: the user's name for the task, or None.
    """

    runtime_env: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)
    name: str | None = None


# Every gang satisfies these, so asking for them changes nothing.
_ALWAYS_SO = {"max_calls": 1, "num_returns": 1, "num_gpus": 0, "max_retries": 0, "retry_exceptions": False}

_REASONS = {
    "max_calls": "a task process runs one task and is never used again; max_calls=1 is the only value",
    "num_returns": "each task returns one value; return a tuple instead",
    "num_gpus": "the hosts of a TPU slice have no GPUs",
    "max_retries": "a single task can't be retried, only the whole gang: pass max_retries_failure to run_on_pod",
    "retry_exceptions": "a single task can't be retried, only the whole gang: pass max_retries_failure to run_on_pod",
    "scheduling_strategy": "iris_ray decides where tasks run: one on every host of a slice",
    "label_selector": "iris_ray decides where tasks run: one on every host of a slice",
    "accelerator_type": "a TPU type says it already; for GPUs use a constraint on ray.io/accelerator-type",
}


def function_and_options(
    remote_fn: Callable[[], Any] | Any, config: TPUConfig | None
) -> tuple[Callable[..., Any], TaskOptions]:
    """Return the plain function and its options.

    Args:
        remote_fn: a callable, or a Ray remote function.
        config: the TPU type that it will run on; None without TPU.

    Raises:
        InvalidFunctionError: it is neither.
        UnsupportedOptionError: it has an option that a gang can't honour.
    """
    if isinstance(remote_fn, RemoteFunction):
        function, given = remote_function_parts(remote_fn)
        return function, _translate(given, config)
    if isinstance(remote_fn, ActorClass):
        raise InvalidFunctionError("the first argument is a Ray actor class; give a function or a Ray remote function")
    if isinstance(remote_fn, type):
        raise InvalidFunctionError(f"{remote_fn.__name__} is a class; give a function, or an instance that is callable")
    if callable(remote_fn):
        return remote_fn, TaskOptions()
    what = f"a value of type {type(remote_fn).__name__}; did you call the function?"
    if hasattr(remote_fn, "execute"):
        what = "a bound DAG node; give the function itself"
    elif hasattr(remote_fn, "remote"):
        what = "the answer of .options(...); give the options to @ray.remote(...) instead"
    raise InvalidFunctionError(f"the first argument must be a function or a Ray remote function, and is {what}")


def _translate(given: dict[str, Any], config: TPUConfig | None) -> TaskOptions:
    given = {key: value for key, value in given.items() if value is not None}
    runtime_env = dict(given.pop("runtime_env", {}) or {})
    if unknown := set(runtime_env) - RuntimeEnv.known_fields - {"_ray_commit"}:
        raise UnsupportedOptionError(f"runtime_env has no {sorted(unknown)}; it has {sorted(RuntimeEnv.known_fields)}")
    env = plain_variables(runtime_env.pop("env_vars", None) or {})
    name = given.pop("name", None)
    resources = _taken_resources(given, config)
    _refuse_others(given)
    return TaskOptions(runtime_env, env, resources, name)


def _taken_resources(given: dict[str, Any], config: TPUConfig | None) -> dict[str, float]:
    """Remove the options that ask for resources from those given. Return these resources, without the chips."""
    resources = {key: float(value) for key, value in (given.pop("resources", None) or {}).items()}
    claims = {"num_cpus": "CPU", "memory": "memory"} | ({} if config is not None else {"num_gpus": GPU})
    for option, resource in claims.items():
        if option in given:
            resources[resource] = float(given.pop(option))
    _require_all_chips(resources.pop("TPU", None), config)
    return {k: v for k, v in resources.items() if v}


def _require_all_chips(chips: float | None, config: TPUConfig | None) -> None:
    if chips and config is None:
        raise UnsupportedOptionError(
            'resources={"TPU": …} without a TPU type; say which, for example device=tpu_device("v4-8")'
        )
    if chips is not None and config is not None and chips != config.chips_per_vm:
        raise UnsupportedOptionError(
            f'resources={{"TPU": {chips:g}}}: a task gets all {config.chips_per_vm} chips of its {config.name} host,'
            " because libtpu allows one gang a host; leave TPU out. processes_per_host shares them among processes"
        )


def _refuse_others(left: Mapping[str, Any]) -> None:
    """Refuse the remaining options, except those that every gang satisfies."""
    for option, value in left.items():
        if option in _ALWAYS_SO and value == _ALWAYS_SO[option]:
            continue
        reason = _REASONS.get(option, "iris_ray does not know how to honour it for a gang")
        raise UnsupportedOptionError(f"the remote function's option {option}={value!r}: {reason}")


# -- environment limits ------------------------------------------------------------------------------------------------

MAX_ENV_BYTES = 1 << 20
"""Limit in bytes for all variables of a job, names included: they travel to every host with every attempt."""
MAX_VARIABLE_BYTES = 128 * 1024 - 1
"""Limit for one variable, ``NAME=value``: Linux starts no process with a longer one (MAX_ARG_STRLEN, less the NUL)."""

_INSTEAD = "put it into a file, or let the function close over it: that travels by Ray's object store"


def plain_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables as plain str. A value of a subclass, such as an Enum, might need a module that a host lacks."""
    return {_plain(name): _plain(value) for name, value in env.items()}


def _plain(text: str) -> str:
    return str.__str__(text) if isinstance(text, str) else text


def require_env_travels(env: Mapping[str, str]) -> None:
    """Refuse variables that no process can have, or that are too large for a launch. No message has their values.

    Raises:
        InvalidRequestError: names the first bad variable, or the limit that they exceed.
    """
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidRequestError(
                f"the environment variable {name!r} can't be set: its name is empty or holds =, or there is a NUL in it"
            )
        try:
            f"{name}{value}".encode(errors="surrogateescape")
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"the environment variable {name!r} can't be set: it holds half of a character (a lone surrogate)"
            ) from None
    sizes = {name: len(f"{name}={value}".encode(errors="replace")) for name, value in env.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(largest, 0) > MAX_VARIABLE_BYTES:
        raise InvalidRequestError(
            f"the environment variable {largest[:100]} takes {sizes[largest]:,} bytes, and the limit is"
            f" {MAX_VARIABLE_BYTES:,}: Linux starts no process with a longer one; {_INSTEAD}"
        )
    if (total := sum(sizes.values())) > MAX_ENV_BYTES:
        raise InvalidRequestError(
            f"the job's {len(sizes)} environment variables take {total:,} bytes in all, and the limit is"
            f" {MAX_ENV_BYTES:,}; the largest is {largest[:100]} ({sizes[largest]:,} bytes); {_INSTEAD}"
        )


def sent_variables() -> dict[str, str]:
    """Return the variables from a file on a laptop: all jobs of this process get them, as Ray doesn't pass them on."""
    names = os.environ.get(SENT_VARIABLES, "").split(",")
    return {name: os.environ[name] for name in names if name in os.environ}


_NAME = re.compile(r"[A-Za-z_]\w*")


def read_env_file(path: str | Path) -> dict[str, str]:
    """Return the variables of a file: ``NAME=value`` a line, as docker reads them. No message has a value.

    The value is all that follows the first ``=``, quotes included. Empty lines and lines that begin with # are skipped;
    a name alone passes this process's value on.

    Raises:
        InvalidRequestError: the file can't be read, or a line makes no sense.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise InvalidRequestError(f"the file of variables {path} can't be read: {why}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"{path}, line {number}: give NAME=value, or a name alone to pass yours on")
        if not equals and name not in os.environ:
            raise InvalidRequestError(f"{path}, line {number}: {name} is not set here; give {name}=value")
        found[name] = value if equals else os.environ[name]
    return found
