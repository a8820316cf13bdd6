"""Constraints that can't be evaluated on any host, such as an ordering of a str and a number."""

from collections.abc import Collection

from iris_ray.model.constraints import Constraint
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import Worker


class ImpossibleConstraints:
    """Finds them, once for each requirement.

    Args:
        workers: all live workers.
    """

    def __init__(self, workers: Collection[Worker]) -> None:
        self._workers = workers
        self._found: dict[Requirement, str] = {}  # "": nothing is wrong

    def problem_of(self, requirement: Requirement) -> str | None:
        """Return what is wrong with a constraint, or None: no worker that could serve the job can be compared."""
        found = self._found.get(requirement)
        if found is None:
            problems = (self._problem(constraint, requirement) for constraint in requirement.constraints)
            found = self._found[requirement] = next(filter(None, problems), "")
        return found or None

    def _problem(self, constraint: Constraint, requirement: Requirement) -> str | None:
        """Return why no host that satisfies the requirement's other constraints can evaluate this one."""
        others = [other for other in requirement.constraints if other is not constraint]
        error: TypeError | None = None
        for worker in self._workers if constraint.orders else ():
            try:
                if constraint.key in worker.attributes and _satisfies(worker, others):
                    constraint.matches(worker.attributes)
                    return None
            except TypeError as not_comparable:
                error = not_comparable
        return f"{constraint} can't be evaluated on any host: {error}" if error else None


def _satisfies(worker: Worker, constraints: Collection[Constraint]) -> bool:
    """Return whether a worker satisfies all constraints that it can evaluate."""
    for constraint in constraints:
        try:
            if not constraint.matches(worker.attributes):
                return False
        except TypeError:
            continue
    return True
