"""``iris-ray cluster provision``: ask Google for the slices that waiting jobs miss, and give unused ones back."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from iris_ray.actors.calls.controller_connection import NO_CONTROLLER, ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.slices import SliceState, slices_of
from iris_ray.actors.protocol.status import WorkerStatus
from iris_ray.cli.address import address_option, chosen_address, cluster
from iris_ray.cli.conventions import say_error
from iris_ray.cli.options import FiniteRange
from iris_ray.client.connection import AUTO, current_user
from iris_ray.cloud.cloud_tpu import CloudTpu
from iris_ray.cloud.provisioning import (
    HEAD_MARK,
    OWNER_LABEL,
    STARTUP_SCRIPT,
    Action,
    Create,
    Delete,
    Joined,
    NewSlice,
    QueuedSlice,
    QueuedState,
    Settings,
    plan,
    request_id,
)
from iris_ray.cloud.provisioning_history import ProvisioningHistory
from iris_ray.errors import (
    ControllerUnavailableError,
    InvalidRequestError,
    NotPermittedError,
    ProviderError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.model.cluster_settings import CLOUD_TPU
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.topology import get_tpu_config

if TYPE_CHECKING:
    from iris_ray.actors.controller.metrics import RayMeter

DAY_S = 86_400.0
_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}")


@click.command(short_help="Ask Google for slices that waiting jobs miss, and give unused ones back.")
@click.option("--type", "tpu_type", required=True, metavar="TYPE", help="The type of all slices, such as v6e-16.")
@click.option("--min", "least", type=click.IntRange(0), default=0, show_default=True, help="Slices to keep at least.")
@click.option("--max", "most", type=click.IntRange(1), required=True, help="Slices to have at most.")
@click.option(
    "--location",
    metavar="PLACE",
    help=f"projects/PROJECT/locations/ZONE.  [default: the cluster's setting {CLOUD_TPU.name}]",
)
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
    type=FiniteRange(0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a slice must be unused before it is given back.",
)
@click.option(
    "--every",
    "every_s",
    type=FiniteRange(1, DAY_S),
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
    """Ask Google for slices that waiting jobs miss, and give back slices that no job needs.

    This runs until you end it; the slices that it has made stay. It never touches slices that it has not made. Run one
    for each type and zone; --dry-run first.

    \b
      iris-ray cluster provision --type v6e-16 --max 4 --spot --runtime-version v2-alpha-tpuv6e --dry-run
    """
    from iris_ray.cloud.cloud_tpu import CloudTpu

    config = get_tpu_config(tpu_type)
    if most < least:
        raise InvalidRequestError(f"--max is {most}, which is less than --min {least}")
    if not _NAME.fullmatch(owner):
        raise InvalidRequestError(f"--name is {owner!r}; give up to 16 small letters and digits, a letter first")
    zone = CloudTpu.at(location) if location else None  # a malformed one is refused before it connects
    text = startup_script(script.read_text() if script else STARTUP_SCRIPT, head or chosen_address())
    settings = Settings(owner, config, least, most, idle_s)
    template = NewSlice("", config.accelerator_type, runtime_version, {OWNER_LABEL: owner}, text, spot, external_ips)
    with cluster():
        provisioner = Provisioner(settings, zone or CloudTpu.at(_zone_of_the_cluster()), Jobs(), template, dry_run)
        provisioner.turn()
        while not (once or dry_run):
            time.sleep(every_s)
            provisioner.try_turn()


def _zone_of_the_cluster() -> str:
    found = ControllerConnection().ask(ControllerInterface.list_settings) if find_controller() else {}
    if CLOUD_TPU.name not in found or (zone := CLOUD_TPU.parse(found[CLOUD_TPU.name].text)) is None:
        raise InvalidRequestError(
            "give --location projects/PROJECT/locations/ZONE, or set it for the cluster: iris-ray cluster settings set"
            f" {CLOUD_TPU.name}=projects/PROJECT/locations/ZONE"
        )
    return zone


def startup_script(text: str, head: str) -> str:
    """Return the script with the head's address in it.

    Raises:
        InvalidRequestError: the script needs the address, and no other host could join at it.
    """
    if HEAD_MARK not in text:
        return text
    if head == AUTO or not _ADDRESS.fullmatch(head):
        raise InvalidRequestError(f"the cluster's address is {head!r}; give --head HOST:PORT, as other hosts see it")
    return text.replace(HEAD_MARK, head)


# -- provisioner -------------------------------------------------------------------------------------------------------
# Carries out the plans of `iris_ray.cloud.provisioning`, one turn after the other.

GIVEN_BACK = "given-back"
"""The taint of slices that are about to be deleted."""


class Jobs:
    """What the cluster's jobs miss and use."""

    def look(self, tpu_type: str) -> tuple[Sequence[int] | None, Mapping[str, Joined]]:
        """Return how many slices of the type each waiting gang misses (None without a Controller), and all slices."""
        if find_controller() is None:
            return None, {}
        controller = ControllerConnection()
        try:
            demand = controller.ask(ControllerInterface.demand)
        except AttributeError:
            raise VersionMismatchError(
                "the Controller can't say what its jobs miss, as it is older: iris-ray cluster controller upgrade"
            ) from None
        return demand.get(tpu_type, ()), joined_slices(controller.ask_all(ControllerInterface.list_workers))

    def close(self, name: str) -> None:
        """Keep new jobs off a slice, if it has hosts."""
        with suppress(UnknownNameError):
            why = "iris-ray cluster provision gives it back"
            ControllerConnection().ask(ControllerInterface.taint, name, GIVEN_BACK, why, current_user())

    def reopen(self, name: str) -> None:
        """Let a slice take new jobs again."""
        with suppress(UnknownNameError):  # it was not closed, or an operator has opened it
            ControllerConnection().ask(ControllerInterface.lift_taint, name, GIVEN_BACK, current_user())


