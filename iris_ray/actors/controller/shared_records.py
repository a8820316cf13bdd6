"""What is recorded once for the whole cluster, beside the jobs: settings, and sums over users and chips."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from iris_ray.actors.controller.clock import Clock
from iris_ray.goodput.fleet_times import FleetTimes
from iris_ray.goodput.user_times import UserTimes
from iris_ray.state import ControllerState
from iris_ray.state.fleet import Taint

USAGE_EVERY_S = 60.0
"""So often sums are written. What they held since then counts for nothing after a crash."""


class SharedRecords:
    """Knows what was recorded last, and makes new records of what has changed since.

    Args:
        fleet_times: what the chips of the cluster were in.
        user_times: what the time of forgotten jobs went into.
        clock: the Controller's.
    """

    def __init__(self, fleet_times: FleetTimes, user_times: UserTimes, clock: Clock) -> None:
        self._fleet_times = fleet_times
        self._user_times = user_times
        self._clock = clock
        self._taints: dict[str, dict[str, Taint]] = {}
        self._limits = 0  # the version of the users' limits that is recorded
        self._settings = 0  # and that of the cluster's settings
        self._users = 0  # the version of `user_times` that is recorded
        self._sums_at = -math.inf  # when the sums were recorded

    def changed(self, state: ControllerState) -> Iterator[tuple[str, bytes]]:
        """Yield each kind of record that is to be written anew, and what to write."""
        if state.fleet.taints != self._taints:
            found = state.fleet.taints.items()
            plain = {target: {name: (t.reason, t.until) for name, t in named.items()} for target, named in found}
            recorded = json.dumps(plain).encode()
            self._taints = {target: dict(named) for target, named in found}
            yield "taints", recorded
        if state.past_usage.now >= self._sums_at + USAGE_EVERY_S:
            self._sums_at = state.past_usage.now
            yield from self._sums(state)
        if state.limits.version != self._limits:
            table = [(user, band.name, dict(limits.items())) for (user, band), limits in state.limits.table.items()]
            recorded = json.dumps(table).encode()
            self._limits = state.limits.version
            yield "limits", recorded
        if state.settings.version != self._settings:
            rows = [(name, was.text, was.user, was.at) for name, was in state.settings.was_set.items()]
            recorded = json.dumps(rows).encode()
            self._settings = state.settings.version
            yield "settings", recorded

    def _sums(self, state: ControllerState) -> Iterator[tuple[str, bytes]]:
        """Yield what grows all the time: what the chips were in, and what users have held."""
        if not self._fleet_times.is_empty:
            yield "fleet", self._fleet_times.to_json()
        add_forgotten(state, self._user_times, self._clock)
        if self._user_times.version != self._users:
            self._users = self._user_times.version
            yield "users", self._user_times.to_json()
        if hours := state.past_usage.snapshot():
            yield "usage", json.dumps([state.past_usage.now, hours]).encode()


def add_forgotten(state: ControllerState, user_times: UserTimes, clock: Clock) -> None:
    """Add up what the time of jobs that were just forgotten went into, by the wall clock of their end."""
    for job in state.take_forgotten():
        user_times.add(replace(job, ended_at=clock.wall(job.ended_at)))
