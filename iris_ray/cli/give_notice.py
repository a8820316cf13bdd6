"""``iris-ray give-notice``: tell the tasks on a slice or host that it is about to end."""

import time
from collections.abc import Callable, Sequence

import click

from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.slices import find_target, host_name, slices_of
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.exits import FAILED
from iris_ray.cli.options import reason_option
from iris_ray.cli.printing.words import counted
from iris_ray.cli.taints import TARGET_HELP
from iris_ray.errors import UnknownNameError
from iris_ray.model.checks import unknown
from iris_ray.model.ids import job_of
from iris_ray.terminal import live_line

NOTICE_S = 30
"""What a spot VM gets."""
MOST_NOTICE_S = 7 * 86_400
HERE = "here"
_LOOK_S = 0.5


@click.command("give-notice", epilog=f"{TARGET_HELP} `{HERE}` is this machine.")
@click.argument("target", metavar=f"SLICE|HOST|{HERE}", shell_complete=complete_slices)
@click.option(
    "--seconds",
    type=click.IntRange(1, MOST_NOTICE_S),
    default=NOTICE_S,
    show_default=True,
    help="In how many seconds it ends.",
)
@reason_option
@address_option
def give_notice(target: str, seconds: int, reason: str | None) -> None:
    """Tell the tasks on a slice or host that it is about to end, and wait until they have left.

    \b
      iris-ray give-notice v4-32-7/3 --seconds 300 --reason "kernel update"
      iris-ray give-notice here --seconds 12     on the host itself, as the preStop hook of a pod

    Their gangs save and go on elsewhere, as after a notice of the cloud's. This is final: the hosts take no more jobs
    until Ray starts there anew. The command ends nothing. The exit code is 1 if tasks are still there at the end.
    """
    from iris_ray.actors.wire.ray_internals import announce_end

    deadline, why = time.time() + seconds, reason or "iris-ray give-notice"
    with cluster():
        controller = ControllerConnection()
        hosts = _hosts(target, controller.list_workers())
        told = set()
        for host in hosts:
            if refusal := announce_end(host.node_id, why, deadline):
                click.echo(f"{_name(host)} can't be drained: {refusal}", err=True)
            else:
                told.add(host.node_id)
        left = _wait(lambda: _jobs(controller.list_workers(), told), deadline, seconds)
    if left or len(told) < len(hosts):
        raise click.exceptions.Exit(FAILED)


def _hosts(target: str, workers: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    import ray

    found = ray.get_runtime_context().get_node_id() if target == HERE else find_target(target, workers)
    hosts = [host for host in workers if found in (host.slice_name, host.node_id)]
    if hosts:
        return hosts
    if target == HERE:
        raise UnknownNameError("no job can run on this machine; name a slice or host: iris-ray workers shows them")
    raise unknown("slice or host", target, (view.slice for view in slices_of(workers)))


def _jobs(workers: Sequence[WorkerStatus], node_ids: set[str]) -> list[str]:
    """Return the ids of the jobs that have tasks on these hosts."""
    return list(dict.fromkeys(job_of(task) for host in workers if host.node_id in node_ids for task in host.tasks))


def _wait(jobs: Callable[[], list[str]], deadline: float, seconds: int) -> list[str]:
    """Wait until no job is there, or the deadline; say what happens, and return the jobs that are still there."""
    left = jobs()
    if left:
        click.echo(f"{counted(len(left), 'job')} must leave within {seconds} s: {', '.join(left)}")
    else:
        click.echo("no job has tasks there; no new ones will start")
        return []
    with live_line("iris-ray") as line:
        while left and time.time() < deadline:
            line.show(f"waiting for {', '.join(left)} to leave; {deadline - time.time():.0f} s are left")
            time.sleep(_LOOK_S)
            left = jobs()
    click.echo(f"still there: {', '.join(left)}" if left else "all tasks have left")
    return left


def _name(host: WorkerStatus) -> str:
    return f"{host.slice_name}, {host_name(host)}" if host.slice_name else host_name(host)
