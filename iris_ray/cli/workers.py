"""``iris-ray workers``: slices and hosts."""

import click

from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.slices import SliceView, reason_of, slices_of
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import slices as complete_slices
from iris_ray.cli.options import json_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.tables import print_table
from iris_ray.errors import ControllerUnavailableError
from iris_ray.model.checks import unknown
from iris_ray.model.ids import job_of
from iris_ray.model.workers import GPU, TPU

NO_HOSTS = "the cluster has no TPU hosts that can be used; `iris-ray doctor` says which were refused and why"

_SLICE_HEADERS = ("SLICE", "TYPE", "HOSTS", "STATE", "JOB", "NOTE")
_HOST_HEADERS = ("SLICE", "HOST", "ADDRESS", "NODE", "CHIPS", "GPUS", "JOB", "NOTE")


@click.command()
@click.argument("slice_name", metavar="[SLICE]", required=False, shell_complete=complete_slices)
@click.option("--hosts", "by_host", is_flag=True, help="A line for each host.")
@json_option
@address_option
def workers(slice_name: str | None, by_host: bool, as_json: bool) -> None:
    """Slices and hosts: complete or not, free or busy, and why not.

    A slice is free; warm (a process keeps it ready for its next job, and gives it up when another job needs it); busy;
    closed (it takes no new jobs, see NOTE); or incomplete. With SLICE, its hosts. A line without a TPU
    TYPE is a machine without TPUs, or with TPUs and without labels, by its address. Without a Controller,
    it shows what Ray knows.

    \b
      iris-ray workers
      iris-ray workers v4-32-0
    """
    with cluster():
        slices = slices_of(_hosts())
    if slice_name is not None:
        shown = [view for view in slices if view.slice == slice_name]
        if not shown:
            raise unknown("slice", slice_name, [view.slice for view in slices])
        slices = shown
    if as_json:
        print_json(slices)
    elif by_host or slice_name is not None:
        print_table(_HOST_HEADERS, [_host_row(view, host) for view in slices for host in view.hosts], NO_HOSTS)
    else:
        print_table(_SLICE_HEADERS, [_slice_row(view) for view in slices], NO_HOSTS)


def _hosts() -> list[WorkerStatus]:
    """Return the hosts as the Controller knows them, or, if none runs, as Ray does."""
    try:
        controller = ControllerConnection()
    except ControllerUnavailableError:
        from iris_ray.actors.controller.node_table import NodeTable  # imports Ray
        from iris_ray.actors.controller.ray_view import workers_by_ray

        click.echo("iris-ray: no Controller runs in this cluster; this is what Ray knows of its hosts", err=True)
        return workers_by_ray(NodeTable.read())
    return controller.list_workers()


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
    return view.slice, number, host.address, host.node_id[:12], chips, gpus, jobs, reason_of(host) or ""
