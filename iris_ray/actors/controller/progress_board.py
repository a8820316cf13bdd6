"""What running jobs have last said about themselves. It is in memory only: pools say it again every half minute."""

from collections.abc import Container
from dataclasses import dataclass

from iris_ray.actors.protocol.messages import GangProgress
from iris_ray.actors.protocol.task_files import STATUS_CHARACTERS
from iris_ray.model.goodput import Marks

STALE_S = 120.0
"""After so long the words of another gang of the same job are shown."""
MOST_STRAGGLERS = 5
JOBS_BEFORE_SWEEP = 1000


@dataclass(frozen=True, slots=True)
class Heard:
    """What the tasks of an attempt have said, and when.

    Attributes:
        gang, attempt: of which attempt of which gang.
        at: when this was heard, on the Controller's clock.
        beat_at: when a task last made progress, on the same clock; None if none ever said so.
        step, status, marks, stragglers: see `GangProgress`.
    """

    gang: int
    attempt: int
    at: float
    beat_at: float | None
    step: int | None
    status: str | None
    marks: Marks
    stragglers: tuple[str, ...]


class ProgressBoard:
    """The latest of each job: what its first gang that runs has said."""

    def __init__(self) -> None:
        self._of: dict[str, Heard] = {}
        self._most = JOBS_BEFORE_SWEEP

    def of(self, job_id: str) -> Heard | None:
        """Return what a job has last said, if it has said anything."""
        return self._of.get(job_id)

    def note(self, progress: GangProgress, now: float, jobs: Container[str]) -> None:
        """Remember what a gang of a job says now.

        Args:
            progress: what it says.
            now: on the Controller's clock.
            jobs: ids of all jobs that are known; others are forgotten now and then.
        """
        job_id, attempt, gang = progress.attempt
        known = self._of.get(job_id)
        if known is not None and now < known.at + STALE_S and (gang, -attempt) > (known.gang, -known.attempt):
            return
        beat_at = None if progress.age is None else now - max(0.0, progress.age)
        status = None if progress.status is None else progress.status[:STATUS_CHARACTERS]
        slow = tuple(words[:STATUS_CHARACTERS] for words in progress.stragglers[:MOST_STRAGGLERS])
        self._of[job_id] = Heard(gang, attempt, now, beat_at, progress.step, status, progress.marks, slow)
        if len(self._of) > self._most:
            self._of = {known_id: heard for known_id, heard in self._of.items() if known_id in jobs}
            self._most = max(JOBS_BEFORE_SWEEP, 2 * len(self._of))
