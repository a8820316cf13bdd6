"""The latest events of each job and gang, to explain an event that is refused."""

from collections import OrderedDict, defaultdict
from collections.abc import Set
from itertools import count
from operator import itemgetter

from iris_ray.state.events import Event

STORY_LENGTH = 12
"""Events of a job, and of each gang, that are remembered."""
GANGS_KEPT = 10_000
"""So many gangs of jobs with many gangs have a story of their own: those with the latest events."""

_Story = list[tuple[int, float, Event]]
"""The latest events, oldest first, each with its number and time."""

_SHOWN = ("task_index", "new_state", "node_id", "group_names", "owner")
"""Fields that are shown beside the attempt. Others may hold words of users: errors, reasons, the job itself."""


class Stories:
    """Remembers the latest events of each job and, if a job has many gangs, those of each gang."""

    def __init__(self) -> None:
        self._of_jobs: dict[str, _Story] = {}  # by job id
        self._of_gangs: OrderedDict[tuple[str, int], _Story] = OrderedDict()  # the latest ones, by job id and gang
        self._gangs: defaultdict[str, set[int]] = defaultdict(set)  # the keys of `_of_gangs`, by job id
        self._count = count()

    @property
    def job_ids(self) -> Set[str]:
        """Return the ids of the jobs that have a story."""
        return self._of_jobs.keys() | self._gangs.keys()

    def remember(self, job_id: str, gang: int | None, event: Event, now: float) -> None:
        """Add an event to the story of a job or of one of its gangs.

        Args:
            job_id: the job that the event is about.
            gang: the position of the gang that it is about; None if it is about the whole job.
            event: what happened.
            now: seconds on the clock of the events.
        """
        story = self._of_jobs.setdefault(job_id, []) if gang is None else self._of_gang(job_id, gang)
        story.append((next(self._count), now, event))
        del story[:-STORY_LENGTH]

    def forget(self, job_id: str) -> None:
        """Drop the stories of a job that is forgotten."""
        self._of_jobs.pop(job_id, None)
        for gang in self._gangs.pop(job_id, ()):
            del self._of_gangs[job_id, gang]

    def told(self, job_id: str, gang: int | None) -> tuple[str, ...]:
        """Return the latest events of a job and of one of its gangs, one line for each event, oldest first."""
        of_gang = () if gang is None else self._of_gangs.get((job_id, gang), ())
        story = sorted((*self._of_jobs.get(job_id, ()), *of_gang), key=itemgetter(0))
        return tuple(f"{now:.3f} {_in_words(event)}" for _, now, event in story[-STORY_LENGTH:])

    def _of_gang(self, job_id: str, gang: int) -> _Story:
        """Return a gang's story, and note that it is the latest one."""
        key = job_id, gang
        story = self._of_gangs.setdefault(key, [])
        self._of_gangs.move_to_end(key)
        self._gangs[job_id].add(gang)
        if len(self._of_gangs) > GANGS_KEPT:
            self._forget_oldest()
        return story

    def _forget_oldest(self) -> None:
        (job_id, gang), _ = self._of_gangs.popitem(last=False)
        self._gangs[job_id].remove(gang)
        if not self._gangs[job_id]:
            del self._gangs[job_id]


def _in_words(event: Event) -> str:
    """Return the event's class, and those of its fields that hold no words of users."""
    words = [type(event).__name__]
    if (attempt := getattr(event, "attempt", None)) is not None:
        words.append(str(attempt))
    shown = ((name, getattr(event, name)) for name in _SHOWN if hasattr(event, name))
    return ", ".join([*words, *(f"{name}={getattr(value, 'name', value)}" for name, value in shown)])
