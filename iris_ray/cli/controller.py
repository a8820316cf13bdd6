"""``iris-ray cluster controller``: start, stop, upgrade and inspect the cluster's Controller."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Required, TypedDict

import click

import iris_ray
from iris_ray.actors.calls.controller_connection import NO_CONTROLLER, ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.version import PROTOCOL_VERSION, versions_here
from iris_ray.actors.protocol.version import in_words as versions_in_words
from iris_ray.cli.address import address_option, cluster, node_address_option
from iris_ray.cli.conventions import NO_CLUSTER, confirm, say_error
from iris_ray.cli.main import Commands, section_of
from iris_ray.cli.options import yes_option
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import counted, duration, print_facts, print_json
from iris_ray.cli.settings import read_assignments
from iris_ray.dashboard.slices import slices_of
from iris_ray.errors import ControllerUnavailableError, UnknownRecordError, VersionMismatchError
from iris_ray.terminal import live_line

STOPPED = (
    "the Controller is stopped; running jobs continue. The next job starts another one; so does a running job that has"
    " something to report, and `iris-ray cluster controller start`. It continues from the records"
)


class ControllerNow(TypedDict, total=False):
    """The Controller. ``running`` is always there; the rest depends on the command, and on whether it runs.

    Attributes:
        running: whether it runs now.
        started: of ``start``: whether this command has started it.
        dry_run: of ``upgrade --dry-run``: true.
        version_before: of ``upgrade``: the version that it had.
        version: its version of iris_ray; of ``upgrade --dry-run``: the version that would replace it.
        version_on_head: of ``upgrade --dry-run``: the version that is installed on the head. ``upgrade`` refuses if it
            is not the one that would replace the Controller.
        package: the directory of its code.
        epoch: how many Controllers the cluster has had.
        started_at: seconds since the epoch.
        pid, address, node_id: its process, and Ray's node id of its host.
        set_aside: jobs that it could not handle or place, and records that it could not read.
        clock_jumps: the jumps of its host's clock.
        services, service_health: the status and the health of each service.
        statistics: counts since it began.
        jobs, slices: of ``status`` and ``upgrade``: how many are in each state.
        hosts: how many hosts it knows.
    """

    running: Required[bool]
    started: bool
    dry_run: bool
    version_before: str
    version: str
    version_on_head: str
    package: str | None
    epoch: int
    started_at: float
    pid: int
    address: str
    node_id: str
    set_aside: list[Any]
    clock_jumps: Any
    services: Mapping[str, Any]
    service_health: Any
    statistics: Mapping[str, int]
    jobs: Mapping[str, int]
    slices: Mapping[str, int]
    hosts: int


@click.group("controller", cls=Commands, sections=section_of("cluster controller"))
def controller() -> None:
    """The cluster's Controller: start, stop, upgrade, status, export, import.

    The Controller decides which job runs where. The first job starts it, Ray restarts it, and running jobs continue
    while it is away. You need this command after an update of iris_ray, and to move the queue to another cluster.

    \b
      iris-ray cluster controller status
      iris-ray cluster controller upgrade
    """


@click.command()
@click.option(
    "--setting",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a cluster setting, unless it is set in this cluster already (iris-ray cluster settings). Repeatable.",
)
@json_option(ControllerNow)
@node_address_option
def start(assignments: tuple[str, ...], as_json: bool) -> None:
    """Start the Controller, unless it runs. It continues from the records of an earlier one.

    --setting is for scripts that start a cluster's head, so that a new cluster has its operators from the beginning.

    \b
      iris-ray cluster controller start --setting operators=olga,otto
    """
    from iris_ray.client.connection import current_user

    wanted = read_assignments(assignments)
    with cluster():
        was_there = find_controller() is not None
        if not was_there:
            start_one()
        running = ControllerConnection()
        kept = running.ask(ControllerInterface.set_settings, wanted, True, current_user()) if wanted else {}
        about = running.ask(ControllerInterface.about)
    if as_json:
        print_json({"running": True, "started": not was_there, **about})
        return
    click.echo(f"the Controller {'runs already' if was_there else 'is started'}: {in_words(about)}")
    for name in [name for name, text in wanted.items() if kept[name].text != text]:
        click.echo(f"{name} stays {kept[name].text}, as {kept[name].user} has set it: see iris-ray cluster settings")


@click.command()
@yes_option
@json_option(ControllerNow)
@node_address_option
def stop(yes: bool, as_json: bool) -> None:
    """End the Controller; running jobs continue.

    \b
      iris-ray cluster controller stop

    The next job, or a running one with something to report, starts another Controller. On a terminal, the command asks
    first.
    """
    with cluster():
        running = ControllerConnection(any_version=True)
        confirm("Stop the Controller? Running jobs continue, but nothing new starts until another one runs.", yes)
        running.end()
    if as_json:
        print_json({"running": False})
    else:
        click.echo(STOPPED)


@click.command()
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say whether the version that is installed here could replace it, and whether it is on the head yet.",
)
@json_option(ControllerNow)
@node_address_option
def upgrade(dry_run: bool, as_json: bool) -> None:
    """Replace the Controller with the version installed here and on the head.

    Running jobs continue. Nothing changes if the new one could not read the records of the old one or would not
    understand the processes of unfinished jobs, or if another version is installed on the head. If the new one does not
    start, none runs, and the message says what to do.
    """
    with cluster():
        old = ControllerConnection(any_version=True)
        before = old.versions()
        protocol, version = before["protocol"], before["version"]
        _require_successor(protocol, version)
        other = _other_version_on_head()
        if dry_run and as_json:
            on_head = other["version"] if other else iris_ray.__version__
            now: ControllerNow = {"running": True, "version_before": version, "version": iris_ray.__version__}
            print_json(now | {"version_on_head": on_head, "dry_run": True})
            return
        if dry_run:
            click.echo(
                f"iris_ray {iris_ray.__version__} can replace the Controller of iris_ray {version}: it reads all of its"
                " records, and understands the processes of all jobs; nothing was changed"
            )
            if other:
                say_error(f"not yet: installed on the head is {versions_in_words(other)}; {_INSTALL}")
            return
        if other:
            raise VersionMismatchError(
                f"the Controller stays as it is, of iris_ray {version}: it runs the version that is installed on the"
                f" head, {versions_in_words(other)}, and this is {versions_in_words(versions_here())}: {_INSTALL}"
            )
        with live_line("iris-ray") as line:
            line.show("replacing the Controller; running jobs continue")
            old.end()
            _start_in_place_of(version)
        found = ControllerConnection(any_version=True).versions()["version"]
        if found != iris_ray.__version__:
            raise ControllerUnavailableError(
                f"a job of iris_ray {found} was faster and has started a Controller of that version; jobs go on, and"
                " nothing is lost; try again"
            )
        new = ControllerConnection()
        about, jobs = new.ask(ControllerInterface.about), new.ask_all(ControllerInterface.list_jobs)
    left = Counter(job.state.value for job in jobs if not job.state.finished)
    if as_json:
        print_json({"running": True, **about, "version_before": version, "jobs": left})
        return
    click.echo(f"the Controller is now {in_words(about)}; it was iris_ray {version}")
    click.echo(f"it has taken over {counted(left.total(), 'job')}{f': {_counts(left)}' if left else ''}")


_INSTALL = f"install iris_ray {iris_ray.__version__} on the head, then upgrade"


def _other_version_on_head() -> dict[str, Any] | None:
    """Return the versions that are installed on the head, if it has another iris_ray than this machine, or None.

    A Controller would run the head's.
    """
    from iris_ray.actors.controller.bootstrap import installed_on_head

    installed = installed_on_head()
    return None if installed is None or installed["version"] == iris_ray.__version__ else installed


def start_one() -> None:
    """Start a Controller, unless one runs."""
    from iris_ray.actors.calls.controller_client import get_or_start_controller

    asyncio.run(get_or_start_controller())


def _start_in_place_of(version: str) -> None:
    """Start a Controller of the version that is installed here, after the one of ``version`` has ended.

    Raises:
        ControllerUnavailableError: it does not start; nothing of it is left, and the message has advice.
    """
    try:
        start_one()
    except ControllerUnavailableError as error:
        if find_controller() is not None:  # e.g. one that hangs; another one needs its name
            ControllerConnection(any_version=True).end()
        raise ControllerUnavailableError(
            f"{error}\nThe Controller of iris_ray {version} is ended, and the new one, of iris_ray"
            f" {iris_ray.__version__}, did not start. Running jobs continue, and nothing is lost. Install iris_ray"
            f" {version} on the head again, then run `iris-ray cluster controller start` there"
        ) from None


def _require_successor(protocol: int, version: str) -> None:
    """Refuse the upgrade unless a Controller of the version that is installed here can replace the old one.

    Args:
        protocol: of the old Controller.
        version: of the old Controller.

    Raises:
        UnknownRecordError: the new Controller can't read the records of the old one.
        VersionMismatchError: the new Controller does not understand the processes of unfinished jobs.
    """
    from iris_ray.actors.controller.journal import Journal

    stays = f"the Controller stays as it is, of iris_ray {version}"
    try:
        records, _ = Journal().left_behind()
    except UnknownRecordError as error:
        raise UnknownRecordError(f"{stays}: {error}") from None
    unfinished = sum(not record.job.state.finished for record in records)
    if protocol != PROTOCOL_VERSION and unfinished:
        raise VersionMismatchError(
            f"{stays}: the processes of {counted(unfinished, 'job')} speak protocol {protocol}, and one of iris_ray"
            f" {iris_ray.__version__} speaks protocol {PROTOCOL_VERSION}; try again when they have ended"
        )


@click.command()
@json_option(ControllerNow)
@address_option
def status(as_json: bool) -> None:
    """Show the Controller's epoch, version, jobs and hosts."""
    with cluster():
        if find_controller() is None:
            if as_json:
                print_json({"running": False})
            say_error(NO_CONTROLLER)
            raise click.exceptions.Exit(NO_CLUSTER)
        running = ControllerConnection()
        about, counts = running.ask(ControllerInterface.about), running.ask(ControllerInterface.statistics)
        jobs = running.ask_all(ControllerInterface.list_jobs)
        workers = running.ask_all(ControllerInterface.list_workers)
    by_state = Counter(job.state.value for job in jobs)
    slice_states = Counter(view.state.value for view in slices_of(workers) if view.is_slice)
    if as_json:
        found = {"running": True, **about, "statistics": counts, "jobs": by_state, "slices": slice_states}
        print_json({**found, "hosts": len(workers)})
        return
    print_facts(
        {
            "controller": in_words(about),
            "code": about.get("package"),
            "node": about.get("node_id"),
            "jobs": _counts(by_state) or "none",
            "slices": _counts(slice_states) or "none",
            "hosts": len(workers),
            "since it began": _counts({name: n for name, n in counts.items() if name != "epoch"}) or "nothing to tell",
        }
    )


def in_words(about: dict[str, Any]) -> str:
    """Return which Controller it is, in half a line."""
    age = duration(time.time() - about["started_at"])
    place = f"pid {about['pid']} at {about['address']}"
    return ", ".join([f"epoch {about['epoch']}", f"iris_ray {about['version']}", place, f"up {age}"])


def _counts(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()) if count)
