"""``iris-ray run``: a script or a function on TPU slices, from start to end."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from iris_ray.cli.completion import tpu_types
from iris_ray.cli.exits import FAILED, INTERRUPTED, say_error
from iris_ray.cli.job_options import ScriptCommand, job_options, marked_arguments, runtime_environment
from iris_ray.cli.options import address_option, cluster
from iris_ray.cli.questions import on_a_terminal, really_cancel
from iris_ray.cli.script import Script, find_target, is_at_home, is_tpu_type, print_error
from iris_ray.cli.tables import cut, one_line
from iris_ray.errors import InvalidFunctionError, InvalidRequestError, IrisError, RemoteUserError
from iris_ray.model.jobs import PriorityBand

_LONGEST_RESULT = 500
_CANCEL_TIMEOUT_S = 30.0
_OUTER_ERROR = "ray.exceptions.RayTaskError: "
_OUR_FRAME = re.compile(r'  File "(<frozen runpy>|[^"]*/iris_ray/(actors|cli)/[^"]*)"')


@click.command(cls=ScriptCommand)
@click.argument("target", metavar="SCRIPT|MODULE:FUNCTION")
@click.argument("second", metavar="TPU_TYPE", required=False, shell_complete=tpu_types)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@job_options
@address_option
def run(
    target: str,
    second: str | None,
    arguments: tuple[str, ...],
    tpu_type: str | None,
    num_slices: int | list[int] | None,
    name: str | None,
    priority: PriorityBand,
    max_retries_failure: int,
    max_retries_preemption: int,
    spares: int,
    stall_timeout: float | None,
    env: dict[str, str],
    working_dir: str | None,
) -> None:
    """Run a script or function on every host of TPU slices, and wait for its end.

    \b
      iris-ray run train.py v4-32
      iris-ray run train.py v4-32 --num-slices 2,4 -- --steps 1000
      iris-ray run train:main v5litepod-16

    One fresh process per host, all or none; it starts again from the beginning after a preemption. What it prints
    appears here, and while it waits, why. The job needs iris_ray on the hosts, and your script's text travels there by
    itself. Modules beside it need --working-dir.

    The job ends with this command (for one that does not: `iris-ray submit -f`). Ctrl-C asks whether to cancel it;
    Enter or a second Ctrl-C does, and n goes on waiting. Without a terminal nobody is asked, and it is cancelled.

    TPU_TYPE, which may also be given with --tpu, is one that `iris-ray workers` lists, or on a cluster that has not had
    a job `iris-ray doctor`. ARGUMENTS are the script's sys.argv[1:], or strings for the
    function, whose results are printed.
    """
    if tpu_type is None:
        tpu_type = second
    elif second is not None:  # then it is the script's
        if is_tpu_type(second) and not marked_arguments():
            raise InvalidRequestError(f"the TPU type is given twice, {second} and --tpu {tpu_type}; leave one out")
        arguments = (second, *arguments)
    found = find_target(target, arguments, working_dir or ".")
    if tpu_type is None:
        raise InvalidRequestError(f"on which TPU type? Such as: iris-ray run {target} v4-32")
    task, called = as_task(found, arguments, env, working_dir is None)
    from iris_ray.client.caller_pool import pool_of_this_process
    from iris_ray.client.job_request import make_pod_request

    # What can't work is refused before anything is connected.
    request = make_pod_request(
        task,
        tpu_type,
        1 if num_slices is None else num_slices,
        name,
        max_retries_preemption=max_retries_preemption,
        max_retries_failure=max_retries_failure,
        keep_warm=0,
        stall_timeout=stall_timeout,
        spares=spares,
        priority=priority,
    )
    with cluster(show_logs=True, **runtime_environment(working_dir)):
        ref, _ = pool_of_this_process.submit(request)
        results = _wait(ref, name or called)
    for index, result in enumerate(results):
        if result is not None:
            click.echo(f"task {index}: {cut(one_line(repr(result)), _LONGEST_RESULT)}")


def as_task(
    target: Script | Callable[..., Any],
    arguments: Sequence[str],
    env: dict[str, str],
    ship: bool,
    prints_errors: bool = False,
) -> tuple[Any, str]:
    """What `run_on_pod` takes, and what people call it.

    Args:
        target: the script or function.
        arguments: for a function.
        env: environment variables of its tasks.
        ship: whether a function of the current directory travels by value; the hosts can't import it.
        prints_errors: whether what it raises is in its log, too, for those who do not wait for its results.

    Raises:
        InvalidFunctionError: a Ray remote function with arguments or variables, which it can't take from here.
    """
    import ray
    from ray import cloudpickle
    from ray.remote_function import RemoteFunction

    from iris_ray.actors.wire.ray_internals import remote_function_parts
    from iris_ray.client.user_function import require_no_arguments

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
        try:
            return call()
        except Exception as error:
            if prints_errors:
                print_error(error)
            raise

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
            if not on_a_terminal() or really_cancel("go on waiting for it", default=True):
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


def _cancel(ref: Any) -> None:
    """Returns when the job's processes are gone, or after a while."""
    import ray

    ray.cancel(ref)
    with contextlib.suppress(Exception, KeyboardInterrupt):
        ray.get(ref, timeout=_CANCEL_TIMEOUT_S)
