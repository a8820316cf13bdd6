"""The latest progress of running jobs. It is in memory only: pools report it again every half minute."""

import math
from collections.abc import Container
from copy import copy
from dataclasses import replace

from iris_ray.actors.protocol.messages import GangProgress
from iris_ray.actors.protocol.status import Heard
from iris_ray.actors.protocol.task_files import STATUS_CHARACTERS
from iris_ray.model.goodput import JobTimes, Marks
from iris_ray.model.jobs import Gang
from iris_ray.state.events import AttemptSavesEvent

STALE_S = 120.0
"""A gang that has not reported for this time may be replaced by another gang of its job; seconds."""
MOST_STRAGGLERS = 5
JOBS_BEFORE_SWEEP = 1000


def newer_marks(times: JobTimes, heard: Heard | None) -> Marks | None:
    """Return the marks that a job's latest attempt has reported, if they know a later step than the recorded ones."""
    latest = times.attempts[-1] if times.attempts else None
    if heard is None or latest is None or heard.attempt != latest.number or not heard.marks.makes_sense:
        return None
    known = latest.marks.steps[-1:]
    return heard.marks if not known or heard.marks.steps[-1:] > known else None


def with_latest(times: JobTimes, heard: Heard | None) -> JobTimes:
    """Return the times with the reported marks of the latest attempt, if they are newer than the recorded ones."""
    if (marks := newer_marks(times, heard)) is None:
        return times
    known = copy(times)
    known.attempts = [*times.attempts[:-1], replace(times.attempts[-1], marks=marks)]
    return known


SAVES_RECORDED_EVERY_S = 60.0
"""The shortest interval between two records of a gang's saves; seconds."""


def news_of_saves(gang: Gang, progress: GangProgress, now: float) -> AttemptSavesEvent | None:
    """Return an event with the saves that a gang has reported, if it runs and the event changes the state."""
    saves = progress.saves
    saved_at = 0.0 if saves.ago_s is None else now - max(0.0, saves.ago_s)
    learns = saves.heeds_notices and gang.heeds_notices is None
    if progress.attempt.number != gang.attempt or not (learns or saved_at > gang.saved_at + SAVES_RECORDED_EVERY_S):
        return None
    every_s = math.inf if saves.every_s is None else saves.every_s
    return AttemptSavesEvent(progress.attempt, saved_at, every_s, saves.heeds_notices)


class ProgressBoard:
    """The latest progress of the first running gang of each job."""

    def __init__(self) -> None:
        self._of: dict[str, Heard] = {}
        self._most = JOBS_BEFORE_SWEEP

    def of(self, job_id: str) -> Heard | None:
        return self._of.get(job_id)

    def note(self, progress: GangProgress, now: float, jobs: Container[str]) -> None:
        """Remember the progress of a gang.

        Args:
            progress: the gang's.
            now: on the Controller's clock.
            jobs: ids of all known jobs; the others are forgotten now and then.
        """
        job_id, attempt, gang = progress.attempt
        known = self._of.get(job_id)
        if known is not None and now < known.at + STALE_S and (gang, -attempt) > (known.gang, -known.attempt):
            return
        beat_at = None if progress.age is None else now - max(0.0, progress.age)
        status = None if progress.status is None else progress.status[:STATUS_CHARACTERS]
        slow = tuple(words[:STATUS_CHARACTERS] for words in progress.stragglers[:MOST_STRAGGLERS])
        limit = None if progress.stall_limit is None else progress.stall_limit[:STATUS_CHARACTERS]
        self._of[job_id] = Heard(gang, attempt, now, beat_at, progress.step, status, progress.marks, slow, limit)
        if len(self._of) > self._most:
            self._of = {known_id: heard for known_id, heard in self._of.items() if known_id in jobs}
            self._most = max(JOBS_BEFORE_SWEEP, 2 * len(self._of))
