"""``iris-ray submit``: put a job into the queue and leave it to the cluster."""

from collections.abc import Sequence
from typing import Final, TypedDict, cast

import click
from click.core import ParameterSource

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.cli.address import (
    Sent,
    address_option,
    cluster,
    dashboard_address,
    head_for_ray_jobs,
    head_of_dashboard,
)
from iris_ray.cli.conventions import FAILED, interrupted, on_a_terminal, really_cancel, say_error, was_terminated
from iris_ray.cli.ends import CONTROLLER_AWAY_S
from iris_ray.cli.options import JobFlags, ScriptCommand, job_options, marked_arguments, typed
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import counted, one_line, print_json
from iris_ray.cli.rerun import remember_command
from iris_ray.cli.run import as_task
from iris_ray.cli.script import find_target, is_tpu_type
from iris_ray.cli.sent_code import sent_code
from iris_ray.client.connection import current_user
from iris_ray.errors import ControllerUnavailableError, InvalidRequestError
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import JobOptions, default_of
from iris_ray.model.requirement import BYTES_PER_GB
from iris_ray.model.workers import TPU_NAME
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.terminal import live_line

RAY_JOBS_ONLY: Final = ("run_id", "excludes", "env_file")
"""Options that only a job of Ray's job API takes."""
RAY_JOBS_TOO: Final = ("address", "target", "arguments", "ray_job", "env", "working_dir", "follow", "as_json")


class Submitted(TypedDict):
    """A job that was put into the queue."""

    job_id: str


class SubmittedRun(TypedDict):
    """A job of Ray's job API, with ``--ray-job``."""

    run_id: str


@click.command(cls=ScriptCommand)
@click.argument("target", metavar="SCRIPT|MODULE:FUNCTION")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@job_options(JobOptions)
@click.option("--replicas", type=click.IntRange(1), metavar="N",
              help="How many tasks. Without --group-by and --tpu, each is placed and retried by itself.")  # fmt: skip
@click.option(
    "--group-by",
    metavar="ATTRIBUTE",
    help="Start all tasks together, on hosts with one value of this attribute, such as a rack.",
)
@click.option(
    "--cpu",
    type=click.FloatRange(0),
    default=0.0,
    metavar="N",
    help="CPUs of each task.  [default: 1 without --tpu, --gpu and --memory-gb, else 0]",
)
@click.option(
    "--gpu", type=click.IntRange(0), default=0, metavar="N", help="GPUs of each task, which it has to itself."
)
@click.option(
    "--memory-gb",
    type=click.FloatRange(0),
    default=0.0,
    metavar="N",
    help="Memory that each task reserves, in gigabytes (10^9 bytes); it may use more.",
)
@click.option("--follow", "-f", is_flag=True, help="Stay, and print its tasks' output until it ends.")
@click.option("--ray-job", is_flag=True, help="Run the script itself on the cluster, by Ray's job API.")
@click.option("--run-id", metavar="ID", help="What to call the job of Ray's API; a number is added if it is taken.")
@click.option("--exclude", "excludes", multiple=True, metavar="PATTERN",
              help="Files of the directory not to send to a dashboard, as in .gitignore; with --ray-job or"
              " --working-dir. Repeatable.")  # fmt: skip
@click.option("--env-file", metavar="FILE",
              help="A file of variables, NAME=VALUE on each line, such as secrets, for a job sent to a dashboard."
              )  # fmt: skip
