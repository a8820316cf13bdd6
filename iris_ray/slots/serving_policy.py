"""What operators can choose about serving, and how often everything is checked again as a safety net."""

from dataclasses import dataclass, field
from typing import Final

from iris_ray.slots.policy import Policy

REPORT_S: Final = 5.0
"""How often runners are asked what is there."""
CONVERGE_S: Final = 5.0
"""How often the queue is looked at, and slots are created, started and deleted anew, although nothing was heard."""
ACTIVITY_S: Final = 30.0
"""How often idle slots are looked for, and demand is counted."""


@dataclass(frozen=True, slots=True)
class ServingPolicy:
    """How requests are served. Times are in seconds.

    Args:
        placement: where slots go, and which may be evicted.
        most_waiting: requests that may wait at once.
        most_waiting_bytes: what those may ask, together. One request may always wait, whatever its size.
        ageing_s: how long a request waits before a slot of another model takes no more requests for its sake, or a
            session that has had its seat for as long gives it back.
        drain_s: how long a slot that ends may finish its requests; then they are cut off and wait again. One that ends
            for the sake of another model finishes them however long they take. What was told to stop, such as a
            session that is over, may go on for as long; then it keeps nobody waiting any more.
        load_s: how long a model may load before the load counts as failed.
        late_factor: a load that takes so many times as long as the last one is late: it no longer keeps others from
            being tried elsewhere. So is a slot that waits for so long until its place is free: it is planned elsewhere.
        late_s: but a load is not late before so long.
        idle_s: how long a slot may be idle before it ends although nobody needs its memory.
        most_load_failures: loads in a row that may fail before those who wait are told.
        most_attempts: how often a request may be given to slots that are lost.
        longest_pause_s: between loads that fail.
        avoid_runner_s: how long a runner gets no slot of a model that failed to load there.
        silence_s: how long nothing may be heard of a client before its requests and sessions end.
    """

    placement: Policy = field(default_factory=Policy)
    most_waiting: int = 10_000
    most_waiting_bytes: int = 2**30
    ageing_s: float = 30.0
    drain_s: float = 60.0
    load_s: float = 600.0
    late_factor: float = 3.0
    late_s: float = 30.0
    idle_s: float = 600.0
    most_load_failures: int = 4
    most_attempts: int = 4
    longest_pause_s: float = 60.0
    avoid_runner_s: float = 120.0
    silence_s: float = 30.0

    def pause_after(self, failures: int) -> float:
        """Return how long to wait after so many failed loads: 1, 2, 4, … seconds."""
        return float(min(2.0 ** min(failures - 1, 20), self.longest_pause_s))
