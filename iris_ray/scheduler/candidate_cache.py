"""Keeps candidates from one plan to the next. They catch up with the fleet's changes when they are next read."""

from collections import OrderedDict

from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.candidates import Candidates
from iris_ray.state.fleet import Fleet

EVALUATIONS_KEPT = 2_000_000
"""How many evaluations of groups are kept, of the shapes that were read last. It bounds the Controller's memory."""


class CandidateCache:
    """The candidates of each shape of requirements, for one fleet at a time.

    Attributes:
        evaluated: how many evaluations of groups were made for new shapes so far.
    """

    def __init__(self) -> None:
        self.evaluated = 0
        self._fleet: Fleet | None = None
        self._candidates: OrderedDict[Requirement, Candidates] = OrderedDict()

    def candidates(self, fleet: Fleet, shape: Requirement, now: float) -> Candidates:
        """Return the candidates of a shape, up to date with the fleet and without what earlier plans have moved."""
        if fleet is not self._fleet:
            self._fleet = fleet
            self._candidates.clear()
        found = self._candidates.get(shape)
        if found is not None and not fleet.keeps(shape.group_by, found.grouping):
            found = None
        changed = None if found is None else fleet.changes_since(found.fleet_version)
        if found is None or changed is None:
            found = self._candidates[shape] = _evaluated(fleet, shape, now)
            self.evaluated += len(found.evaluations)
        else:
            self._candidates.move_to_end(shape)
            found.update(changed, now)
        found.fleet_version = fleet.version
        return found

    def trim(self) -> None:
        """Drop the candidates whose groups are not kept up to date.

        Then drop those that were not read for longest, beyond `EVALUATIONS_KEPT`.
        """
        fleet = self._fleet
        for shape, found in list(self._candidates.items()):
            if fleet is None or not fleet.keeps(shape.group_by, found.grouping):
                del self._candidates[shape]
        kept = sum(len(candidates.evaluations) for candidates in self._candidates.values())
        while kept > EVALUATIONS_KEPT and len(self._candidates) > 1:
            _, dropped = self._candidates.popitem(last=False)
            kept -= len(dropped.evaluations)

    def check(self, now: float) -> None:
        """Raise AssertionError if any candidates differ from freshly evaluated ones. For tests."""
        for shape in list(self._candidates):
            assert self._fleet is not None
            have = self.candidates(self._fleet, shape, now)
            want = _evaluated(self._fleet, shape, now)
            assert have.contents() == want.contents(), f"candidates for {shape} are out of date"


def _evaluated(fleet: Fleet, shape: Requirement, now: float) -> Candidates:
    found = Candidates(shape, fleet.grouping(shape.group_by), fleet.holders)
    found.evaluate_all(now)
    return found
