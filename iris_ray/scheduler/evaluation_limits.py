"""How many groups one plan evaluates and looks at, so that jobs with odd requirements hold up nobody else.

A shape of requirements that no earlier job had costs one evaluation of every group. A plan ends once it has made
`EVALUATIONS_PER_GANG` for each gang that it may place, and the next one goes on. Of all shapes that wait, a plan looks
at those that come first in the queue and fit into the cache together. One user's waiting jobs get a part of it: else
one user with many odd requirements would keep the jobs of all others from being looked at.
"""

from collections import Counter

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.candidate_cache import EVALUATIONS_KEPT
from iris_ray.state.fleet import Fleet

EVALUATIONS_PER_GANG = 100
"""To evaluate so many groups is about the work of placing a gang."""
USERS_PART = 4
"""One user's jobs get the n-th part of the evaluations that are kept."""


class EvaluationLimits:
    """Which jobs a plan looks at.

    Args:
        fleet: is planned for.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shapes: set[Requirement] = set()
        self._read = 0
        self._by_user: Counter[str] = Counter()

    def admit(self, job: Job) -> bool:
        """Return whether the plan looks at a job, and count what it costs if no job before asked for the like."""
        shape, user = job.requirement.shape, job.spec.user
        if shape in self._shapes:
            return True
        groups = len(self._fleet.grouping(shape.group_by))
        of_user = self._by_user[user]
        if self._read and self._read + groups > EVALUATIONS_KEPT:
            return False
        if of_user and of_user + groups > EVALUATIONS_KEPT // USERS_PART:
            return False
        self._shapes.add(shape)
        self._read += groups
        self._by_user[user] += groups
        return True
