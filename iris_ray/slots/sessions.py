"""When a session gives its seat back. Its client calls the slot directly, and only says that it is in use."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from iris_ray.slots.active_requests import Active, ActiveRequests
from iris_ray.slots.instructions import Instruction
from iris_ray.slots.models import SlotIdentity
from iris_ray.slots.serving_policy import ServingPolicy
from iris_ray.slots.slot import Slot

CLOSED = "it was closed"


@dataclass(slots=True)
class Sessions:
    """The sessions among the requests that slots serve. All of them end as a request does that is stopped."""

    active: ActiveRequests
    policy: ServingPolicy

    def on(self, slot: Slot) -> list[Active]:
        """Return the sessions that have a seat on a slot."""
        found = [self.active.by_id[request_id] for request_id in sorted(slot.active)]
        return [each for each in found if each.request.is_session]

    def renew(self, used: Mapping[str, float], now: float) -> None:
        """Note that a client has these sessions, and when each was used."""
        for session_id, used_at in used.items():
            if found := self.active.by_id.get(session_id):
                found.granted = True
                found.heard_at, found.used_at = now, max(found.used_at, min(used_at, now))

    def stop_unused(self, now: float) -> Iterator[Instruction]:
        """Stop the sessions that nobody uses, or whose client is silent."""
        for each in list(self.active.by_id.values()):
            if each.request.is_session and not each.stopped and (reason := self._unused(each, now)):
                yield self.active.stop(each, reason, now)

    def stop_on(self, slot: Slot, reason: str, now: float) -> Iterator[Instruction]:
        """Stop the sessions on a slot that has to end."""
        for each in self.on(slot):
            if not each.stopped:
                yield self.active.stop(each, f"slot {slot.slot_id} has to end: {reason}", now)

    def call_back(self, identity: SlotIdentity, now: float) -> Iterator[Instruction]:
        """Stop one session of a model for which others have waited for long: the one that has had its seat for longest.

        No other is stopped before that one has ended or has had its time to end, and none before it has had its seat
        for a while.
        """
        sessions = [each for slot in self.active.fleet.of_identity(identity) for each in self.on(slot)]
        long = [each for each in sessions if not each.stopped and each.begun_at + self.policy.ageing_s <= now]
        if long and not any(each.stopped and now - each.stopped_at < self.policy.drain_s for each in sessions):
            oldest = min(long, key=lambda each: (each.begun_at, each.turn))
            yield self.active.stop(oldest, f"others have waited for {identity} for {self.policy.ageing_s:g} s", now)

    def _unused(self, session: Active, now: float) -> str:
        idle_s = session.request.idle_s
        assert idle_s is not None, "a session has a limit"
        if now - session.used_at >= idle_s:
            return f"it was not used for {idle_s:g} s"
        is_silent = now - session.heard_at >= self.policy.silence_s
        return f"its client was silent for {self.policy.silence_s:g} s" if is_silent else ""
