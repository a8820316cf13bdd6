"""The latest events of each job, to explain an event that is refused."""

from collections import deque
from collections.abc import Set

from iris_ray.state.events import Event

STORY_LENGTH = 12
"""Events of a job that are remembered."""

_SHOWN = ("task_index", "new_state", "node_id", "group_names", "owner")
"""Fields that are shown beside the attempt. Others may hold words of users: errors, reasons, the job itself."""


class Stories:
    """Remembers the latest events of each job."""

    def __init__(self) -> None:
        self._of: dict[str, deque[tuple[float, Event]]] = {}  # job id → its latest events, each with its time

    @property
    def job_ids(self) -> Set[str]:
        """Return the ids of the jobs that have a story."""
        return self._of.keys()

    def remember(self, job_id: str, event: Event, now: float) -> None:
        """Add an event to a job's story.

        Args:
            job_id: the job that the event is about.
            event: what happened.
            now: seconds on the clock of the events.
        """
        story = self._of.get(job_id)
        if story is None:
            story = self._of[job_id] = deque(maxlen=STORY_LENGTH)
        story.append((now, event))

    def forget(self, job_id: str) -> None:
        """Drop the story of a job that is forgotten."""
        self._of.pop(job_id, None)

    def told(self, job_id: str) -> tuple[str, ...]:
        """Return a job's story, one line for each event, oldest first."""
        return tuple(f"{now:.3f} {_in_words(event)}" for now, event in self._of.get(job_id, ()))


def _in_words(event: Event) -> str:
    """Return the event's class, and those of its fields that hold no words of users."""
    words = [type(event).__name__]
    if (attempt := getattr(event, "attempt", None)) is not None:
        words.append(str(attempt))
    shown = ((name, getattr(event, name)) for name in _SHOWN if hasattr(event, name))
    return ", ".join([*words, *(f"{name}={getattr(value, 'name', value)}" for name, value in shown)])
