"""``iris-ray host give-notice``: tell the tasks on a slice or host that it is about to end.

It imports late what it needs: a pod that ends has seconds, and tasks hear of it before Ray is imported.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from iris_ray.cli.address import address_option, chosen_address, cluster
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.conventions import FAILED
from iris_ray.cli.options import TARGET_HELP, reason_option
from iris_ray.model.checks import unknown
from iris_ray.model.lifecycle import job_of
from iris_ray.terminal import live_line

if TYPE_CHECKING:
    from iris_ray.actors.protocol.status import WorkerStatus

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
      iris-ray host give-notice v4-32-7/3 --seconds 300 --reason "kernel update"
      iris-ray host give-notice here --seconds 12     on the host itself, as the preStop hook of a pod

    Their gangs save and go on elsewhere, as after a notice of the cloud's. This is final: the hosts take no more jobs
    until Ray starts there anew. Only operators may do so, but for `here`. The command ends nothing, and `here` needs no
    Controller. The exit code is 1 if tasks are still there at the end.
    """
    deadline, why = time.time() + seconds, reason or "iris-ray host give-notice"
    tell = _tell_here if target == HERE else partial(_tell_others, target)
    if not tell(seconds, why, deadline):
        raise click.exceptions.Exit(FAILED)


def _tell_here(seconds: int, why: str, deadline: float) -> bool:
    """Announce the end of this machine. Return whether Ray drains it and all tasks have left.

    This asks no Controller: there may be none, or one of another version, and every host of a large slice would ask it.
    """
    from iris_ray.actors.host.announced_end import announce
    from iris_ray.cli.this_node import this_node

    node = this_node(chosen_address(), os.environ)
    where = node.directory
    if where is not None:
        try:
            announce(where, node.node_id, why, deadline)
        except OSError:
            where = None

    def drain() -> None:
        try:
            from iris_ray.actors.calls.ray_internals import announce_end  # it takes a second to import

            refusals.append(announce_end(node.node_id, why, deadline, node.gcs_address))
        except Exception as error:  # such as a token that is missing
            refusals.append(f"{type(error).__name__}: {error}")

    refusals: list[str | None] = []
    draining = threading.Thread(target=drain, daemon=True)  # a GCS that is gone may hold it up for longer than we have
    draining.start()
    if where is None:
        click.echo(f"the tasks here can't be seen: Ray is another user's; waiting for {seconds} s", err=True)
        time.sleep(max(0.0, deadline - time.time()))
    left = [] if where is None else _wait(partial(_jobs_here, where), deadline, seconds)
    draining.join(max(0.0, deadline - time.time()))
    for refusal in refusals or ["Ray does not answer"]:
        if refusal is not None:
            click.echo(f"this machine can't be drained: {' '.join(refusal.split())}", err=True)
    return not left and where is not None and refusals == [None]


def _jobs_here(directory: Path) -> list[str]:
    """Return the ids of the jobs that have tasks on this machine."""
    from iris_ray.actors.host.redirect import started_tasks

    return list(dict.fromkeys(task.job_id for task in started_tasks(directory).values()))


def _tell_others(target: str, seconds: int, why: str, deadline: float) -> bool:
    """Announce the end of a slice or host. Return whether Ray drains all its hosts and all tasks have left."""
    from iris_ray.actors.calls.controller_connection import ControllerConnection
    from iris_ray.actors.calls.ray_internals import announce_end
    from iris_ray.actors.protocol.controller_interface import ControllerInterface
    from iris_ray.client.connection import current_user

    with cluster():
        controller = ControllerConnection()
        controller.ask(ControllerInterface.require_operator, current_user(), "give notice to hosts")
        hosts = _hosts_of(target, controller.ask_all(ControllerInterface.list_workers))
        told = set()
        for host in hosts:
            if refusal := announce_end(host.node_id, why, deadline):
                click.echo(f"{_name(host)} can't be drained: {refusal}", err=True)
            else:
                told.add(host.node_id)
        left = _wait(lambda: _jobs(controller.ask_all(ControllerInterface.list_workers), told), deadline, seconds)
    return not left and len(told) == len(hosts)


def _hosts_of(target: str, workers: Sequence["WorkerStatus"]) -> list["WorkerStatus"]:
    from iris_ray.dashboard.slices import find_target, slices_of

    found = find_target(target, workers)
    if hosts := [host for host in workers if found in (host.slice_name, host.node_id)]:
        return hosts
    raise unknown("slice or host", target, (view.slice for view in slices_of(workers)))


def _jobs(workers: Sequence["WorkerStatus"], node_ids: set[str]) -> list[str]:
    """Return the ids of the jobs that have tasks on these hosts."""
    return list(dict.fromkeys(job_of(task) for host in workers if host.node_id in node_ids for task in host.tasks))


def _wait(jobs: Callable[[], list[str]], deadline: float, seconds: int) -> list[str]:
    """Wait until no job is there, or the deadline; say what happens, and return the jobs that are still there."""
    from iris_ray.cli.printing import counted

    left = jobs()
    if left:
        click.echo(f"{counted(len(left), 'job')} must leave within {seconds} s: {', '.join(left)}")
    else:
        click.echo("no job has tasks there; no new ones will start")
        return []
    pause = _LOOK_S
    with live_line("iris-ray") as line:
        while left and (seconds_left := deadline - time.time()) > 0:
            line.show(f"waiting for {', '.join(left)} to leave; {seconds_left:.0f} s are left")
            time.sleep(min(pause, seconds_left))
            asked = time.monotonic()
            left = jobs()
            pause = max(_LOOK_S, 5 * (time.monotonic() - asked))  # a large cluster answers slowly: ask it less often
    click.echo(f"still there: {', '.join(left)}" if left else "all tasks have left")
    return left


def _name(host: "WorkerStatus") -> str:
    from iris_ray.dashboard.slices import host_name

    return f"{host.slice_name}, {host_name(host)}" if host.slice_name else host_name(host)
