"""What a plan proposes."""

from dataclasses import dataclass, field

from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.state.events import (
    AssignedEvent,
    EvictionEvent,
    GivesWayEvent,
    RoomKeptEvent,
    SpareGivenBackEvent,
    TaskUnschedulableEvent,
)


@dataclass(slots=True)
class SchedulingResult:
    """What to do now.

    Attributes:
        assignments: what to start: events for the state.
        pending_reasons: job id → why the job waits, for every other pending job that the plan has looked at.
        timed_out: jobs that did not run within their ``scheduling_timeout``: events for the state.
        unschedulable: jobs with a constraint that can't be evaluated on any worker: events for the state.
        starving: ids of jobs that have waited longer than the backfill bound and for which groups are kept.
        rooms: which hosts are to be kept for which jobs from now on: events for the state.
        gave_up_room: whether what was kept for a job is so no more, since the job runs or can't run for a while. This
            plan keeps nothing for others instead: the next one, which must look at all jobs, does.
        evictions: what is to give its hosts to whom, once the rooms are kept: events for the state.
        given_back: which spares and jobs that yield give their hosts back: events for the state.
        complete: whether the plan went through the whole queue. Otherwise it placed as much as it was asked to, and
            once that is committed, the next plan goes on.
    """

    assignments: list[AssignedEvent] = field(default_factory=list)
    pending_reasons: dict[str, PendingReason] = field(default_factory=dict)
    timed_out: list[TaskUnschedulableEvent] = field(default_factory=list)
    unschedulable: list[TaskUnschedulableEvent] = field(default_factory=list)
    starving: list[str] = field(default_factory=list)
    rooms: list[RoomKeptEvent] = field(default_factory=list)
    gave_up_room: bool = False
    evictions: list[EvictionEvent] = field(default_factory=list)
    given_back: list[SpareGivenBackEvent | GivesWayEvent] = field(default_factory=list)
    complete: bool = True
