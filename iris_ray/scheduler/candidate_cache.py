"""Keeps candidates from one plan to the next. They catch up with the fleet's changes when they are next read."""

from collections import OrderedDict

from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.candidates import Candidates
from iris_ray.state.fleet import Fleet

UNUSED_KEPT = 32
"""How many candidates are kept beyond those that the latest plan has read."""


class CandidateCache:
    """The candidates of each requirement, for one fleet at a time."""

    def __init__(self) -> None:
        self._fleet: Fleet | None = None
        self._candidates: OrderedDict[Requirement, Candidates] = OrderedDict()

    def candidates(self, fleet: Fleet, requirement: Requirement, now: float) -> Candidates:
        """Return the candidates of a requirement, up to date with the fleet."""
        if fleet is not self._fleet:
            self._fleet = fleet
            self._candidates.clear()
        found = self._candidates.get(requirement)
        changed = None if found is None else fleet.changes_since(found.fleet_version)
        if found is None or changed is None:
            found = self._candidates[requirement] = _evaluated(fleet, requirement, now)
        else:
            self._candidates.move_to_end(requirement)
            found.update(changed, now)
        found.fleet_version = fleet.version
        return found

    def trim(self, in_use: int) -> None:
        """Keep the candidates that were read last: as many as are in use, and `UNUSED_KEPT` more."""
        while len(self._candidates) > in_use + UNUSED_KEPT:
            self._candidates.popitem(last=False)

    def check(self, now: float) -> None:
        """Raise AssertionError if any candidates differ from freshly evaluated ones. For tests."""
        for requirement in list(self._candidates):
            assert self._fleet is not None
            have = self.candidates(self._fleet, requirement, now)
            want = _evaluated(self._fleet, requirement, now)
            assert have.contents() == want.contents(), f"candidates for {requirement} are out of date"


def _evaluated(fleet: Fleet, requirement: Requirement, now: float) -> Candidates:
    found = Candidates(requirement, fleet.grouping(requirement.group_by), fleet.holders)
    found.evaluate_all(now)
    return found
