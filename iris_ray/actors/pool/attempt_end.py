"""How an attempt ended, and what is known of its tasks and hosts by then."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.evidence import Evidence
from iris_ray.actors.pool.stop_request import StopRequest
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import DID_NOT_RUN, EndKind, Fault, HostEvidence, TaskEnd, TaskKey, TpuPreempted
from iris_ray.model.verdict import Verdict, judge_gang

FAULTS = {
    EndKind.CRASHED: Fault.CRASH,
    EndKind.DISK_ERROR: Fault.DISK,
    EndKind.NEVER_STARTED: Fault.NO_START,
    EndKind.HOST_UNFIT: Fault.HOST,
}
"""Ends that may be the host's fault."""

Ends = dict[TaskKey, TaskEnd | None]
"""How each task ended; None if that was not reported."""


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        place: where it ran.
        verdict: why it ended, and which task was the first cause.
        ends: how each task ended.
        suspects: hosts that did not answer or can't take a task, by node id, and why.
        lost_before: tasks whose host broke before they started, while its slice was idle.
        moved_for: the notice because of which all tasks were ended, if nothing else was the matter.
    """

    place: AttemptPlace
    verdict: Verdict
    ends: Ends
    suspects: Mapping[str, str] = field(default_factory=dict)
    lost_before: Collection[TaskKey] = frozenset()
    moved_for: Notice | None = None

    @property
    def unfit_slices(self) -> list[str]:
        """The slices with a host that can't take a task."""
        return [self.place.name(key) for key in _refused(self.ends)]

    @property
    def slices_with_dead_standbys(self) -> set[str]:
        """The slices whose standbys may have ended while they waited: one has, or a host's memory was used up.

        What has ended one may have ended others, and Ray's memory monitor ends those that wait before the task.
        """
        telling = EndKind.NEVER_STARTED, EndKind.OUT_OF_MEMORY
        return {self.place.name(key) for key, end in self.ends.items() if end is not None and end.kind in telling}

    # -- about the first cause; not after success -------------------------------------------------------------------

    @property
    def never_started(self) -> bool:
        """Whether the task ended before any user code ran in it, or its host was lost from the beginning."""
        end = self._first_end
        return (end is not None and end.kind in DID_NOT_RUN) or self._cause in self.lost_before

    @property
    def is_failed_launch(self) -> bool:
        """Whether a task that never started counts as a failed launch: not if it waits for another task of ours."""
        end = self._first_end
        return end is None or end.kind is not EndKind.CHIPS_TAKEN

    @property
    def exit_code(self) -> int | None:
        """The exit code of the task's process if it has failed, and that is known."""
        end = self._first_end
        return None if end is None or end.kind is EndKind.RETURNED else end.exit_code

    @property
    def blamed_host(self) -> tuple[str, Fault] | None:
        """The node id of the host that may be at fault for the task's end, and in which way; None if it can't be."""
        end = self._first_end
        fault = None if end is None else FAULTS.get(end.kind)
        return None if fault is None else (self.place.host(self._cause).node_id, fault)

    @property
    def _cause(self) -> TaskKey:
        assert self.verdict.cause is not None
        return self.verdict.cause

    @property
    def _first_end(self) -> TaskEnd | None:
        return self.ends.get(self._cause)


def all_returned(place: AttemptPlace, ends: Ends) -> AttemptEnd:
    """Return the end of an attempt whose tasks have all returned."""
    return AttemptEnd(place, judge_gang(ends, dict.fromkeys(ends, HostEvidence())), ends)


def with_late_ends(ends: Ends, late: Mapping[TaskKey, TaskEnd], was_asked: bool) -> Ends:
    """Return how each task ended.

    Args:
        ends: what was known before the tasks were stopped. It takes precedence: a task's process has ended by now, and
            a payload that the pool has not fetched ended with it.
        late: what was known after that.
        was_asked: whether iris_ray wanted the attempt to end. Then a task counts as stopped if it has returned
            meanwhile and its result is lost.
    """
    known = {key: end for key, end in ends.items() if end is not None}
    return {**ends, **{key: _without_reference(end, was_asked) for key, end in late.items()}, **known}


def _without_reference(end: TaskEnd, was_asked: bool) -> TaskEnd | None:
    if end.payload is None or isinstance(end.payload, bytes):
        return end
    if end.kind is not EndKind.RETURNED:
        return replace(end, payload=None)
    return replace(end, kind=EndKind.STOPPED, payload=None, exit_code=None) if was_asked else None


def judge_attempt(place: AttemptPlace, ends: Ends, evidence: Evidence, stop: StopRequest, at_once: bool) -> AttemptEnd:
    """Return the end of an attempt whose tasks have been stopped.

    Args:
        place: where it ran.
        ends: how each task ended.
        evidence: what was known of its hosts before its tasks were stopped.
        stop: why we ended it, if we did.
        at_once: whether it ended right after its start.
    """
    cause = stop.cause
    if cause is not None and isinstance(cause[1], TpuPreempted):
        cause = evidence.draining or cause[0], cause[1]
    verdict = judge_gang(ends, evidence.hosts, cause, was_told=stop.moved_for is not None)
    was_ours = cause is not None and verdict.result is cause[1]  # else something else was the matter
    suspects = dict(evidence.suspects)
    for key, end in _refused(ends).items():
        suspects.setdefault(place.host(key).node_id, end.error)
    return AttemptEnd(
        place,
        verdict,
        ends,
        suspects=suspects,
        lost_before=evidence.lost_without_notice if at_once else frozenset(),
        moved_for=stop.moved_for if was_ours else None,
    )


def _refused(ends: Ends) -> dict[TaskKey, TaskEnd]:
    """Return the ends of tasks that their hosts can't take."""
    kinds = EndKind.HOST_UNFIT, EndKind.CHIPS_TAKEN
    return {key: end for key, end in ends.items() if end is not None and end.kind in kinds}
