"""Getting slices from Google for the jobs that wait, and giving them back."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from iris_ray.actors.wire.controller_connection import NO_CONTROLLER, ControllerConnection, find_controller
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.cli.exits import say_error
from iris_ray.cli.options import address_option, chosen_address, cluster
from iris_ray.cli.slices import SliceState, slices_of
from iris_ray.client.connection import AUTO
from iris_ray.cloud.provisioning import (
    ENDPOINT_VARIABLE,
    HEAD_MARK,
    LOCATION_VARIABLE,
    OWNER_LABEL,
    STARTUP_SCRIPT,
    Action,
    Create,
    Delete,
    History,
    Joined,
    NewSlice,
    QueuedSlice,
    QueuedState,
    Settings,
    plan,
    request_id,
)
from iris_ray.errors import (
    ControllerUnavailableError,
    InvalidRequestError,
    ProviderError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.topology import get_tpu_config

if TYPE_CHECKING:
    from iris_ray.cloud.cloud_tpu import CloudTpu

GIVEN_BACK = "given-back"
"""The taint of slices that are about to be deleted."""
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}")


@click.command(short_help="Ask Google for slices that waiting jobs miss, and give unused ones back.")
@click.option("--type", "tpu_type", required=True, metavar="TYPE", help="Of all slices, such as v6e-16.")
@click.option("--min", "least", type=click.IntRange(0), default=0, show_default=True, help="Slices to keep at least.")
@click.option("--max", "most", type=click.IntRange(1), required=True, help="Slices to have at most.")
@click.option("--location", metavar="PLACE", help=f"projects/PROJECT/locations/ZONE.  [default: ${LOCATION_VARIABLE}]")
@click.option("--runtime-version", required=True, metavar="NAME", help="Of the TPU software, such as v2-alpha-tpuv6e.")
@click.option("--spot", is_flag=True, help="Slices that may be preempted at any time; otherwise on demand.")
@click.option(
    "--startup-script",
    "script",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Run on each host; {HEAD_MARK} in it becomes the head's address. No secrets: everybody in the project can"
    " read it.  [default: one that runs ray start]",
)
@click.option("--head", metavar="HOST:PORT", help="Where hosts join the cluster.  [default: --address]")
@click.option("--external-ips", is_flag=True, help="Give hosts addresses of their own on the internet.")
@click.option("--name", "owner", default="iris", show_default=True, help="Of this provisioner: it marks its slices.")
@click.option(
    "--idle",
    "idle_s",
    type=click.FloatRange(0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Before a slice that nobody uses is given back.",
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="Look and act once, then end.")
@click.option("--dry-run", is_flag=True, help="Look once, and print what would be done. Changes nothing.")
@address_option
def provision(
    tpu_type: str,
    least: int,
    most: int,
    location: str | None,
    runtime_version: str,
    spot: bool,
    script: Path | None,
    head: str | None,
    external_ips: bool,
    owner: str,
    idle_s: float,
    every_s: float,
    once: bool,
    dry_run: bool,
) -> None:
    """Ask Google for slices that waiting jobs miss, and give back those that nobody needs.

    Runs until it is ended; what it has made stays. It never touches what another one has made. Run one for each type
    and zone; --dry-run first.

    \b
      iris-ray provision --type v6e-16 --max 4 --spot --runtime-version v2-alpha-tpuv6e --dry-run
    """
    from iris_ray.cloud.cloud_tpu import CloudTpu

    if most < least:
        raise InvalidRequestError(f"--max is {most}, which is less than --min {least}")
    if not _NAME.fullmatch(owner):
        raise InvalidRequestError(f"--name is {owner!r}; give up to 16 small letters and digits, a letter first")
    if not (place := location or os.environ.get(LOCATION_VARIABLE)):
        raise InvalidRequestError(f"give --location projects/PROJECT/locations/ZONE, or set {LOCATION_VARIABLE}")
    cloud = CloudTpu(place, os.environ.get(ENDPOINT_VARIABLE) or None)
    text = startup_script(script.read_text() if script else STARTUP_SCRIPT, head or chosen_address())
    settings = Settings(owner, get_tpu_config(tpu_type), least, most, idle_s)
    template = NewSlice(
        "", settings.config.accelerator_type, runtime_version, {OWNER_LABEL: owner}, text, spot, external_ips
    )
    with cluster():
        provisioner = Provisioner(settings, cloud, Jobs(), template, dry_run)
        provisioner.turn()
        while not (once or dry_run):
            time.sleep(every_s)
            provisioner.try_turn()


def startup_script(text: str, head: str) -> str:
    """The script with the head's address in it.

    Raises:
        InvalidRequestError: the address is needed and is none that a host could join at.
    """
    if HEAD_MARK not in text:
        return text
    if head == AUTO or not _ADDRESS.fullmatch(head):
        raise InvalidRequestError(f"the cluster's address is {head!r}; give --head HOST:PORT, as other hosts see it")
    return text.replace(HEAD_MARK, head)


class Jobs:
    """The cluster's side: what its jobs miss and use."""

    def look(self, tpu_type: str) -> tuple[int | None, Mapping[str, Joined]]:
        """How many slices of the type are missing, and all slices that are there; None without a Controller."""
        if find_controller() is None:
            return None, {}
        controller = ControllerConnection()
        try:
            demand = controller.demand()
        except AttributeError:
            raise VersionMismatchError(
                "the Controller can't say what its jobs miss, as it is of an older version: iris-ray controller upgrade"
            ) from None
        return demand.get(tpu_type, 0), joined_slices(controller.list_workers())

    def close(self, name: str) -> None:
        """Let a slice take nothing new, if it has hosts."""
        with suppress(UnknownNameError):
            ControllerConnection().taint(name, GIVEN_BACK, "iris-ray provision gives it back")

    def reopen(self, name: str) -> None:
        with suppress(UnknownNameError):  # it was not closed, or somebody else has opened it
            ControllerConnection().lift_taint(name, GIVEN_BACK)


