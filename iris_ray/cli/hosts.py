"""``iris-ray host``: ``ls``, ``drain`` and ``undrain``."""

import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import WorkerStatus
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.options import TARGET_HELP, reason_option
from iris_ray.cli.output import ListForm, json_option, list_options
from iris_ray.cli.printing import counted, print_json
from iris_ray.dashboard.slices import SliceView, find_target, host_name, reason_of, slices_of
from iris_ray.errors import ControllerUnavailableError, InvalidRequestError
from iris_ray.model.checks import shown, unknown
from iris_ray.model.lifecycle import job_of
from iris_ray.model.workers import GPU, SUB_SLICE, TPU

NO_HOSTS = "the cluster has no TPU hosts that can be used; `iris-ray doctor` says which were refused and why"

_SLICE_HEADERS = ("SLICE", "TYPE", "HOSTS", "STATE", "JOB", "NOTE")
_HOST_HEADERS = ("SLICE", "HOST", "ADDRESS", "NODE", "CHIPS", "GPUS", "JOB", "NOTE")


@click.command()
@click.argument("slice_name", metavar="[SLICE]", required=False, shell_complete=complete_slices)
@click.option("--hosts", "by_host", is_flag=True, help="A line for each host.")
@list_options(list[SliceView], "names of slices (with --hosts or SLICE: of hosts)")
@address_option
def ls(slice_name: str | None, by_host: bool, form: ListForm) -> None:
    """Slices and hosts: complete or not, free or busy, and why not.

    A slice is free; warm (a process keeps it ready for its next job, and gives it up when another job needs it); busy;
    closed (it takes no new jobs, see NOTE); or incomplete. With SLICE, its hosts. A line without a TPU
    TYPE is a machine without TPUs, or with TPUs and without labels, by its address. Without a Controller,
    it shows what Ray knows.

    \b
      iris-ray host ls
      iris-ray host ls v4-32-0
    """
    with cluster():
        slices = slices_of(_hosts())
    if slice_name is not None:
        shown = [view for view in slices if view.slice == slice_name]
        if not shown:
            raise unknown("slice", slice_name, [view.slice for view in slices])
        slices = shown
    if (by_host or slice_name is not None) and not form.as_json:
        hosts = [(view, host) for view in slices for host in view.hosts]
        form.show(hosts, lambda one: _host_id(*one), _HOST_HEADERS, lambda one: _host_row(*one), NO_HOSTS)
    else:
        form.show(slices, lambda view: view.slice, _SLICE_HEADERS, _slice_row, NO_HOSTS)


def _host_id(view: SliceView, host: WorkerStatus) -> str:
    return host.address if host.host_index is None else f"{view.slice}/{host.host_index}"


def _hosts() -> list[WorkerStatus]:
    """Return the hosts as the Controller knows them, or, if none runs, as Ray does."""
    try:
        controller = ControllerConnection()
    except ControllerUnavailableError:
        click.echo("iris-ray: no Controller runs in this cluster; this is what Ray knows of its hosts", err=True)
        return _hosts_by_ray()
    return controller.ask_all(ControllerInterface.list_workers)


def _hosts_by_ray() -> list[WorkerStatus]:
    """Return all live hosts as a Controller would show them."""
    from iris_ray.actors.controller.clock import Clock  # these import Ray
    from iris_ray.actors.controller.node_table import NodeDiff, NodeTable
    from iris_ray.actors.controller.views import unusable_status, worker_status
    from iris_ray.state import ControllerState
    from iris_ray.state.controller_state import apply_safely
    from iris_ray.state.instructions import Instructions

    state, clock = ControllerState(), Clock()
    nodes = NodeDiff(state, clock)
    apply_safely(state, nodes.events_of(NodeTable.read()), Instructions())
    found = [worker_status(worker, state, clock.now()) for worker in state.workers.values()]
    found += [unusable_status(host) for host in nodes.unusable.values() if host.node_id not in state.workers]
    return sorted(found, key=lambda worker: worker.place)


def _slice_row(view: SliceView) -> tuple[object, ...]:
    hosts = f"{len(view.hosts)}/{view.hosts_expected or '?'}"
    jobs = ", ".join(view.jobs) or "-"
    gpus = sum(host.resources.get(GPU, 0) for host in view.hosts)
    kind = view.type or (f"{gpus:g} GPU" if gpus else "-")
    return view.slice, kind, hosts, view.state.value, jobs, view.reason or ""


def _host_row(view: SliceView, host: WorkerStatus) -> tuple[object, ...]:
    chips, gpus = (f"{host.free.get(what, 0):g}/{host.resources.get(what, 0):g} free" for what in (TPU, GPU))
    jobs = ", ".join(dict.fromkeys(map(job_of, host.tasks))) or "-"
    number = "-" if host.host_index is None else host.host_index
    note = "; ".join(filter(None, [view.defect, reason_of(host) or _sub_slices(host)]))
    return view.slice, number, host.address, host.node_id[:12], chips, gpus, jobs, note


