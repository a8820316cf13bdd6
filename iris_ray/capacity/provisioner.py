"""Carries out the plans of `iris_ray.capacity.provisioning`, one turn after the other."""

import math
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import click

from iris_ray.actors.calls.controller_connection import NO_CONTROLLER, ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import WorkerStatus
from iris_ray.capacity.calls import CapacityCalls
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.lower_bands import MOST_SECONDS, ChipsLeft, ChipsWanted
from iris_ray.capacity.prices import Prices
from iris_ray.capacity.provider import (
    CANCELLABLE,
    HostSettings,
    NewSlice,
    Provider,
    QueuedSlice,
    QueuedState,
    Source,
)
from iris_ray.capacity.provisioning import Joined, plan
from iris_ray.capacity.provisioning_actions import (
    Action,
    Create,
    Delete,
    KeepSlices,
    LeaveChips,
    TakeBack,
    Wait,
    held,
    listed,
)
from iris_ray.capacity.provisioning_history import ProvisioningHistory, Unconfirmed
from iris_ray.capacity.report import capacity_report
from iris_ray.capacity.reservations import TAKEN_AFTER_S
from iris_ray.cli.conventions import say_error
from iris_ray.client.connection import current_user
from iris_ray.dashboard.slices import SliceState, slices_of
from iris_ray.errors import (
    ControllerUnavailableError,
    NotPermittedError,
    ProviderError,
    ProvisionerTakenError,
    UnknownNameError,
)
from iris_ray.model.constraints import TAINT_PREFIX

TURN_S = 120.0
"""The time between two leases within a turn, at most. A name is leased for that, and two intervals between turns."""
CHECK_S = 30.0
"""For how long a check holds that slices are unused and that a job waits. Deletions that begin later need another."""
MOST_ASKED = 8
"""The number of gangs in a turn for which the Controller is asked whether jobs leave slices; a few more if several are
asked for at once."""
GIVEN_BACK = "given-back"
"""The taint of slices that are about to be deleted."""
CLOSED_S = 3600.0
"""The time after which this taint expires by itself, so that none stays of a provisioner that has died; seconds. Each
turn that deletes the slice sets it again."""
_WITHOUT_HOSTS = (*CANCELLABLE, QueuedState.SUSPENDED, QueuedState.FAILED)


class Jobs:
    """A provisioner's view of the cluster: the slices that its jobs need, and the slices that they use."""

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        """Return the gangs that wait for slices (None without a Controller), and all slices."""
        if find_controller() is None:
            return None, {}
        controller = ControllerConnection()
        joined = joined_slices(controller.ask_all(ControllerInterface.list_workers))
        return controller.ask(CapacityCalls.demand), joined  # a slice that is free by the demand may be in use before

    def lease(self, owner: str, instance: str, seconds: float) -> bool | None:
        """Keep other provisioners of this name from working for some seconds, if a Controller runs.

        Return whether this one was the last that had the name; None without a Controller.
        """
        if find_controller() is None:
            return None
        return ControllerConnection().ask(CapacityCalls.lease_provisioner, owner, instance, seconds)

    def report(self, report: CapacityReport) -> None:
        """Tell the Controller what this provisioner has asked for and holds."""
        ControllerConnection().ask(CapacityCalls.report_capacity, report)

    def leave_chips(self, wanted: ChipsWanted) -> ChipsLeft:
        """Have jobs of lower bands leave slices of other types; see `CapacityCalls.leave_chips`."""
        return ControllerConnection().ask(CapacityCalls.leave_chips, wanted, current_user())

    def close(self, name: str) -> None:
        """Keep new jobs off a slice, if it has hosts."""
        with suppress(UnknownNameError):
            why = "iris-ray cluster provision gives it back"
            ControllerConnection().ask(ControllerInterface.taint, name, GIVEN_BACK, why, current_user(), CLOSED_S)

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


