"""Tells the tasks of a job which of its slices run, at once when that changes. Each slice is a gang by itself."""

import asyncio
import secrets
from collections.abc import Sequence

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.pool.attempt import Attempt
from iris_ray.actors.pool.gang_run import GangRun
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.model.membership import Membership

TELL_AGAIN_S = 0.1
"""The pause before tasks are told again that could not be told: their processes may be just starting."""


class MembershipTelling:
    """Tells every running slice of a job.

    Args:
        gangs: the job's gangs, by slice id.
        slices: tell the tasks.

    Attributes:
        latest: the membership that is told.
    """

    def __init__(self, gangs: Sequence[GangRun], slices: ReservedSlices) -> None:
        self.latest = Membership(0, token=secrets.token_hex(16))
        self._gangs = gangs
        self._slices = slices
        self._background = BackgroundTasks()

    def changed(self) -> None:
        """Note that a slice has started or ended, and begin to tell all that run. Return at once."""
        attempts = [gang.running for gang in self._gangs]
        now = {attempt.id.gang: attempt.id.number for attempt in attempts if attempt is not None}
        stay = {i: number for i, number in self.latest.running.items() if now.get(i) == number}
        returned = frozenset(i for i, gang in enumerate(self._gangs) if gang.returned)
        self.latest = Membership(self.latest.epoch + 1, stay | now, returned, self.latest.token)
        for gang, attempt in zip(self._gangs, attempts, strict=True):
            if attempt is not None:
                telling = self._tell(gang, attempt, self.latest)
                self._background.start(telling, f"telling {attempt.id} which slices run")

    async def _tell(self, gang: GangRun, attempt: Attempt, membership: Membership) -> None:
        """Tell the tasks of an attempt, again and again until all have heard it or there is something newer to tell."""
        while self.latest is membership and gang.running is attempt:
            actors = map(self._slices.actor, attempt.place.names)
            asks = (actor.ask_once(SliceActor.hear_membership, attempt.id, membership) for actor in actors)
            replies = await asyncio.gather(*asks, return_exceptions=True)
            if all(reply is True for reply in replies):
                return
            await asyncio.sleep(TELL_AGAIN_S)
