"""The options of a run: their names, types and defaults, once for every public function that takes them."""

import difflib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast, get_type_hints

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown
from iris_ray.model.constraints import Constraint
from iris_ray.model.job_spec import (
    EXIT_GRACE_S,
    GROW_AFTER_S,
    MAX_RETRIES_FAILURE,
    MAX_RETRIES_PREEMPTION,
    PriorityBand,
)

KEEP_WARM_S = 60.0


class ContainerOptions(TypedDict, total=False):
    """What every way to run a gang takes, in containers, too; `run_on_pod` explains each."""

    constraints: Sequence[Constraint]
    preferences: Sequence[Constraint]
    tolerations: Sequence[str]
    priority: PriorityBand
    scheduling_timeout: float | None
    keep_warm: float
    spares: int
    grow_after: float | None
    stall_timeout: float | None


class GangOptions(ContainerOptions, total=False):
    """`ContainerOptions`, and those of a function that runs in a process of ours."""

    preload: Sequence[str]
    exit_grace: float


class RunOptions(GangOptions, total=False):
    """`GangOptions`, and the retries of a gang."""

    max_retries_preemption: int
    max_retries_failure: int


class ModeOptions(TypedDict, total=False):
    """Where a run happens; `run_on_pod` explains both."""

    mode: str | None
    simulate: str | None


class PodGangOptions(GangOptions, ModeOptions, total=False):
    """`GangOptions` of the ``run_on_pod`` family."""


class PodOptions(RunOptions, ModeOptions, total=False):
    """`RunOptions` of the ``run_on_pod`` family."""


class JobOptions(RunOptions, total=False):
    """`RunOptions`, and what only `IrisClient.submit` takes, which explains each."""

    max_task_failures: int | None
    env: Mapping[str, str] | None


class _AllOptions(JobOptions, ModeOptions):
    """Every option of every public function."""


DEFAULTS = _AllOptions(
    constraints=(),
    preferences=(),
    tolerations=(),
    max_retries_preemption=MAX_RETRIES_PREEMPTION,
    max_retries_failure=MAX_RETRIES_FAILURE,
    max_task_failures=None,
    priority=PriorityBand.INTERACTIVE,
    scheduling_timeout=None,
    env=None,
    keep_warm=KEEP_WARM_S,
    preload=(),
    spares=0,
    grow_after=GROW_AFTER_S,
    stall_timeout=None,
    exit_grace=EXIT_GRACE_S,
    mode=None,
    simulate=None,
)
"""In the order in which `help` shows the options."""

Function = TypeVar("Function", bound=Callable[..., Any])


def takes(options: type, called: str | None = None, **defaults: object) -> Callable[[Function], Function]:
    """Return a decorator for a function that ends in ``**options: Unpack[...]``.

    The function then gets every option, with its default if the caller has left it out. ``help`` and
    ``inspect.signature`` show each option as a keyword-only parameter.

    Args:
        options: the TypedDict of the function's options.
        called: what its callers write, if that is more than the function's name.
        defaults: this function's own defaults, in place of those in `DEFAULTS`.

    Raises:
        TypeError: by the decorated function: it has no option of that name, or takes fewer arguments by position. The
            message has the nearest name, or all.
    """
    hints = get_type_hints(options)
    values = {name: defaults.get(name, value) for name, value in DEFAULTS.items() if name in hints}

    def decorate(function: Function) -> Function:
        name_of_it = called or function.__name__
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        shown = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hints[name])
            for name, value in values.items()
        ]
        known = [parameter.name for parameter in (*own, *shown) if parameter.name != "self"]
        by_position = [p.name for p in own if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if len(args) > len(by_position):
                raise TypeError(_too_many_by_position(name_of_it, by_position, known))
            for name in given:
                if name not in known:
                    raise TypeError(_unknown_option(name_of_it, name, known))
            return function(*args, **(values | given))

        call.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return cast(Function, call)

    return decorate


def _too_many_by_position(function: str, by_position: Sequence[str], known: Sequence[str]) -> str:
    first = [name for name in by_position if name != "self"]
    by_name = [name for name in known if name not in first]
    return f"{function}() takes {' and '.join(first)} by position, and the rest by name: {', '.join(by_name)}"


_OF_RAY = {
    "env": 'runtime_env={"env_vars": {…}}',
    "env_vars": 'runtime_env={"env_vars": {…}}',
    "runtime_env": "runtime_env={…}",
    "name": 'name="…"',
    "resources": "resources={…}",
    "num_cpus": "num_cpus=…",
    "memory": "memory=…",
}
"""What people look for among the options of a run, and Ray has among those of a function."""


def _unknown_option(function: str, name: str, known: Sequence[str]) -> str:
    what = f"{function}() got an unexpected keyword argument {name!r}"
    if name in _OF_RAY and known[0] == "remote_fn":
        return f"{what}; the function carries it: @ray.remote({_OF_RAY[name]})"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"{what}; did you mean {near[0]!r}?"
    return f"{what}; it takes {', '.join(known)}"


_SEVERAL = {
    "constraints": '[Constraint("zone", ConstraintOp.EQ, "us-a")]',
    "preferences": '[Constraint("zone", ConstraintOp.EQ, "us-a")]',
    "tolerations": '["spot"]',
}


def require_valid(options: JobOptions) -> None:
    """Refuse options that never reach the `JobSpec`, or not as they are; it checks the others itself.

    Raises:
        InvalidRequestError: the first one that makes no sense, with what to give instead.
    """
    for name, example in _SEVERAL.items():
        if not isinstance(value := options[name], (list, tuple)):  # type: ignore[literal-required]
            raise InvalidRequestError(f"{name} is {shown(value)}; give a list, such as {example}")
    keep_warm, stall_timeout = options["keep_warm"], options["stall_timeout"]
    if not _is_duration(keep_warm) and keep_warm != math.inf:
        raise InvalidRequestError(f"keep_warm is {shown(keep_warm)}; give seconds, 0 or more")
    if stall_timeout is not None and not _is_positive(stall_timeout):
        raise InvalidRequestError(f"stall_timeout is {shown(stall_timeout)}; give seconds, more than 0, or None")
    if not _is_duration(exit_grace := options["exit_grace"]):
        raise InvalidRequestError(f"exit_grace is {shown(exit_grace)}; give seconds, 0 or more")
    _require_modules(options["preload"])
    env = options["env"]
    if env is not None and not (
        isinstance(env, Mapping) and all(isinstance(part, str) for item in env.items() for part in item)
    ):
        raise InvalidRequestError("env must be a mapping of names to values, all str")


def _require_modules(preload: object) -> None:
    if not isinstance(preload, (list, tuple)) or not all(isinstance(module, str) for module in preload):
        raise InvalidRequestError(f'preload is {shown(preload)}; give a list of module names, such as ["jax"]')
    if wrong := [module for module in preload if not all(part.isidentifier() for part in module.split("."))]:
        raise InvalidRequestError(f"preload holds {wrong[0]!r}, which is not the name of a module")


def _is_positive(value: object) -> bool:
    return _is_duration(value) and value != 0


def _is_duration(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
