"""``iris-ray run``: run a script or a function on TPU slices, and wait for its end."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import click

from iris_ray.cli.address import WHEN_IT_IS_GONE, address_option, cluster, head_of_dashboard, lost_cluster
from iris_ray.cli.completion import tpu_types
from iris_ray.cli.conventions import FAILED, interrupted, on_a_terminal, really_cancel, say_error, was_terminated
from iris_ray.cli.options import JobFlags, ScriptCommand, job_options, marked_arguments, typed
from iris_ray.cli.printing import counted, one_line
from iris_ray.cli.rerun import remember_command
from iris_ray.cli.script import Script, find_target, is_at_home, is_tpu_type, print_error
from iris_ray.cli.sent_code import SentDirectory, sent_code
from iris_ray.errors import InvalidFunctionError, InvalidRequestError
from iris_ray.model.options import JobOptions, PodOptions, default_of
from iris_ray.model.tracebacks import last_frame, was_seen, without_our_frames

_LONGEST_RESULT = 500
_CANCEL_TIMEOUT_S = 30.0
_OUTER_ERROR = "ray.exceptions.RayTaskError: "
_HEADER = "Traceback (most recent call last):"
_RAYS_HEADER = re.compile(r"^(?:\x1b\[\d+m)?ray::.*\(pid=\d+.*\)$", re.MULTILINE)
"""What Ray writes in place of `_HEADER`. It names the process that raises the error here, which is iris_ray's own."""


@click.command(cls=ScriptCommand)
@click.argument("target", metavar="SCRIPT|MODULE:FUNCTION")
@click.argument("second", metavar="TPU_TYPE", required=False, shell_complete=tpu_types)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@job_options(PodOptions)
@address_option
def run(target: str, second: str | None, arguments: tuple[str, ...], flags: JobFlags) -> None:
    """Run a script or function on every host of TPU slices, and wait for its end.

    \b
      iris-ray run train.py v4-32
      iris-ray run train.py v4-32 --num-slices 2,4 -- --steps 1000
      iris-ray run train:main v5litepod-16

    The job has one fresh process per host by default, all or none; after a preemption it starts again from the
    beginning. Its output appears here; while it waits, the reason does. The hosts need iris_ray. In a git checkout, the
    current directory is sent to them without files that git ignores, files above 64 MB and files that look like
    secrets; a line says how much. Outside of a checkout only the script is sent, except at the address of a dashboard,
    where the current directory is sent as well. --working-dir sends another directory instead.

    The job ends with this command; a job of `iris-ray submit -f` does not. On a terminal, Ctrl-C asks whether to cancel
    it: Enter or a second Ctrl-C cancels, n continues to wait. Without a terminal, Ctrl-C cancels at once.

    TPU_TYPE may also be given with --tpu; `iris-ray host ls` lists the types of the cluster's slices. ARGUMENTS are the
    script's sys.argv[1:], or strings for the function. Results of the function other than None are printed.
    """
    from iris_ray.client.run_options import local_mode, without_mode

    tpu_type, arguments = _type_and_arguments(second, arguments, flags.tpu_type)
    found = find_target(target, arguments, flags.working_dir or ".")
    if tpu_type is None:
        raise InvalidRequestError(f"on which TPU type? Such as: iris-ray run {target} v4-32")
    where = local_mode(flags.options["mode"], None)
    if where is None and (head := head_of_dashboard()) is not None:
        flags.require_stored_secrets()
        head.run_in_directory(target, flags.working_dir, env=flags.env)
    code = sent_code(flags.working_dir) if where is None else SentDirectory(flags.working_dir)
    task, called = as_task(found, arguments, flags.env, not code.travels)
    from iris_ray.client.caller_pool import pool_of_this_process
    from iris_ray.client.job_progress import say_if_it_runs_once
    from iris_ray.client.job_request import make_pod_request
    from iris_ray.client.run_on_pod import run_request

    # This refuses what can't work, before anything is connected.
    num_slices = 1 if flags.num_slices is None else flags.num_slices
    options = without_mode(flags.options) | {"keep_warm": default_of("keep_warm", "iris-ray run")}
    request = make_pod_request(task, tpu_type, num_slices, flags.name, **cast(JobOptions, options))
    name = flags.name or called
    if where is not None:
        with failure_told(name), contextlib.chdir(flags.working_dir or "."):
            results = run_request(request, where)
    else:
        with cluster(show_logs=True, name_it=True, sends=code.for_ray()):
            say_if_it_runs_once(request.spec)
            ref, _ = pool_of_this_process.submit(request)
            code.keep(request.spec.job_id)
            remember_command(request.spec.job_id, "run", typed())
            results = _wait(request.spec.job_id, ref, name)
    for index, result in enumerate(results):
        if result is not None:
            text = one_line(repr(result))
            click.echo(f"task {index}: {text[:_LONGEST_RESULT]}{'…' * (len(text) > _LONGEST_RESULT)}")


