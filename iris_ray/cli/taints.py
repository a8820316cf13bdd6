"""Sets and lifts taints, for the commands that do so."""

import re
from collections.abc import Sequence

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.slices import find_target, host_name, reason_of
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.cli.address import cluster
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.words import counted
from iris_ray.errors import InvalidRequestError
from iris_ray.model.ids import job_of

DRAINED = "drained"
"""The taint of a drained host."""
TARGET_HELP = (
    "SLICE|HOST is the name of a slice that `iris-ray workers` shows, or a host as SLICE/NUMBER, by its IP address or"
    " node id."
)
_TAINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def add_taint(target: str, name: str, reason: str | None, undo: str, as_json: bool) -> None:
    """Taint a slice or host, and print what that means.

    Args:
        target: a slice or host, by any name that `find_target` knows.
        name: of the taint.
        reason: for people; None names the user.
        undo: the command that lifts the taint.
        as_json: print JSON.

    Raises:
        InvalidRequestError: the name is malformed, or several hosts could be meant.
    """
    from iris_ray.client.identity import current_user

    _require_taint_name(name)
    with cluster():
        controller, found, hosts = _look(target)
        why, user = reason or f"by {current_user()}", current_user()
        concerned = set(controller.ask(ControllerInterface.taint, found, name, why, user))
    affected = [host for host in hosts if host.node_id in concerned]
    jobs = dict.fromkeys(job_of(task_id) for host in affected for task_id in host.tasks)
    if as_json:
        print_json({"target": target, "taint": name, "hosts": sorted(concerned), "jobs_still_there": list(jobs)})
        return
    what = f"no new jobs but those that tolerate {name}" if name != DRAINED else "no new jobs"
    click.echo(f"{_in_words(target, affected)} takes {what}; to undo: {undo}")
    if jobs:
        click.echo(f"still there until they end: {', '.join(jobs)}")


def lift_taint(target: str, name: str, as_json: bool) -> None:
    """Lift a taint, and print which hosts take no new jobs even so. Arguments and errors as for `add_taint`."""
    from iris_ray.client.identity import current_user

    _require_taint_name(name)
    with cluster():
        controller, found, hosts = _look(target)
        concerned = set(controller.ask(ControllerInterface.lift_taint, found, name, current_user()))
        now = controller.ask_all(ControllerInterface.list_workers)
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
    hosts = controller.ask_all(ControllerInterface.list_workers)
    return controller, find_target(target, hosts), hosts


def _in_words(target: str, affected: Sequence[WorkerStatus]) -> str:
    return f"{target} ({counted(len(affected), 'host')})" if len(affected) > 1 else target


def _require_taint_name(name: str) -> None:
    if not _TAINT.fullmatch(name):
        raise InvalidRequestError(
            f"{name!r} is not the name of a taint; give letters, digits and _.-, such as big-jobs"
        )
