"""``iris-ray host give-notice``: tell the tasks on a slice or host that it is about to end.

Imports are late: a pod that ends has seconds, and its tasks are told before Ray is imported.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click
import psutil

from iris_ray.actors.host.announced_end import announce, in_rays_directory
from iris_ray.cli.address import address_option, chosen_address, cluster
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.conventions import FAILED
from iris_ray.cli.options import TARGET_HELP, reason_option
from iris_ray.cli.output import json_option
from iris_ray.cli.times import Duration
from iris_ray.errors import ControllerUnavailableError, InvalidRequestError, UnknownNameError
from iris_ray.model.checks import unknown
from iris_ray.model.durations import written_duration
from iris_ray.model.lifecycle import job_of
from iris_ray.settings import HOST_DIR
from iris_ray.terminal import live_line

if TYPE_CHECKING:
    from iris_ray.actors.protocol.status import WorkerStatus

NOTICE_S = 30
"""What a spot VM gets."""
MOST_NOTICE_S = 7 * 86_400
HERE = "here"
_LOOK_S = 0.5


class NoticeGiven(TypedDict):
    """A notice that was given.

    Attributes:
        target: the slice or host, as it was given.
        drained: whether Ray drains all its hosts, and their tasks could be seen.
        jobs_still_there: the jobs that had not left at the end.
    """

    target: str
    drained: bool
    jobs_still_there: list[str]


@click.command("give-notice", epilog=f"{TARGET_HELP} `{HERE}` is this machine.")
@click.argument("target", metavar=f"SLICE|HOST|{HERE}", shell_complete=complete_slices)
@click.option(
    "--in",
    "seconds",
    type=Duration(1, MOST_NOTICE_S),
    default=written_duration(NOTICE_S),
    show_default=True,
    help="How long it is until the end.",
)
@reason_option
@json_option(NoticeGiven)
@address_option
def give_notice(target: str, seconds: float, reason: str | None, as_json: bool) -> None:
    """Tell the tasks on a slice or host that it is about to end, and wait until they have left, or until the end.

    \b
      iris-ray host give-notice v4-32-7/3 --in 5m --reason "kernel update"
      iris-ray host give-notice here --in 12s     on the host itself, as the preStop hook of a pod

    Their gangs save and continue elsewhere, as after a notice from the cloud. This is final: Ray ends its node on a
    host once nothing runs there, and the host takes no more jobs until Ray is restarted on it. The command ends no
    task. Only operators may do this, except with `here`, which Ray's account may always use, and which needs no
    Controller. The exit code is 1 if tasks are still there at the end or can't be seen, or if Ray does not drain a
    host.
    """
    deadline, why = time.time() + seconds, reason or "iris-ray host give-notice"
    tell = _tell_here if target == HERE else partial(_tell_others, target)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        told = tell(seconds, why, deadline)
    if as_json:
        from iris_ray.cli.printing import print_json

        print_json(told)
    if told["jobs_still_there"] or not told["drained"]:
        raise click.exceptions.Exit(FAILED)


def _tell_here(seconds: float, why: str, deadline: float) -> NoticeGiven:
    """Announce the end of this machine.

    This asks no Controller: there may be none, or one of another version, and every host of a large slice would ask it.
    """
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
        click.echo(f"the tasks here can't be seen: Ray is another user's; waiting for {seconds:g} s", err=True)
        time.sleep(max(0.0, deadline - time.time()))
    left = [] if where is None else _wait(partial(_jobs_here, where), deadline, seconds)
    draining.join(max(0.0, deadline - time.time()))
    for refusal in refusals or ["Ray does not answer"]:
        if refusal is not None:
            click.echo(f"this machine can't be drained: {' '.join(refusal.split())}", err=True)
    return NoticeGiven(target=HERE, drained=where is not None and refusals == [None], jobs_still_there=left)


def _jobs_here(directory: Path) -> list[str]:
    """Return the ids of the jobs that have tasks on this machine."""
    from iris_ray.actors.host.redirect import started_tasks

    return list(dict.fromkeys(task.job_id for task in started_tasks(directory).values()))


def _tell_others(target: str, seconds: float, why: str, deadline: float) -> NoticeGiven:
    """Announce the end of a slice or host."""
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
    return NoticeGiven(target=target, drained=len(told) == len(hosts), jobs_still_there=left)


def _hosts_of(target: str, workers: Sequence["WorkerStatus"]) -> list["WorkerStatus"]:
    from iris_ray.dashboard.slices import find_target, slices_of

    found = find_target(target, workers)
    if hosts := [host for host in workers if found in (host.slice_name, host.node_id)]:
        return hosts
    raise unknown("slice or host", target, (view.slice for view in slices_of(workers)))


def _jobs(workers: Sequence["WorkerStatus"], node_ids: set[str]) -> list[str]:
    """Return the ids of the jobs that have tasks on these hosts."""
    return list(dict.fromkeys(job_of(task) for host in workers if host.node_id in node_ids for task in host.tasks))


def _wait(jobs: Callable[[], list[str]], deadline: float, seconds: float) -> list[str]:
    """Wait until no job is there, or the deadline; say what happens, and return the jobs that are still there."""
    from iris_ray.cli.printing import counted

    left = jobs()
    if left:
        click.echo(f"{counted(len(left), 'job')} must leave within {seconds:g} s: {', '.join(left)}")
    else:
        click.echo("no job has tasks there; no new ones will start")
        return []
    pause = _LOOK_S
    with live_line("iris-ray") as line:
        while left and (seconds_left := deadline - time.time()) > 0:
            line.show(f"waiting for {', '.join(left)} to leave; {seconds_left:.0f} s are left")
            time.sleep(min(pause, seconds_left))
            asked = time.monotonic()
            with contextlib.suppress(ControllerUnavailableError):  # its successor will know
                left = jobs()
            pause = max(_LOOK_S, 5 * (time.monotonic() - asked))  # a large cluster answers slowly: ask it less often
    click.echo(f"still there: {', '.join(left)}" if left else "all tasks have left")
    return left


def _name(host: "WorkerStatus") -> str:
    from iris_ray.dashboard.slices import host_name

    return f"{host.slice_name}, {host_name(host)}" if host.slice_name else host_name(host)


# -- this machine ------------------------------------------------------------------------------------------------------
# The Ray node of this machine, as the command line of its raylet shows it, without the time that Ray's import takes.

_RAYLET = "raylet"
_FOR_JOBS = ("CPU", "GPU", "TPU")


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A Ray node of this machine.

    Attributes:
        node_id: Ray's node id.
        gcs_address: HOST:PORT of its cluster's GCS.
        directory: iris_ray's directory there; None if it belongs to another user.
        takes_jobs: whether it has CPUs, GPUs or chips for tasks.
    """

    node_id: str
    gcs_address: str
    directory: Path | None
    takes_jobs: bool


