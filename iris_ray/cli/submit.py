"""``iris-ray submit``: put a job into the queue and leave it to the cluster."""

from typing import Any

import click

from iris_ray.cli.exits import FAILED, INTERRUPTED, say_error
from iris_ray.cli.logs import show
from iris_ray.cli.options import address_option, cluster, json_option
from iris_ray.cli.questions import on_a_terminal
from iris_ray.cli.run import ScriptCommand, as_task, environment_option, really_cancel, slice_counts_option
from iris_ray.cli.script import find_target
from iris_ray.cli.tables import one_line, print_json
from iris_ray.connection import Controller
from iris_ray.errors import InvalidRequestError
from iris_ray.jobs import CoschedulingConfig, PriorityBand
from iris_ray.lifecycle import JobState
from iris_ray.log_stream import stream_logs
from iris_ray.retry import MAX_RETRIES_FAILURE, MAX_RETRIES_PREEMPTION
from iris_ray.status import JobStatus

_BANDS = [band.name.lower() for band in PriorityBand]


@click.command(cls=ScriptCommand)
@click.argument("target", metavar="SCRIPT|MODULE:FUNCTION")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
@click.option("--tpu", "tpu_type", metavar="TPU_TYPE", help="On slices of this type; without it, on any host.")
@click.option("--num-slices", metavar="N[,N...]",
              callback=lambda ctx, param, value: value and slice_counts_option(ctx, param, value),
              help="How many slices, as for run.")  # fmt: skip
@click.option("--replicas", type=int, metavar="N", help="How many tasks, each placed and retried by itself.")
@click.option("--cpu", type=float, default=0.0, metavar="N", help="CPUs of each task.  [default: 1 without --tpu]")
@click.option("--memory-gb", type=float, default=0.0, metavar="N", help="Memory of each task.")
@click.option("--name", metavar="NAME", help="What to call the job.  [default: the script's or function's name]")
@click.option("--priority", type=click.Choice(_BANDS), default=PriorityBand.INTERACTIVE.name.lower(),
              show_default=True, help="Which jobs it goes before.")  # fmt: skip
@click.option("--max-retries-failure", type=int, default=MAX_RETRIES_FAILURE, show_default=True, metavar="N",
              help="Further attempts after errors and crashes.")  # fmt: skip
@click.option("--max-retries-preemption", type=int, default=MAX_RETRIES_PREEMPTION, show_default=True, metavar="N",
              help="Further attempts after lost hosts.")  # fmt: skip
@click.option("--env", "-e", multiple=True, callback=environment_option, metavar="NAME[=VALUE]",
              help="An environment variable of the tasks; may be repeated.")  # fmt: skip
@click.option("--working-dir", type=click.Path(exists=True, file_okay=False), metavar="DIR",
              help="Send this directory to the hosts, and run there.")  # fmt: skip
@click.option("--follow", "-f", is_flag=True, help="Stay, and print what its tasks print until it ends.")
@json_option
@address_option
def submit(
    target: str,
    arguments: tuple[str, ...],
    tpu_type: str | None,
    num_slices: int | list[int] | None,
    replicas: int | None,
    cpu: float,
    memory_gb: float,
    name: str | None,
    priority: str,
    max_retries_failure: int,
    max_retries_preemption: int,
    env: dict[str, str],
    working_dir: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Put a job into the queue and leave it to the cluster.

    It goes on when this command has ended, which prints the job's id. `iris-ray status`, `why`, `logs` and `cancel`
    take that id. With --follow it stays until the job's end, which is its exit code then; Ctrl-C asks whether to cancel
    the job or to leave it running.

    \b
      iris-ray submit train.py --tpu v4-32 --num-slices 2,4 -- --steps 1000
      iris-ray submit prepare.py --cpu 4 --replicas 8
    """
    from iris_ray.client import IrisClient
    from iris_ray.resources import ResourceSpec, tpu_device

    if num_slices is not None and tpu_type is None:
        raise InvalidRequestError("--num-slices is of use with --tpu only; say which type")
    need = ResourceSpec(cpu, memory_gb, replicas, tpu_device(tpu_type) if tpu_type else None)
    groups = CoschedulingConfig(num_groups=num_slices) if num_slices is not None else None
    task, _ = as_task(find_target(target, arguments, working_dir or "."), arguments, env, working_dir is None)
    options: dict[str, Any] = {"runtime_env": {"working_dir": working_dir}} if working_dir else {}
    with cluster(**options):
        job = IrisClient().submit(
            task,
            name,
            resources=need,
            coscheduling=groups,
            priority=PriorityBand[priority.upper()],
            max_retries_failure=max_retries_failure,
            max_retries_preemption=max_retries_preemption,
            keep_warm=0,
            detached=True,
        )
        if as_json:
            print_json({"job_id": job.job_id})
        else:
            click.echo(job.job_id)
        if follow:
            _follow(job.job_id)


def _follow(job_id: str) -> None:
    """Print what the job's tasks print until it ends; ends the command if it did not succeed, or at Ctrl-C."""
    controller = Controller()
    try:
        for line in stream_logs(controller.ask, job_id):
            show(line, prefixed=True)
    except KeyboardInterrupt:
        if on_a_terminal() and really_cancel():
            controller.ask("cancel", job_id, "cancelled with Ctrl-C")
            say_error(f"{job_id} is cancelled")
        else:
            say_error(f"{job_id} goes on; see iris-ray logs -f {job_id}, or end it: iris-ray cancel {job_id}")
        raise click.exceptions.Exit(INTERRUPTED) from None
    status: JobStatus = controller.ask("job_status", job_id)
    if status.state is not JobState.SUCCEEDED:
        say_error(f"{job_id} has ended: {status.state.value}: {one_line(status.error or '')}")
        raise click.exceptions.Exit(FAILED)
