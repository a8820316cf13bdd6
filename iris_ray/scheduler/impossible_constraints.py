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
        self._found: dict[Requirement, str | None] = {}

    def problem_of(self, requirement: Requirement) -> str | None:
        """Return what is wrong with a constraint that no worker with the attribute can be compared with, or None."""
        if requirement not in self._found:
            self._found[requirement] = next(filter(None, map(self._problem, requirement.constraints)), None)
        return self._found[requirement]

    def _problem(self, constraint: Constraint) -> str | None:
        error: TypeError | None = None
        for worker in self._workers if constraint.orders else ():
            try:
                if constraint.key in worker.attributes:
                    constraint.matches(worker.attributes)
                    return None
            except TypeError as not_comparable:
                error = not_comparable
        return f"{constraint} can't be evaluated on any host: {error}" if error else None
