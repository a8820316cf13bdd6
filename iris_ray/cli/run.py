"""``iris-ray run``: a script or a function on TPU slices, from start to end."""

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from iris_ray.cli.exits import FAILED, INTERRUPTED, say_error
from iris_ray.cli.options import address_option, cluster
from iris_ray.cli.questions import on_a_terminal
from iris_ray.cli.script import Script, find_target, is_at_home
from iris_ray.cli.tables import cut, one_line
from iris_ray.errors import (
    InvalidFunctionError,
    InvalidRequestError,
    InvalidSliceCountError,
    IrisError,
    RemoteUserError,
)
from iris_ray.retry import MAX_RETRIES_FAILURE, MAX_RETRIES_PREEMPTION

_LONGEST_RESULT = 500
_CANCEL_TIMEOUT_S = 30.0
_OUTER_ERROR = "ray.exceptions.RayTaskError: "
_OUR_FRAME = re.compile(r'  File "(<frozen runpy>|[^"]*/iris_ray/(actors|cli)/[^"]*)"')


class ScriptCommand(click.Command):
    """Says where the script's own options go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = f"{error.message} If it is the script's own, write it after --: ... -- {error.option_name} ..."
            raise click.NoSuchOption(error.option_name, hint, error.possibilities, ctx) from None


def slice_counts_option(_: click.Context, __: click.Parameter, value: str) -> int | list[int]:
    """``"2"`` is 2, ``"2,4"`` is [2, 4]."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidSliceCountError(f"--num-slices is {value!r}; give a number, or several such as 2,4")
    return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]