def joined_slices(workers: Sequence[WorkerStatus]) -> dict[str, Joined]:
    """Return the slices that have hosts in the cluster, by name."""
    return {
        view.slice: Joined(
            whole=view.state is not SliceState.INCOMPLETE,
            in_use=bool(view.jobs) or any(host.holder or host.foreign for host in view.hosts),
            closed=any(TAINT_PREFIX + GIVEN_BACK in host.attributes for host in view.hosts),
        )
        for view in slices_of([worker for worker in workers if worker.attributes])  # no job gets the others
        if view.is_slice
    }


@cache
def _meter() -> "RayMeter":
    from iris_ray.actors.controller.metrics import RayMeter

    return RayMeter()


def count_failure(cause: str) -> None:
    """Count a failure of this command among the cluster's metrics."""
    from iris_ray.actors.controller.metrics import PROVISION_FAILURES

    _meter().add(PROVISION_FAILURES, 1, {"cause": cause})


class Provisioner:
    """Looks, plans and acts, turn by turn.

    Args:
        settings: what is wanted.
        cloud: the zone.
        jobs: the cluster.
        template: a request for a slice; only its name changes.
        dry_run: print what would be done, and change nothing.
        failed: counts a failure for the metrics, by its cause.
    """

    def __init__(
        self,
        settings: Settings,
        cloud: CloudTpu,
        jobs: Jobs,
        template: NewSlice,
        dry_run: bool = False,
        failed: Callable[[str], object] = count_failure,
    ) -> None:
        self._settings = settings
        self._cloud = cloud
        self._jobs = jobs
        self._template = template
        self._dry_run = dry_run
        self._failed = failed
        self._history = ProvisioningHistory()
        self._closed: set[str] = set()  # slices with our taint
        self._said: set[str] = set()
        self._said_before: set[str] = set()

    def try_turn(self) -> None:
        """Take a turn, and report errors that may be gone by the next one, such as those of a missing head."""
        from ray.exceptions import RayError

        try:
            self.turn()
        except (ProviderError, ControllerUnavailableError) as error:
            self._failed("provider" if isinstance(error, ProviderError) else "controller")
            self._say(str(error), problem=True)
        except (RayError, OSError) as error:
            self._failed("ray")
            self._say(f"Ray does not answer: {(str(error).splitlines() or [type(error).__name__])[0]}", problem=True)

    def turn(self) -> None:
        """Take a turn; raises ProviderError, ControllerUnavailableError and VersionMismatchError."""
        self._said_before, self._said = self._said, set()
        found = self._cloud.queued_slices()
        demand, joined = self._jobs.look(self._settings.config.name)
        if demand is None:
            self._say(NO_CONTROLLER, problem=True)
        actions = plan(self._settings, demand, found, joined, self._history, time.monotonic(), time.time())
        for action in actions:
            self._say(f"would {action}" if self._dry_run else str(action))
        if self._dry_run:
            if not actions:
                self._say(f"would do nothing; waiting jobs miss {sum(demand or ())} {self._settings.config.name}")
            return
        if demand is not None:
            self._reopen(found, joined, actions)
        for action in actions:
            if isinstance(action, Delete):
                self._delete(action)
        for action in actions:
            if isinstance(action, Create) and not self._create(action):
                break  # the API would refuse the next request, too

    def _create(self, action: Create) -> bool:
        now = time.monotonic()
        self._history.unconfirmed.setdefault(action.name, now)
        refused = self._cloud.create(self._template.named(action.name))
        if refused is not None:
            self._failed("refused")
            self._history.refused(action.name, now, refused)
            self._say(f"{action.name} is not available: {refused}", problem=True)
        return refused is None

    def _delete(self, action: Delete) -> None:
        try:
            if action.if_unused and not self._close(action.name):
                self._say(f"{action.name} stays: it is in use meanwhile, or the Controller does not answer any more")
                return
        except NotPermittedError as error:
            self._say(f"{action.name} stays: it can't be closed to jobs: {error}", problem=True)
            return
        refused = self._cloud.delete(action.name, request_id("delete", action.name))
        if refused is not None:  # it counts towards the cap as long as it is there; the next turn tries again
            self._say(f"{action.name} can't be deleted: {refused}", problem=True)

    def _close(self, name: str) -> bool:
        """Keep new jobs off the slice. Return whether it is unused."""
        self._jobs.close(name)
        self._closed.add(name)
        demand, joined = self._jobs.look(self._settings.config.name)
        return demand is not None and (name not in joined or not joined[name].in_use)

    def _reopen(self, found: Sequence[QueuedSlice], joined: Mapping[str, Joined], actions: Sequence[Action]) -> None:
        """Lift the taints of slices that stay after all, and of slices that are gone, so that no taint is left over."""
        states = {one.name: one.state for one in found}
        given_back = {action.name for action in actions if isinstance(action, Delete)}
        ours = {one.name for one in found if self._settings.owns(one)}
        closed_before = {
            name for name, one in joined.items() if one.closed and name in ours
        }  # by a provisioner that has died
        for name in (self._closed | closed_before) - given_back:
            if states.get(name) not in (None, QueuedState.ACTIVE):
                continue
            try:
                self._jobs.reopen(name)
                self._closed.discard(name)
            except NotPermittedError as error:
                self._say(f"{name} can't be opened to jobs: {error}", problem=True)

    def _say(self, line: str, problem: bool = False) -> None:
        """Print a line, unless the turn before printed it too."""
        if line not in self._said_before | self._said:
            (say_error if problem else click.echo)(line)
        self._said.add(line)