def _type_and_arguments(
    second: str | None, arguments: tuple[str, ...], option: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """Return the TPU type and the script's arguments.

    Args:
        second: the second argument on the command line: the type, or with ``--tpu`` the script's first argument.
        arguments: the others.
        option: the value of ``--tpu``.

    Raises:
        InvalidRequestError: the type is given twice.
    """
    if option is None or second is None:
        return option or second, arguments
    if is_tpu_type(second) and not marked_arguments():
        raise InvalidRequestError(f"the TPU type is given twice, {second} and --tpu {option}; leave one out")
    return option, (second, *arguments)


def as_task(
    target: Script | Callable[..., Any],
    arguments: Sequence[str],
    env: dict[str, str],
    ship: bool,
    prints_errors: bool = False,
) -> tuple[Any, str]:
    """Return the function that `run_on_pod` takes, and its name for people.

    Args:
        target: the script or function.
        arguments: for a function.
        env: environment variables of its tasks.
        ship: whether a function of the current directory travels by value, as the hosts can't import it.
        prints_errors: whether a task prints its exception into its log too, for jobs whose results are not awaited.

    Raises:
        InvalidFunctionError: a Ray remote function with arguments or variables, which it can't take from here.
    """
    import ray
    from ray import cloudpickle
    from ray.remote_function import RemoteFunction

    from iris_ray.actors.calls.ray_internals import remote_function_parts
    from iris_ray.client.user_function import require_no_arguments

    function, options = remote_function_parts(target) if isinstance(target, RemoteFunction) else (target, {})
    if ship and (module := is_at_home(function)):
        cloudpickle.register_pickle_by_value(module)
    if hasattr(target, "remote"):
        if arguments or env:
            raise InvalidFunctionError(
                "a Ray remote function takes no ARGUMENTS and no --env: say it in @ray.remote(...)"
            )
        if not (prints_errors and isinstance(target, RemoteFunction)):
            return target, "the job"
    name = target.name if isinstance(target, Script) else getattr(function, "__name__", "function")
    call = target if isinstance(target, Script) else functools.partial(function, *arguments)
    if not isinstance(target, Script):
        _require_fit(function, name, arguments)
        require_no_arguments(call, name)

    def task() -> Any:
        try:
            return call()
        except Exception as error:
            if prints_errors:
                print_error(error)
            raise

    return ray.remote(**{"name": name, "runtime_env": {"env_vars": env}, **options})(task), name


def _require_fit(function: Callable[..., Any], name: str, arguments: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: only the call can tell
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = counted(len(arguments), "argument") if arguments else "no arguments"
        raise InvalidFunctionError(
            f"{name}{signature} can't be called with {given} ({error}); its arguments are the words after --"
        ) from None


def _wait(job_id: str, ref: Any, name: str) -> list[Any]:
    """Return the results; end the command if there are none."""
    from iris_ray.client.job_progress import results_of  # imports Ray

    goes_on = False
    while True:
        try:
            if goes_on:
                say_error(f"still waiting for {name}")
            with failure_told(name):
                return results_of(job_id, ref)
        except KeyboardInterrupt:
            asks = on_a_terminal() and not was_terminated()
            if not asks or really_cancel("go on waiting for it", default=True):
                _cancel(ref)
                say_error(f"{name} is cancelled")
                raise interrupted() from None
            goes_on = True


@contextlib.contextmanager
def failure_told(name: str) -> Iterator[None]:
    """Say how a job has failed, if it has, and end the command."""
    from ray.exceptions import RayError, RayTaskError

    from iris_ray.client.user_function import callers_error

    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if (ours := callers_error(error)) is not error:
            raise ours from None
        text = users_part(str(error))
        click.echo(last_frame(text) if was_seen(text) else text, err=True)
        say_error(f"{name} failed: {type(cause).__name__}: {one_line(str(cause))}")
        raise click.exceptions.Exit(FAILED) from None
    except RayError as error:
        if (address := lost_cluster()) is not None:
            say_error(f"{name} was lost with the Ray cluster at {address}, which has ended. {WHEN_IT_IS_GONE}")
        else:
            say_error(
                f"{name} was lost: {type(error).__name__}: {one_line(error)}; `iris-ray doctor` looks further, and"
                " the same command runs it again"
            )
        raise click.exceptions.Exit(FAILED) from None


def users_part(text: str) -> str:
    """Return an error from the hosts as the task's name and its traceback, with the user's frames only."""
    return without_our_frames(_RAYS_HEADER.sub(_HEADER, text.rpartition(_OUTER_ERROR)[2]))


def _cancel(ref: Any) -> None:
    """Cancel the job; return when its processes are gone, or after a while."""
    import ray

    ray.cancel(ref)
    with contextlib.suppress(Exception, KeyboardInterrupt):
        ray.get(ref, timeout=_CANCEL_TIMEOUT_S)
