"""What the service of notifications answers."""

from dataclasses import dataclass
from typing import Protocol

from iris_ray.actors.protocol.services import calls_of

MOST_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification and its outcome.

    Attributes:
        id: the id that a receiver gets.
        event: the event that it reports, such as ``failed``.
        job_id, name, user: the job.
        at: the time of the event, in seconds since the epoch.
        text: the sentence that was sent, without output.
        to: the destination, such as ``slack:TEAM_HOOK``.
        outcome: ``waits``, ``sent``, ``given up``, ``merged`` (a later one of the job and event stands for it) or
            ``dropped`` (too many waited).
        changed_at: since when, in seconds since the epoch.
        tries: the number of times that sending was tried.
        error: why the last try failed; empty if it did not.
    """

    id: str
    event: str
    job_id: str
    name: str
    user: str
    at: float
    text: str
    to: str
    outcome: str
    changed_at: float
    tries: int
    error: str


@dataclass(frozen=True, slots=True)
class Tested:
    """The result of a test of a destination.

    Attributes:
        to: the destination, without its options.
        problem: why the test could not be sent; empty if the receiver has taken it.
    """

    to: str
    problem: str


@calls_of("notify")
class NotifyCalls(Protocol):
    """Calls of people."""

    async def list_notifications(self, job_id: str | None, most: int) -> list[Notification]:
        """Return the latest notifications, the latest first.

        Args:
            job_id: only those of this job; None: of all jobs.
            most: the limit, at most `MOST_LISTED`.

        Raises:
            ServiceUnavailableError: the file can't be read.
        """

    async def test_notification(self, destination: str, user: str) -> Tested:
        """Send a test to a destination, once.

        Raises:
            InvalidRequestError: the destination is invalid, or the cluster's settings don't allow it.
            SecretNotFoundError, NotPermittedError: the user may not use its secret.
        """