@json_option(Submitted | SubmittedRun)
@address_option
def submit(
    target: str,
    arguments: tuple[str, ...],
    flags: JobFlags,
    replicas: int | None,
    group_by: str | None,
    cpu: float,
    gpu: int,
    memory_gb: float,
    follow: bool,
    ray_job: bool,
    run_id: str | None,
    excludes: tuple[str, ...],
    env_file: str | None,
    as_json: bool,
) -> None:
    """Put a job into the queue and leave it to the cluster.

    \b
      iris-ray submit train.py --tpu v4-32 --num-slices 2,4 -- --steps 1000
      iris-ray submit prepare.py --cpu 4 --replicas 8
      iris-ray submit train.py --cpu 4 --replicas 8 --group-by rack
      iris-ray submit --address http://10.0.0.2:8265 train.py --tpu v4-32     from a laptop
      iris-ray submit --ray-job --address http://10.0.0.2:8265 train.py -- --steps 1000

    This prints the job's id and ends; the job goes on. If the cluster as it is can't run the job, a line on stderr says
    so. The commands about one job take that id. With --follow, the command prints the tasks' output until the job ends;
    its exit code is 0 if the job has succeeded, else 1. Ctrl-C leaves the job running, unless you answer y to the
    question. --json prints the id only; it can't be combined with --follow.

    Without --tpu the tasks run on any host that has what they need. With --group-by they are a gang: they start
    together, each on a host of its own, and again together after a loss. On slices there is one task on every host by
    default, with all its chips, and --cpu and --memory-gb are of each. ARGUMENTS are the script's sys.argv[1:], or
    strings for the function.

    From a machine that can reach nothing but the dashboard, give the dashboard's address. The current directory is
    sent, without files that git ignores and files that look like secrets; with --working-dir, that directory, without
    files that its .gitignore names. The size is shown first. Without --ray-job, files of the current directory above 64
    MB are not sent either. With --ray-job the script runs once, on the cluster, and calls run_on_pod itself. Then logs,
    status and cancel take the id that is printed, with the same --address.
    """
    _require_fitting_options(ray_job)
    if as_json and follow:
        raise InvalidRequestError(
            "--json and --follow would mix JSON and the tasks' output on stdout; leave out --follow, and follow the id"
            " that is printed: iris-ray logs -f ID, or iris-ray job status ID --json"
        )
    head = head_for_ray_jobs() if ray_job else head_of_dashboard()
    if head is not None:
        flags.require_stored_secrets()
        sent: Sent = {"excludes": excludes, "env": flags.env, "env_file": env_file, "run_id": run_id}
        if not ray_job:
            if excludes and flags.working_dir is None:
                raise InvalidRequestError(
                    "--exclude leaves files out of the directory that --working-dir names, so give that as well;"
                    " without it, files that git ignores, data and secrets stay here anyhow"
                )
            head.run_in_directory(target, flags.working_dir, **sent)
        head.submit_script(target, arguments, flags.working_dir, follow, as_json, **sent)
        return
    from iris_ray.client.client import launch, request_for, require_may_detach
    from iris_ray.client.run_options import require_no_local_mode
    from iris_ray.model.requirement import ResourceSpec, tpu_device

    if flags.tpu_type is None:
        _refuse_what_needs_a_type(arguments, flags.num_slices)
    need = ResourceSpec(cpu, memory_gb, replicas, tpu_device(flags.tpu_type) if flags.tpu_type else None, gpu)
    groups = None
    if flags.num_slices is not None or group_by is not None:
        groups = CoschedulingConfig(group_by or TPU_NAME, 1 if flags.num_slices is None else flags.num_slices)
    require_no_local_mode()
    require_may_detach()
    if follow:
        module_of("logs", "cli")  # raises if it was taken out, before there is a job
    found = find_target(target, arguments, flags.working_dir or ".")
    code = sent_code(flags.working_dir)
    task, _ = as_task(found, arguments, flags.env, not code.travels, prints_errors=True)
    options = flags.options | {"keep_warm": default_of("keep_warm", "iris-ray submit")}
    request = request_for(task, flags.name, need, groups, **cast(JobOptions, options))  # before anything is connected
    with cluster(name_it=True, sends=code.for_ray()):
        if flags.tpu_type is None:
            _say_what_it_gets(request.spec, is_chosen=bool(cpu or gpu or memory_gb or group_by))
        job = launch(request, detached=True)
        code.keep(job.job_id)
        remember_command(job.job_id, "submit", typed())
        if as_json:
            print_json({"job_id": job.job_id})
        else:
            click.echo(job.job_id)
        if follow:
            _follow(job.job_id)
        else:
            _say_if_it_can_not_run(job.job_id)