def _sub_slices(host: WorkerStatus) -> str:
    """Return in words the sub-slices that Ray knows the host to be in; "" if none. iris_ray hands out whole slices."""
    found = {name.removeprefix(SUB_SLICE): n for name, n in host.attributes.items() if name.startswith(SUB_SLICE)}
    return f"in Ray's sub-slices {', '.join(f'{shape} #{n}' for shape, n in found.items())}" if found else ""


# -- drain -------------------------------------------------------------------------------------------------------------
# A drain is a taint: without a name, one that the jobs of nobody should tolerate.

DRAINED = "drained"
"""The taint of a host that is drained without naming a taint."""
_TAINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def _check_taint(_: click.Context, __: click.Parameter, name: str) -> str:
    if not _TAINT.fullmatch(name):
        raise InvalidRequestError(
            f"{shown(name)} is not the name of a taint; give up to 63 letters, digits and _.-, such as big-jobs"
        )
    return name


class Drained(TypedDict):
    """Hosts that take no new jobs, except jobs that tolerate the taint.

    Attributes:
        target: the slice or host, as it was given.
        taint: its name.
        hosts: node ids of the hosts that have it now.
        jobs_still_there: the jobs that run there.
    """

    target: str
    taint: str
    hosts: list[str]
    jobs_still_there: list[str]


class Undrained(TypedDict):
    """Hosts whose taint is lifted.

    Attributes:
        target, taint: as in `Drained`.
        hosts: node ids of the hosts that had it.
        still_closed: why some of them still take no new jobs, by node id.
    """

    target: str
    taint: str
    hosts: list[str]
    still_closed: Mapping[str, str | None]


_target_argument = click.argument("target", metavar="SLICE|HOST", shell_complete=complete_slices)
_taint_argument = click.argument("taint", metavar="[TAINT]", default=DRAINED, callback=_check_taint)


@click.command(epilog=TARGET_HELP)
@_target_argument
@_taint_argument
@reason_option
@json_option(Drained)
@address_option
def drain(target: str, taint: str, reason: str | None, as_json: bool) -> None:
    """Keep new jobs off a slice or host; what runs there goes on.

    \b
      iris-ray host drain v4-32-7 --reason "bad link"
      iris-ray host drain v4-32-7/3
      iris-ray host drain v4-32-7 big-jobs     only jobs that tolerate big-jobs

    This taints the hosts: with TAINT, or else with "drained". A job tolerates a taint with `iris-ray submit --tolerate
    big-jobs`, or tolerations=["big-jobs"] in IrisClient.submit. The taint of a slice lasts until `undrain`, also if the
    Controller or the hosts restart. That of a host ends when Ray is restarted on it, as Ray then knows it as a new
    node; drain the slice before such a repair. Only operators may do this.
    """
    from iris_ray.client.connection import current_user

    with cluster():
        controller, found, hosts = _look(target)
        why, user = reason or f"by {current_user()}", current_user()
        concerned = set(controller.ask(ControllerInterface.taint, found, taint, why, user))
    affected = [host for host in hosts if host.node_id in concerned]
    jobs = dict.fromkeys(job_of(task_id) for host in affected for task_id in host.tasks)
    if as_json:
        print_json({"target": target, "taint": taint, "hosts": sorted(concerned), "jobs_still_there": list(jobs)})
        return
    what, named = ("", "") if taint == DRAINED else (f" except jobs that tolerate {taint}", f" {taint}")
    click.echo(f"{_in_words(target, affected)} takes no new jobs{what}; to undo: iris-ray host undrain {target}{named}")
    if jobs:
        click.echo(f"still there until they end: {', '.join(jobs)}")


@click.command(epilog=TARGET_HELP)
@_target_argument
@_taint_argument
@json_option(Undrained)
@address_option
def undrain(target: str, taint: str, as_json: bool) -> None:
    """Let a drained slice or host take new jobs again. Only operators may do this.

    \b
      iris-ray host undrain v4-32-7
      iris-ray host undrain v4-32-7 big-jobs          lifts the taint big-jobs
      iris-ray host undrain v4-32-7/3 quarantined     ends its quarantine
    """
    from iris_ray.client.connection import current_user

    with cluster():
        controller, found, hosts = _look(target)
        concerned = set(controller.ask(ControllerInterface.lift_taint, found, taint, current_user()))
        now = controller.ask_all(ControllerInterface.list_workers)
    affected = [host for host in hosts if host.node_id in concerned]
    closed = [host for host in now if host.node_id in concerned and reason_of(host)]
    if as_json:
        still = {host.node_id: reason_of(host) for host in closed}
        print_json({"target": target, "taint": taint, "hosts": sorted(concerned), "still_closed": still})
        return
    click.echo(f"{_in_words(target, affected)}: the taint {taint} is lifted")
    for host in closed:
        click.echo(f"{host.slice_name}, {host_name(host)} still takes nothing new: {reason_of(host)}")


def _look(target: str) -> tuple[ControllerConnection, str, list[WorkerStatus]]:
    controller = ControllerConnection()
    hosts = controller.ask_all(ControllerInterface.list_workers)
    return controller, find_target(target, hosts), hosts


def _in_words(target: str, affected: Sequence[WorkerStatus]) -> str:
    return f"{target} ({counted(len(affected), 'host')})" if len(affected) > 1 else target