def joined_slices(workers: Sequence[WorkerStatus]) -> dict[str, Joined]:
    """The slices that have hosts in the cluster."""
    return {
        view.slice: Joined(
            whole=view.state is not SliceState.INCOMPLETE,
            in_use=bool(view.jobs) or any(host.holder for host in view.hosts),
            closed=any(TAINT_PREFIX + GIVEN_BACK in host.attributes for host in view.hosts),
        )
        for view in slices_of(workers)
        if view.is_slice
    }


class Provisioner:
    """Looks, plans, acts, one turn after the other."""

    def __init__(
        self, settings: Settings, cloud: "CloudTpu", jobs: Jobs, template: NewSlice, dry_run: bool = False
    ) -> None:
        self._settings = settings
        self._cloud = cloud
        self._jobs = jobs
        self._template = template
        self._dry_run = dry_run
        self._history = History()
        self._closed: set[str] = set()  # slices that we have tainted
        self._said: set[str] = set()
        self._said_before: set[str] = set()

    def try_turn(self) -> None:
        """One turn; what can't be done now can be done in the next one, also while Ray's head is away."""
        from ray.exceptions import RayError

        try:
            self.turn()
        except (ProviderError, ControllerUnavailableError) as error:
            self._say(str(error), problem=True)
        except (RayError, OSError) as error:
            self._say(f"Ray does not answer: {(str(error).splitlines() or [type(error).__name__])[0]}", problem=True)

    def turn(self) -> None:
        """Raises ProviderError, ControllerUnavailableError and VersionMismatchError."""
        self._said_before, self._said = self._said, set()
        found = self._cloud.queued_slices()
        demand, joined = self._jobs.look(self._settings.config.name)
        if demand is None:
            self._say(NO_CONTROLLER, problem=True)
        actions = plan(self._settings, demand, found, joined, self._history, time.time())
        for action in actions:
            self._say(f"would {action}" if self._dry_run else str(action))
        if self._dry_run:
            if not actions:
                self._say(f"would do nothing; waiting jobs miss {demand or 0} {self._settings.config.name}")
            return
        self._reopen(found, joined, actions)
        for action in actions:
            if isinstance(action, Delete):
                self._delete(action)
        for action in actions:
            if isinstance(action, Create) and not self._create(action):
                break  # the next request would be refused, too

    def _create(self, action: Create) -> bool:
        now = time.time()
        self._history.unconfirmed.setdefault(action.name, now)
        refused = self._cloud.create(self._template.named(action.name))
        if refused is not None:
            self._history.refused(action.name, now, refused)
            self._say(f"{action.name} is not to be had: {refused}", problem=True)
        return refused is None

    def _delete(self, action: Delete) -> None:
        if action.if_unused and not self._close(action.name):
            self._say(f"{action.name} stays: a job has come to it meanwhile, or the Controller can't be asked any more")
            return
        self._cloud.delete(action.name, request_id("delete", action.name))

    def _close(self, name: str) -> bool:
        """Let the slice take nothing new; whether nothing was there before."""
        self._jobs.close(name)
        self._closed.add(name)
        demand, joined = self._jobs.look(self._settings.config.name)
        return demand is not None and (name not in joined or not joined[name].in_use)

    def _reopen(self, found: Sequence[QueuedSlice], joined: Mapping[str, Joined], actions: Sequence[Action]) -> None:
        """Lift the taints of slices that stay after all, and of those that are gone, so that nothing is left."""
        states = {one.name: one.state for one in found}
        given_back = {action.name for action in actions if isinstance(action, Delete)}
        ours = {one.name for one in found if self._settings.owns(one)}
        closed_before = {name for name, one in joined.items() if one.closed and name in ours}  # an earlier one has died
        for name in (self._closed | closed_before) - given_back:
            if states.get(name) in (None, QueuedState.ACTIVE):
                self._jobs.reopen(name)
                self._closed.discard(name)

    def _say(self, line: str, problem: bool = False) -> None:
        """Print it, unless it was said in the turn before."""
        if line not in self._said_before | self._said:
            (say_error if problem else click.echo)(line)
        self._said.add(line)
