"""Gives public functions the signature, the help and the refusals of options from the table in `model/options.py`."""

import difflib
import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

from iris_ray.actors.protocol.services import module_of
from iris_ray.errors import InvalidJobError, InvalidModeError, InvalidRequestError
from iris_ray.model.checks import require
from iris_ray.model.job_spec import OPTIONS_OF_A_JOB
from iris_ray.model.options import OPTIONS, ModeOptions, Option, options_of
from iris_ray.settings import MODE

if TYPE_CHECKING:
    from iris_ray.local.mode import Mode

Function = TypeVar("Function", bound=Callable[..., Any])

_DOCSTRING_WIDTH = 120
_CLUSTER = "cluster"


def takes(called: str | None = None) -> Callable[[Function], Function]:
    """Return a decorator for a function that ends in ``**options: Unpack[...]``.

    The function then gets every option of that `TypedDict`, with the function's default from the table if the caller
    leaves it out. ``help`` and ``inspect.signature`` show each option as a keyword-only parameter. In the docstring,
    the explanations of all options replace the line that begins with ``options:``.

    Args:
        called: the function as its callers write it, if that is more than its name.

    Raises:
        TypeError: raised by the decorated function, if it has no option of a name, or takes fewer arguments by
            position. The message has the nearest name, or all names.
    """

    def decorate(function: Function) -> Function:
        name_of_it = called or function.__name__
        signature = inspect.signature(function)
        *own, rest = signature.parameters.values()
        (group,) = get_args(rest.annotation)
        hints, options = get_type_hints(group), options_of(group)
        values = {name: option.default_of(name_of_it) for name, option in options.items()}
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
        call.__doc__ = _with_options(function.__doc__, options)
        return cast(Function, call)

    return decorate


def without_mode(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request, without the mode."""
    return {name: value for name, value in options.items() if name not in ModeOptions.__optional_keys__}


def local_mode(mode: str | None, simulate: str | None, environ: Mapping[str, str] = os.environ) -> "Mode | None":
    """Return the mode of a run on this machine, which the service ``local`` carries out; None for a run on the cluster.

    Args:
        mode, simulate: the options of these names.
        environ: the environment, whose variable ``IRIS_RAY_MODE`` counts without them.

    Raises:
        InvalidModeError: there is no such mode or fault.
        ServiceUnavailableError: the service was taken out of iris_ray.
    """
    if simulate is None and _is_cluster((MODE.read(environ) or _CLUSTER) if mode is None else mode):
        return None
    chosen: Mode = module_of("local", "mode").chosen_mode(mode, simulate, environ)
    return chosen


def require_no_local_mode() -> None:
    """Raise InvalidModeError if the variable asks for a local mode: the caller needs a cluster and its queue."""
    if (written := MODE.read()) and not _is_cluster(written):
        raise InvalidModeError(
            f"{MODE.name} is {written!r}, which is for run_on_pod; a client needs a cluster with its queue: unset the"
            ' variable, or try IrisClient.local({"v4-16": 2})'
        )


def _is_cluster(written: object) -> bool:
    """Return whether a mode, as it was written, is that of a cluster."""
    return isinstance(written, str) and written.strip().lower() == _CLUSTER


def require_valid(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for the first option with a bad value; the message says what to give.

    It is an InvalidJobError if the option is a part of the job.
    """
    for name, value in options.items():
        require(name, value, OPTIONS[name].check, InvalidJobError if name in OPTIONS_OF_A_JOB else InvalidRequestError)


def _with_options(docstring: str | None, options: Mapping[str, Option]) -> str | None:
    """Replace the line ``options: ...`` of a docstring by an explanation of each option."""
    lines = (docstring or "").split("\n")
    places = [number for number, line in enumerate(lines) if line.lstrip().startswith("options: ")]
    for number in places[:1]:
        indent = lines[number][: -len(lines[number].lstrip())]
        lines[number : number + 1] = [
            line for name, option in options.items() for line in _explained(name, option, indent)
        ]
    return "\n".join(lines) if docstring else docstring


def _explained(name: str, option: Option, indent: str) -> list[str]:
    text = f"{name}: {option.check.wanted}. {option.help} {option.more}"
    return textwrap.wrap(
        text, _DOCSTRING_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False
    )


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
"""Options that people look for here, and that Ray's remote functions carry."""


def _unknown_option(function: str, name: str, known: Sequence[str]) -> str:
    what = f"{function}() got an unexpected keyword argument {name!r}"
    if name in _OF_RAY and known[0] == "remote_fn":
        return f"{what}; the function carries it: @ray.remote({_OF_RAY[name]})"
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.6):
        return f"{what}; did you mean {near[0]!r}?"
    return f"{what}; it takes {', '.join(known)}"