def environment_option(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` for what it is here."""
    found = {}
    for item in values:
        name, equals, value = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InvalidRequestError(f"--env {name}: no name of a variable; give NAME=VALUE, or NAME to pass yours on")
        if not equals and name not in os.environ:
            raise InvalidRequestError(f"--env {name}: it is not set here; give {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


@click.command(cls=ScriptCommand)
@click.argument("target", metavar="SCRIPT|MODULE:FUNCTION")
@click.argument("tpu_type", metavar="TPU_TYPE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@click.option("--num-slices", default="1", show_default=True, callback=slice_counts_option, metavar="N[,N...]",
              help="How many slices; 2,4 means 4 if they are free now, else 2.")  # fmt: skip
@click.option("--max-retries-failure", type=int, default=MAX_RETRIES_FAILURE, show_default=True, metavar="N",
              help="Further attempts after errors and crashes.")  # fmt: skip
@click.option("--max-retries-preemption", type=int, default=MAX_RETRIES_PREEMPTION, show_default=True, metavar="N",
              help="Further attempts after lost hosts.")  # fmt: skip
@click.option("--env", "-e", multiple=True, callback=environment_option, metavar="NAME[=VALUE]",
              help="An environment variable of the tasks; may be repeated.")  # fmt: skip
@click.option("--working-dir", type=click.Path(exists=True, file_okay=False), metavar="DIR",
              help="Send this directory to the hosts, and run there.")  # fmt: skip
@address_option
def run(
    target: str,
    tpu_type: str,
    arguments: tuple[str, ...],
    num_slices: int | list[int],
    max_retries_failure: int,
    max_retries_preemption: int,
    env: dict[str, str],
    working_dir: str | None,
) -> None:
    """Run a script or function on every host of TPU slices.

    One fresh process per host, all or none; it starts again from the beginning after a preemption. What it prints
    appears here, and while it waits, why. Ctrl-C cancels it. The job ends with this command; it needs iris_ray on
    the hosts, and your script's text travels there by itself. Modules beside it need --working-dir.

    ARGUMENTS are the script's sys.argv, or strings for the function, whose results are printed.

    \b
      iris-ray run train.py v4-32 --num-slices 2,4 -- --steps 1000
      iris-ray run train:main v5litepod-16
    """
    task, name = as_task(find_target(target, arguments, working_dir or "."), arguments, env, working_dir is None)
    from iris_ray.launcher import make_request, run_on_pod_ray

    # What can't work is refused before anything is connected.
    make_request(task, tpu_type, num_slices, max_retries_preemption, max_retries_failure, keep_warm=0, preload=())
    options = {"runtime_env": {"working_dir": working_dir}} if working_dir else {}
    with cluster(show_logs=True, **options):
        ref = run_on_pod_ray.remote(
            task, tpu_type, num_slices, max_retries_preemption, max_retries_failure, keep_warm=0
        )
        results = _wait(ref, name)
    for index, result in enumerate(results):
        if result is not None:
            click.echo(f"task {index}: {cut(one_line(repr(result)), _LONGEST_RESULT)}")


def as_task(
    target: Script | Callable[..., Any], arguments: Sequence[str], env: dict[str, str], ship: bool
) -> tuple[Any, str]:
    """What `run_on_pod` takes, and what people call it.

    Args:
        target: the script or function.
        arguments: for a function.
        env: environment variables of its tasks.
        ship: whether a function of the current directory travels by value; the hosts can't import it.

    Raises:
        InvalidFunctionError: a Ray remote function with arguments or variables, which it can't take from here.
    """
    import ray
    from ray import cloudpickle
    from ray.remote_function import RemoteFunction

    from iris_ray.actors.ray_internals import remote_function_parts
    from iris_ray.submission import require_no_arguments

    function = remote_function_parts(target)[0] if isinstance(target, RemoteFunction) else target
    if ship and (module := is_at_home(function)):
        cloudpickle.register_pickle_by_value(module)
    if hasattr(target, "remote"):
        if arguments or env:
            raise InvalidFunctionError(
                "a Ray remote function takes no ARGUMENTS and no --env: say it in @ray.remote(...)"
            )
        return target, "the job"
    name = target.name if isinstance(target, Script) else getattr(target, "__name__", "function")
    call = target if isinstance(target, Script) else functools.partial(target, *arguments)
    if not isinstance(target, Script):
        _require_fit(target, name, arguments)
        require_no_arguments(call, name)

    def task() -> Any:
        return call()

    return ray.remote(name=name, runtime_env={"env_vars": env})(task), name


def _require_fit(function: Callable[..., Any], name: str, arguments: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature; the call will tell
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = f"{len(arguments)} arguments" if arguments else "no arguments"
        raise InvalidFunctionError(
            f"{name}{signature} can't be called with {given} ({error}); give them as strings after --"
        ) from None


def _wait(ref: Any, name: str) -> list[Any]:
    """The results; ends the command if there are none."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    while True:
        try:
            results: list[Any] = ray.get(ref)
            return results
        except KeyboardInterrupt:
            if not on_a_terminal() or really_cancel():
                _cancel(ref)
                say_error(f"{name} is cancelled")
                raise click.exceptions.Exit(INTERRUPTED) from None
        except RayTaskError as error:
            if isinstance(error.cause, IrisError) and not isinstance(error.cause, RemoteUserError):
                raise error.cause from None
            click.echo(users_part(str(error)), err=True)
            last = one_line(str(error.cause))
            say_error(f"{name} failed: {type(error.cause).__name__}: {last}")
            raise click.exceptions.Exit(FAILED) from None
        except RayError as error:
            say_error(f"{name} was lost: {type(error).__name__}: {one_line(error)}")
            raise click.exceptions.Exit(FAILED) from None


def users_part(text: str) -> str:
    """Of an error from the hosts: which task it was, and its traceback without the frames that are not the user's."""
    text = text.rpartition(_OUTER_ERROR)[2]
    frames = re.split(r'(?m)^(?=  File ")', text)
    ours = [number for number, frame in enumerate(frames) if _OUR_FRAME.match(frame)]
    return frames[0] + "".join(frames[ours[-1] + 1 :]) if ours else text


def really_cancel() -> bool:
    """Asks once; a second Ctrl-C is an answer, too."""
    try:
        return click.confirm("\nCancel the job?", default=True, err=True)
    except click.Abort:
        return True


def _cancel(ref: Any) -> None:
    """Returns when the job's processes are gone, or after a while."""
    import ray

    ray.cancel(ref)
    with contextlib.suppress(Exception, KeyboardInterrupt):
        ray.get(ref, timeout=_CANCEL_TIMEOUT_S)
