"""Carries out the plans of `iris_ray.cloud.provisioning`, one turn after the other."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import NO_CONTROLLER, ControllerConnection, find_controller
from iris_ray.actors.wire.slices import SliceState, slices_of
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.cli.exits import say_error
from iris_ray.client.identity import current_user
from iris_ray.cloud.cloud_tpu import CloudTpu
from iris_ray.cloud.history import History
from iris_ray.cloud.provisioning import Action, Create, Delete, Joined, Settings, plan
from iris_ray.cloud.queued_slices import NewSlice, QueuedSlice, QueuedState, request_id
from iris_ray.errors import (
    ControllerUnavailableError,
    NotPermittedError,
    ProviderError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.model.constraints import TAINT_PREFIX

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
                "the Controller can't say what its jobs miss, as it is of an older version: iris-ray controller upgrade"
            ) from None
        return demand.get(tpu_type, ()), joined_slices(controller.ask_all(ControllerInterface.list_workers))

    def close(self, name: str) -> None:
        """Keep new jobs off a slice, if it has hosts."""
        with suppress(UnknownNameError):
            why = "iris-ray provision gives it back"
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


class Provisioner:
    """Looks, plans and acts, turn by turn.

    Args:
        settings: what is wanted.
        cloud: the zone.
        jobs: the cluster.
        template: a request for a slice; only its name changes.
        dry_run: print what would be done, and change nothing.
    """

    def __init__(
        self, settings: Settings, cloud: CloudTpu, jobs: Jobs, template: NewSlice, dry_run: bool = False
    ) -> None:
        self._settings = settings
        self._cloud = cloud
        self._jobs = jobs
        self._template = template
        self._dry_run = dry_run
        self._history = History()
        self._closed: set[str] = set()  # slices with our taint
        self._said: set[str] = set()
        self._said_before: set[str] = set()

    def try_turn(self) -> None:
        """Take a turn, and report errors that may be gone by the next one, such as those of a missing head."""
        from ray.exceptions import RayError

        try:
            self.turn()
        except (ProviderError, ControllerUnavailableError) as error:
            self._say(str(error), problem=True)
        except (RayError, OSError) as error:
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