def _require_fitting_options(ray_job: bool) -> None:
    """Refuse given options that have no effect on this kind of job.

    Args:
        ray_job: whether it runs the script itself.

    Raises:
        InvalidRequestError: the first of them.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if not ray_job and name in RAY_JOBS_ONLY and dashboard_address() is None:
            raise InvalidRequestError(f"{parameter.opts[0]} is for --ray-job, and for the address of a dashboard")
        if ray_job and name not in (*RAY_JOBS_ONLY, *RAY_JOBS_TOO):
            raise InvalidRequestError(
                f"{parameter.opts[0]} is not for --ray-job: the script says it itself, where it calls run_on_pod"
            )


def _refuse_what_needs_a_type(arguments: Sequence[str], num_slices: int | list[int] | None) -> None:
    """Raise InvalidRequestError if the command, which has no --tpu, seems to be meant for slices."""
    if arguments and not marked_arguments() and is_tpu_type(arguments[0]):
        raise InvalidRequestError(
            f"{arguments[0]} would be an argument of the script; to run on that type: --tpu {arguments[0]} (if it is"
            " an argument: -- before it)"
        )
    if num_slices is not None:
        raise InvalidRequestError("--num-slices needs --tpu; say which type")


def _say_what_it_gets(spec: JobSpec, is_chosen: bool) -> None:
    """Print what the tasks of a job without a TPU type get and, unless that was chosen, how to get slices."""
    memory = f"{spec.resources.get('memory', 0.0) / BYTES_PER_GB:g} GB of memory"
    each = [memory if name == "memory" else f"{amount:g} {name}" for name, amount in spec.resources.items()]
    if spec.coscheduling is not None:
        where = f"hosts with one {spec.coscheduling.group_by}"
    else:
        where = "any host with room" if spec.replicas == 1 else "any hosts with room"
    advice = "" if is_chosen else "; for slices, add --tpu with a type, such as v4-32"
    say_error(f"{counted(spec.replicas, 'task')} with {', '.join(each)} on {where}, without a TPU{advice}")


def _say_if_it_can_not_run(job_id: str) -> None:
    """Print a line if the cluster could not run the job even if it were empty. The job stays in the queue."""
    try:
        status = ControllerConnection().ask(ControllerInterface.job_status, job_id)
    except ControllerUnavailableError:
        return  # the job has arrived; that is what counts
    if (waiting := status.waiting) is not None and waiting.kind in (PendingKind.NO_SUCH_WORKERS, PendingKind.TOO_FEW):
        say_error(
            f"{job_id} can't run on the cluster as it is: {one_line(waiting)}; to end it: iris-ray cancel {job_id}"
        )


def _follow(job_id: str) -> None:
    """Print the output of the job's tasks until it ends. End the command if it did not succeed, or at Ctrl-C."""
    controller = ControllerConnection()
    try:
        with live_line(job_id) as live, controller.waiting(CONTROLLER_AWAY_S, say_error):
            module_of("logs", "cli").follow_job(controller, job_id, live)
            status = controller.ask(ControllerInterface.job_status, job_id)
    except KeyboardInterrupt:
        asks = on_a_terminal() and not was_terminated()
        if asks and really_cancel("leave it running", default=False):
            controller.ask(ControllerInterface.cancel, job_id, "cancelled with Ctrl-C", current_user())
            say_error(f"{job_id} is cancelled")
        else:
            say_error(f"{job_id} goes on; see iris-ray logs -f {job_id}, or end it: iris-ray cancel {job_id}")
        raise interrupted() from None
    if status.state is not JobState.SUCCEEDED:
        say_error(f"{job_id} has ended: {status.state.value}: {one_line(status.error or '')}")
        raise click.exceptions.Exit(FAILED)