Clocks = tuple[float, float]
"""The readings of the monotonic clock and of the wall clock."""
_NEVER: Clocks = (-math.inf, -math.inf)


def real_clocks() -> Clocks:
    """Return what the clocks of this machine show."""
    return time.monotonic(), time.time()


def _with_slices(gang: WaitingGang, left: ChipsLeft | None) -> WaitingGang:
    """Return a gang with the slices that are reserved for it, once the Controller was asked."""
    if left is None:
        return gang
    return replace(gang, removes=() if left.is_held else left.slices, holds=left.slices if left.is_held else ())


def print_line(line: str, problem: bool) -> None:
    """Print what was done to stdout, and a problem to stderr."""
    (say_error if problem else click.echo)(line)


class Provisioner:
    """Looks, plans and acts, turn by turn.

    Args:
        settings: the types, sources and limits of its slices.
        clouds: the zones of its sources.
        jobs: the cluster.
        hosts: the properties of the hosts of all slices.
        prices: of chips, for people.
        every_s: seconds between two turns.
        dry_run: whether to print the plan of one turn, and change nothing.
        print_line: prints a line, which may be about a problem.
        clocks: reads the clocks.
    """

    def __init__(
        self,
        settings: Settings,
        clouds: Sequence[Provider],
        jobs: Jobs,
        hosts: HostSettings,
        prices: Prices = Prices(),  # noqa: B008 - frozen
        every_s: float = 30.0,
        dry_run: bool = False,
        print_line: Callable[[str, bool], None] = print_line,
        clocks: Callable[[], Clocks] = real_clocks,
    ) -> None:
        self._settings = settings
        self._clouds = {cloud.location: cloud for cloud in clouds}
        self._jobs = jobs
        self._hosts = hosts
        self._prices = prices
        self._every_s, self._lease_s = every_s, 2 * every_s + TURN_S
        self._dry_run = dry_run
        self._print, self._clocks = print_line, clocks
        self._instance = f"process {os.getpid()} of {socket.gethostname()} ({secrets.token_hex(4)})"
        self._leased_at = _NEVER
        self._taken: ProvisionerTakenError | None = None  # another process had the name when it was last asked for
        self._history = ProvisioningHistory()
        self._looked_at = _NEVER  # when the last turn with a plan ended
        self._seen: dict[str, list[QueuedSlice]] = {}  # by location
        self._closed: set[str] = set()  # slices with our taint
        self._said: set[str] = set()
        self._said_before: set[str] = set()
        self._undeleted: dict[str, str] = {}  # slices that are to go and stay, with the reason

    def run(self, once: bool = False) -> None:
        """Take one turn, or turns until Ctrl-C.

        An error of the first one is raised, unless another process has the name: an option or the account is wrong.
        """
        if self._dry_run:
            self.turn()
            return
        in_order = once
        try:
            try:
                self.turn()
            except ProvisionerTakenError as error:
                if once:
                    raise
                self._say(str(error), problem=True)
            while not once:
                time.sleep(self._every_s)
                self.try_turn()
        except KeyboardInterrupt:
            in_order = True
            raise
        finally:
            if in_order:
                self._end()

    def try_turn(self) -> None:
        """Take a turn, and report errors that may be gone by the next one, such as those of a missing head."""
        from ray.exceptions import RayError

        try:
            self.turn()
        except (ProviderError, ControllerUnavailableError, ProvisionerTakenError) as error:
            self._say(str(error), problem=True)
        except (RayError, OSError) as error:
            self._say(f"Ray does not answer: {(str(error).splitlines() or [type(error).__name__])[0]}", problem=True)

    def turn(self) -> None:
        """Take a turn.

        A zone that can't be reached keeps nothing from the others: its error is raised at the end.

        Raises:
            ProviderError: a zone can't be reached.
            ProvisionerTakenError: another provisioner of the same name works.
            ControllerUnavailableError, VersionMismatchError: the Controller can't be asked.
        """
        self._said_before, self._said = self._said, set()
        is_last = self._dry_run or self._lease()
        if not is_last or self._elapsed(self._looked_at) > self._lease_s:
            self._history.interrupted()
        asked = len(self._history.lacking)
        self._history.ask_again_s = max(TAKEN_AFTER_S, self._every_s * 2 * asked / MOST_ASKED)
        listed_before = dict(self._seen)
        unreachable = self._list()
        demand, joined = self._jobs.look()
        self._keep_those_in_cluster(listed_before, joined)
        found = [one for slices in self._seen.values() for one in slices]
        if demand is None:
            self._say(NO_CONTROLLER, problem=True)

        def make_plan() -> list[Action]:
            now, date = self._clocks()
            return plan(self._settings, demand, found, joined, self._history, now, date, unreachable)

        actions = make_plan()
        self._looked_at = self._clocks()
        self._tell(actions)
        if self._dry_run:
            if not actions:
                missed = Counter[str]()
                for gang in demand or ():
                    missed[gang.tpu_type] += gang.missing * gang.times
                of_types = ", ".join(f"{missed[config.name]} {config.name}" for config in self._settings.configs)
                self._say(f"would do nothing; waiting jobs miss {of_types}")
            return
        if demand is not None:
            self._reopen(found, joined, actions)
        self._undeleted = {}
        deletions = [action for action in actions if isinstance(action, Delete)]
        staying = self._delete_alone([one for one in deletions if not one.for_job], unreachable)
        answers: dict[tuple[str, Source], Action] = {}  # by the job for which the Controller was asked
        while demand is not None:
            left = self._ask_jobs(actions, answers)
            demand = [_with_slices(gang, left.get(gang.job_id)) for gang in demand]  # for the next plan of this turn
            if all(one.slices for one in left.values()) or len(answers) >= MOST_ASKED:
                break
            actions = make_plan()  # gangs behind one that gets no slices may have some
        actions = [answers.get(one.asked, one) if isinstance(one, LeaveChips) else one for one in actions]
        deletions = [action for action in actions if isinstance(action, Delete)]
        for job_id in dict.fromkeys(deletion.for_job for deletion in deletions if deletion.for_job):
            taken = [deletion for deletion in deletions if deletion.for_job == job_id]
            if any(staying.intersection(deletion.besides) for deletion in taken):
                continue
            held = any(gang.holds for gang in demand or () if gang.job_id == job_id)
            if self._take_back(job_id, taken, unreachable) and held:
                self._keep_slices(job_id)  # these are closed to jobs, and the others that are held are not needed
        for _ in self._settings.sources:  # a source that refuses now pauses: the next one is asked in the same turn
            if not self._create_all(actions, unreachable):
                break
            actions = [action for action in make_plan() if not isinstance(action, Delete | LeaveChips)]
            self._tell(actions)
        if demand is not None:
            now, date = self._clocks()
            self._jobs.report(
                capacity_report(
                    self._settings, found, joined, self._history, actions, self._undeleted, self._prices, now, date
                )
            )
        self._looked_at = self._clocks()
        if unreachable:
            raise next(iter(unreachable.values()))

    def _lease(self) -> bool:
        """Lease the name for some time. Return whether no other process has had it since the last lease.

        Raises:
            ProvisionerTakenError: another process has the name; or had it when this one last asked, and no Controller
                runs.
        """
        try:
            is_last = self._jobs.lease(self._settings.owner, self._instance, self._lease_s)
        except ProvisionerTakenError as error:
            self._taken = error
            raise
        if is_last is None and self._taken is not None:
            raise self._taken
        self._taken, self._leased_at = None, self._clocks()
        return is_last is not False

    def _lease_again(self) -> None:
        """Lease the name again if this turn takes long: before each change, as another process may have the name."""
        if self._elapsed(self._leased_at) > TURN_S / 4 and not self._lease():
            raise ProvisionerTakenError(
                f"another provisioner named {self._settings.owner} may have worked since this one leased the name: this"
                " turn ends, and the next one looks again"
            )

    def _elapsed(self, since: Clocks) -> float:
        """Return the seconds that have passed by the clock by which these are more.

        The monotonic clock stands still while a machine is suspended, and anybody may set the wall clock.
        """
        return max(abs(now - before) for now, before in zip(self._clocks(), since, strict=True))

    def _end(self) -> None:
        """Give this provisioner's name back to the Controller: it is not overdue, and another one may have the name."""
        with suppress(ControllerUnavailableError, ProvisionerTakenError):
            self._jobs.lease(self._settings.owner, self._instance, 0.0)

    def _list(self) -> dict[str, ProviderError]:
        """List the slices of all zones. Return the errors of those that can't be asked, by location.

        Raises:
            ProviderError: none can be asked, or one that never could: nobody knows what is held there.
        """
        errors: dict[str, ProviderError] = {}
        for location, cloud in self._clouds.items():
            try:
                self._seen[location] = cloud.queued_slices()
            except ProviderError as error:
                errors[location] = error
                if location not in self._seen or len(errors) == len(self._clouds):
                    raise
        return errors

    def _keep_those_in_cluster(
        self, listed_before: Mapping[str, list[QueuedSlice]], joined: Mapping[str, Joined]
    ) -> None:
        """Keep the slices that are no longer listed while they have hosts in the cluster: their chips are in use."""
        for location, slices in self._seen.items():
            names = {one.name for one in slices}
            missing = [one for one in listed_before.get(location, ()) if one.name in joined and one.name not in names]
            self._seen[location] = [*slices, *missing]

    def _location_of(self, name: str) -> str:
        return next(location for location, slices in self._seen.items() if any(one.name == name for one in slices))

    def _tell(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._say(f"would {action}" if self._dry_run else str(action))

    def _create_all(self, actions: Sequence[Action], unreachable: dict[str, ProviderError]) -> bool:
        """Request slices. Return whether a source has refused one."""
        refusing: set[tuple[str, str]] = set()  # the API would refuse the next request of this type, too
        for action in actions:
            if isinstance(action, Create) and action.source.location not in unreachable:
                kind = action.source.key, action.config.name
                if kind in refusing:
                    continue
                self._lease_again()
                now = self._clocks()[0]
                self._history.unconfirmed.setdefault(action.name, Unconfirmed(action.source.key, now))
                try:
                    refused = self._clouds[action.source.location].create(
                        NewSlice(action.name, action.config, action.source, self._hosts)
                    )
                except ProviderError as error:
                    unreachable[action.source.location] = error
                    continue
                if refused is not None:
                    refusing.add(kind)
                    self._history.refused(action.name, *kind, now, refused)
                    self._say(f"{action.name} is not available in {action.source}: {refused}", problem=True)
        return bool(refusing)

    def _delete_alone(self, actions: Sequence[Delete], unreachable: dict[str, ProviderError]) -> set[str]:
        """Delete slices that are not for a job. Return the names of those that stay."""
        staying, checked_at = set[str](), _NEVER
        for number, action in enumerate(actions):
            if self._elapsed(checked_at) > CHECK_S:
                checked_at = self._clocks()
                staying |= self._close(actions[number:], unreachable)
            location = self._location_of(action.name)
            if action.name in staying:
                continue
            if location in unreachable:
                self._undeleted[action.name] = str(unreachable[location])
            elif self._ask_to_delete(action.name, location, unreachable):
                self._history.leaving[action.name] = True
                continue
            staying.add(action.name)
        return staying

    def _take_back(self, job_id: str, actions: Sequence[Delete], unreachable: dict[str, ProviderError]) -> bool:
        """Delete the slices whose chips complete a job's gang: all of them, or none if one stays or the job is gone.

        Return whether the provider has accepted all deletions.
        """
        places = {action.name: self._location_of(action.name) for action in actions}
        if any(location in unreachable for location in places.values()):
            return False
        checked_at = _NEVER
        for number, (name, location) in enumerate(places.items()):
            if self._elapsed(checked_at) > CHECK_S:
                checked_at = self._clocks()
                if location in unreachable or self._close(actions[number:], unreachable, job_id):
                    return False
            if (accepted := self._ask_to_delete(name, location, unreachable)) is not False:
                self._history.leaving[name] = accepted is True
            else:
                self._history.not_deleted(name, self._clocks()[0], self._undeleted[name])
        return all(self._history.leaving.get(name) for name in places)

    def _keep_slices(self, job_id: str) -> None:
        """End the reservation of slices for a job."""
        self._lease_again()
        with suppress(NotPermittedError):
            self._jobs.leave_chips(ChipsWanted(job_id, 0))

    def _ask_jobs(self, actions: Sequence[Action], answers: dict[tuple[str, Source], Action]) -> dict[str, ChipsLeft]:
        """Have jobs of lower bands leave slices to gangs, and let them keep those that are no longer needed.

        Args:
            actions: a plan.
            answers: what is done instead of each question (`LeaveChips.asked`); this call asks only the other ones, and
                adds these.

        Returns:
            What is left to each job that was asked for.
        """
        found: dict[str, ChipsLeft] = {}
        held_at: set[Source] = set()  # slices are held for one gang of a source at a time
        for action in actions:
            if isinstance(action, KeepSlices):
                self._keep_slices(action.job_id)
        for action in actions:
            if isinstance(action, LeaveChips) and action.asked not in answers:
                left = found[action.wanted.job_id] = self._ask_for(action, action.source not in held_at)
                if left.is_held:
                    held_at.add(action.source)
                answer = answers[action.asked] = self._asked(action, left)
                self._say(str(answer))
        return found

    def _ask_for(self, action: LeaveChips, may_hold: bool) -> ChipsLeft:
        if self._lease_s > MOST_SECONDS:
            return ChipsLeft(why_not=f"this provisioner looks only every {self._every_s:g} s (--every)")
        self._lease_again()
        try:
            wanted = replace(action.wanted, may_hold=may_hold and action.wanted.may_hold, seconds=self._lease_s)
            left = self._jobs.leave_chips(wanted)
        except NotPermittedError as error:
            return ChipsLeft(why_not=str(error))
        if left.slices or wanted.may_hold:
            return left
        reach = self._settings.take_back
        why = "a job before it holds slices" if reach is Reach.HELD else reach.flag
        return replace(left, why_not=f"{left.why_not}; none are held for it: {why}")

    def _asked(self, action: LeaveChips, left: ChipsLeft) -> TakeBack | Wait:
        """Remember the answer to a question. Return what is done, or why the gang waits."""
        job_id, now = action.wanted.job_id, self._clocks()[0]
        if not left.slices:
            self._history.not_left(job_id, action.source.key, now, left.why_not)
            return Wait(action.tpu_type, f"{action.otherwise}; jobs of lower bands leave none: {left.why_not}")
        types = {one.name: one.tpu_type for one in action.wanted.slices}
        to_go = [name for name in left.slices if types.get(name, action.tpu_type) != action.tpu_type]
        if left.is_held:
            return action.granted(held(to_go))
        self._history.evicted(job_id, now)
        jobs = f"{listed(left.jobs)} leave within {left.seconds:.0f} s" if left.jobs else "no job runs there"
        return action.granted(f"{jobs}; once {listed(to_go)} are deleted")

    def _granted(self, names: Iterable[str], unreachable: dict[str, ProviderError]) -> set[str]:
        """Return the requests among some slices that wait no more, or of which nobody knows: a job may start there."""
        found: set[str] = set()
        for location, slices in self._seen.items():
            requests = {one.name for one in slices if one.state in CANCELLABLE} & {*names}
            if not requests:
                continue
            try:
                states = {one.name: one.state for one in self._clouds[location].queued_slices()}
            except ProviderError as error:
                unreachable[location] = error
                states = dict.fromkeys(requests, QueuedState.UNKNOWN)
            granted = {name for name in requests if states.get(name, QueuedState.FAILED) not in _WITHOUT_HOSTS}
            for name in granted:
                self._say(f"{name} stays: it waits no more, or the provider has stopped answering")
            found |= granted
        return found

    def _ask_to_delete(self, name: str, location: str, unreachable: dict[str, ProviderError]) -> bool | None:
        """Delete a slice. Return whether the provider does it; None if it can't be asked."""
        self._lease_again()
        try:
            refused = self._clouds[location].delete(name)
        except ProviderError as error:
            unreachable[location] = error
            self._undeleted[name] = str(error)
            return None
        if refused is not None:  # it counts towards the limits as long as it is there; the next turn tries again
            self._undeleted[name] = refused
            self._say(f"{name} can't be deleted: {refused}", problem=True)
        return refused is None

    def _close(self, actions: Sequence[Delete], unreachable: dict[str, ProviderError], for_job: str = "") -> set[str]:
        """Keep new jobs off slices that are to be deleted. Return the names of those that stay.

        They are in use, can't be closed, or are requests that wait no more. All of them stay if the job that was to get
        their chips waits for them no more, or if this process stood still meanwhile, so that nobody knows.
        """
        self._lease_again()
        began_at, everything = self._clocks(), {action.name for action in actions}
        unused = [one.name for one in actions if one.if_unused and self._location_of(one.name) not in unreachable]
        staying = set[str]()
        for name in unused:
            try:
                self._jobs.close(name)
                self._closed.add(name)
            except (NotPermittedError, ControllerUnavailableError) as error:
                staying.add(name)
                self._undeleted[name] = why = f"it can't be closed to jobs: {error}"
                self._say(f"{name} stays: {why}", problem=True)
                if isinstance(error, ControllerUnavailableError):
                    staying |= {*unused}
                    break
        if for_job and staying:
            return staying
        if for_job or not staying.issuperset(unused):
            demand, joined = self._jobs.look()
            for name in unused:
                if demand is None or (name in joined and joined[name].in_use):
                    staying.add(name)
                    self._say(f"{name} stays: it is in use again, or the Controller has stopped answering")
            if for_job and not any(one.job_id == for_job and one.may_take for one in demand or ()):
                self._say(f"no slices are deleted for {for_job}: it waits for them no more")
                return everything
        staying |= self._granted(everything, unreachable)
        return everything if self._elapsed(began_at) > TURN_S else staying

    def _reopen(self, found: Sequence[QueuedSlice], joined: Mapping[str, Joined], actions: Sequence[Action]) -> None:
        """Lift the taints of slices that stay after all, and of slices that are gone, so that no taint is left over."""
        states = {one.name: one.state for one in found}
        given_back = {action.name for action in actions if isinstance(action, Delete)} | self._history.leaving.keys()
        ours = {one.name for one in found if self._settings.owns(one)}
        closed_before = {
            name for name, one in joined.items() if one.closed and name in ours
        }  # by a provisioner that has died
        for name in (self._closed | closed_before) - given_back:
            if states.get(name) not in (None, QueuedState.ACTIVE):
                continue
            self._lease_again()
            try:
                self._jobs.reopen(name)
                self._closed.discard(name)
            except NotPermittedError as error:
                self._say(f"{name} can't be opened to jobs: {error}", problem=True)

    def _say(self, line: str, problem: bool = False) -> None:
        """Print a line, unless the turn before printed it too."""
        if line not in self._said_before | self._said:
            self._print(line, problem)
        self._said.add(line)