def this_node(address: str, environ: Mapping[str, str]) -> LocalNode:
    """Return the Ray node that runs on this machine.

    Several nodes, as in a simulated cluster, are told apart by the address of the cluster and by the directory.

    Args:
        address: HOST:PORT of the cluster's head, as far as it is known.
        environ: may name iris_ray's directory on the host.

    Raises:
        UnknownNameError: no Ray node runs here, or none that takes jobs.
        InvalidRequestError: several do.
    """
    nodes = list(local_nodes())
    if not nodes:
        raise UnknownNameError("no Ray node runs on this machine; name a slice or host: iris-ray host ls shows them")
    for is_meant in (
        lambda node: node.gcs_address == address,
        lambda node: node.directory is not None and node.directory == HOST_DIR.read(environ),
    ):
        nodes = list(filter(is_meant, nodes)) or nodes
    if len(nodes) > 1:
        raise InvalidRequestError(
            f"{len(nodes)} Ray nodes run on this machine: {', '.join(node.node_id[:12] for node in nodes)}; name one of"
            " them, or a slice: iris-ray host ls shows them"
        )
    if not nodes[0].takes_jobs:
        raise UnknownNameError("no job can run on this machine; name a slice or host: iris-ray host ls shows them")
    return nodes[0]


def local_nodes() -> Iterator[LocalNode]:
    """Yield the Ray nodes that run on this machine, as the command lines of their raylets show them."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if os.path.basename(command[0]) != _RAYLET:
            continue
        flags = dict(part[2:].split("=", 1) for part in command if part.startswith("--") and "=" in part)
        if "node_id" in flags and "gcs-address" in flags:
            names, amounts = (flags.get("static_resource_list", "").split(",")[start::2] for start in (0, 1))
            has = {name for name, amount in zip(names, amounts, strict=False) if float(amount)}
            directory = _directory(process, flags.get("temp_dir", ""))
            yield LocalNode(flags["node_id"], flags["gcs-address"], directory, not has.isdisjoint(_FOR_JOBS))


def _directory(raylet: psutil.Process, temp_dir: str) -> Path | None:
    try:
        return HOST_DIR.read(raylet.environ()) or in_rays_directory(temp_dir, raylet.uids().real)
    except (psutil.Error, OSError):
        return None
