"""Slices and their hosts, and what an operator has to say about them."""

import re
from typing import Any

import click

from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.options import address_option, cluster, json_option
from iris_ray.cli.slices import SliceView, find_target, host_name, reason_of, slices_of
from iris_ray.cli.tables import counted, print_json, print_table
from iris_ray.errors import InvalidRequestError
from iris_ray.model.ids import job_of
from iris_ray.model.suggestions import unknown
from iris_ray.model.workers import TPU

DRAINED = "drained"
NO_HOSTS = "the cluster has no TPU hosts that can be used; `iris-ray doctor` says which were refused and why"
_TAINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TARGET_HELP = (
    "SLICE|HOST is the name of a slice that `iris-ray workers` shows, or a host as SLICE/NUMBER, by its IP address or"
    " node id."
)


@click.command()
@click.argument("slice_name", metavar="[SLICE]", required=False, shell_complete=complete_slices)
@click.option("--hosts", "by_host", is_flag=True, help="A line for each host.")
@json_option
@address_option
def workers(slice_name: str | None, by_host: bool, as_json: bool) -> None:
    """Slices and hosts: complete or not, free or busy, and why not.

    A slice is free; warm (a process keeps it ready for its next job, and gives it up when another needs it); busy;
    closed (it takes nothing new, see NOTE); or incomplete. With SLICE, its hosts. A line without a TYPE is a machine
    without TPUs, by its address.

    \b
      iris-ray workers
      iris-ray workers v4-32-0
    """
    with cluster():
        slices = slices_of(ControllerConnection().ask("list_workers"))
    if slice_name is not None:
        shown = [view for view in slices if view.slice == slice_name]
        if not shown:
            raise unknown("slice", slice_name, [view.slice for view in slices])
        slices = shown
    if as_json:
        print_json(slices)
    elif by_host or slice_name is not None:
        headers = ("SLICE", "HOST", "ADDRESS", "NODE", "CHIPS", "JOB", "NOTE")
        print_table(headers, [_host_row(view, host) for view in slices for host in view.hosts], NO_HOSTS)
    else:
        print_table(("SLICE", "TYPE", "HOSTS", "STATE", "JOB", "NOTE"), [_slice_row(view) for view in slices], NO_HOSTS)


def _slice_row(view: SliceView) -> tuple[object, ...]:
    hosts = f"{len(view.hosts)}/{view.hosts_expected or '?'}"
    jobs = ", ".join(view.jobs) or "-"
    return view.slice, view.type or "-", hosts, view.state.value, jobs, view.reason or ""


def _host_row(view: SliceView, host: WorkerStatus) -> tuple[object, ...]:
    chips = f"{host.free.get(TPU, 0):g}/{host.resources.get(TPU, 0):g} free"
    jobs = ", ".join(dict.fromkeys(map(job_of, host.tasks))) or "-"
    number = "-" if host.host_index is None else host.host_index
    return view.slice, number, host.address, host.node_id[:12], chips, jobs, reason_of(host) or ""


@click.command(epilog=_TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@click.option("--reason", help="Why, for those who ask.")
@json_option
@address_option
def drain(target: str, reason: str | None, as_json: bool) -> None:
    """Let a slice or host take no new jobs; what runs there goes on.

    \b
      iris-ray drain v4-32-7 --reason "bad link"
      iris-ray drain v4-32-7/3

    This is the taint "drained". It lasts until `undrain`, also if the Controller is started anew.
    """
    _taint(target, DRAINED, reason, f"iris-ray undrain {target}", as_json)


@click.command(epilog=_TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@json_option
@address_option
def undrain(target: str, as_json: bool) -> None:
    """Let a drained slice or host take new jobs again.

    \b
      iris-ray undrain v4-32-7
    """
    _lift_taint(target, DRAINED, as_json)


@click.command(epilog=_TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@click.argument("name", metavar="NAME")
@click.option("--reason", help="Why, for those who ask.")
@json_option
@address_option
def taint(target: str, name: str, reason: str | None, as_json: bool) -> None:
    """Keep jobs away that don't tolerate the taint NAME; what runs there goes on.

    \b
      iris-ray taint v4-32-7 big-jobs --reason "for the run of May"

    A job tolerates it with `iris-ray submit --tolerate big-jobs`, or tolerations=["big-jobs"] in IrisClient.submit.
    """
    _taint(target, name, reason, f"iris-ray untaint {target} {name}", as_json)


@click.command(epilog=_TARGET_HELP)
@click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
@click.argument("name", metavar="NAME")
@json_option
@address_option
def untaint(target: str, name: str, as_json: bool) -> None:
    """Take the taint NAME off a slice or host.

    \b
      iris-ray untaint v4-32-7 big-jobs
    """
    _lift_taint(target, name, as_json)


def _taint(target: str, name: str, reason: str | None, undo: str, as_json: bool) -> None:
    from iris_ray.client.submission import current_user

    _require_taint_name(name)
    with cluster():
        controller, found, hosts = _look(target)
        concerned = set(controller.ask("taint", found, name, reason or f"by {current_user()}"))
    affected = [host for host in hosts if host.node_id in concerned]
    jobs = dict.fromkeys(job_of(task_id) for host in affected for task_id in host.tasks)
    if as_json:
        print_json({"target": target, "taint": name, "hosts": sorted(concerned), "jobs_still_there": list(jobs)})
        return
    what = f"no new jobs but those that tolerate {name}" if name != DRAINED else "no new jobs"
    click.echo(f"{_in_words(target, affected)} takes {what}; to undo: {undo}")
    if jobs:
        click.echo(f"still there until they end: {', '.join(jobs)}")


def _lift_taint(target: str, name: str, as_json: bool) -> None:
    _require_taint_name(name)
    with cluster():
        controller, found, hosts = _look(target)
        concerned = set(controller.ask("lift_taint", found, name))
        now: list[WorkerStatus] = controller.ask("list_workers")
    affected = [host for host in hosts if host.node_id in concerned]
    closed = [host for host in now if host.node_id in concerned and reason_of(host)]
    if as_json:
        still = {host.node_id: reason_of(host) for host in closed}
        print_json({"target": target, "taint": name, "hosts": sorted(concerned), "still_closed": still})
        return
    click.echo(f"{_in_words(target, affected)}: the taint {name} is lifted")
    for host in closed:
        click.echo(f"{host.slice_name}, {host_name(host)} still takes nothing new: {reason_of(host)}")


def _look(target: str) -> tuple[ControllerConnection, str, list[WorkerStatus]]:
    controller = ControllerConnection()
    hosts: list[WorkerStatus] = controller.ask("list_workers")
    return controller, find_target(target, hosts), hosts


def _in_words(target: str, affected: list[Any]) -> str:
    return f"{target} ({counted(len(affected), 'host')})" if len(affected) > 1 else target


def _require_taint_name(name: str) -> None:
    if not _TAINT.fullmatch(name):
        raise InvalidRequestError(f"{name!r} is no name of a taint; give letters, digits and _.-, such as big-jobs")
