"""The evaluations of groups for each shape of requirements, which the scheduler keeps between plans.

Plans don't change them, and `CandidateCache.check` compares them with fresh evaluations. The cache therefore affects
only the cost of a plan. `EvaluationLimits` selects the jobs that a plan considers, so that jobs with unusual
requirements don't delay others.
"""

from collections import Counter, OrderedDict

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.candidates import Candidates, Preferences, Ranking, cost_of_ranks
from iris_ray.scheduler.pending_reason import Shortage
from iris_ray.state.fleet import Fleet

EVALUATIONS_KEPT = 2_000_000
"""The largest number of evaluations that are kept, of the latest shapes read. It bounds the Controller's memory."""
EVALUATIONS_PER_GANG = 100
"""The number of evaluations that cost about as much as placing a gang. A plan limited to a number of gangs ends once
its evaluations of new shapes have used up that limit, and the next plan continues."""
USERS_PART = 4
"""A user's waiting jobs get at most this fraction (one n-th) of the evaluations that are kept, so that a user with many
unusual requirements can't keep the jobs of others from being considered."""
EVALUATIONS_IN_TURN = 20_000
"""The approximate number of evaluations in a plan, at least one shape's, for shapes that take turns because not all
evaluations can be kept. It costs about as much as a plan of 200 gangs."""

_Kind = tuple[Requirement, Preferences]
"""A shape and preferences, which determine the groups and their order."""


class CandidateCache:
    """The candidates of each shape of requirements and their rankings, for one fleet at a time.

    Attributes:
        evaluated: the work done so far for new shapes, in evaluations of groups.
        shortages: why jobs with a requirement did not run in earlier plans, the oldest first; see `Explainer`.
    """

    def __init__(self) -> None:
        self.evaluated = 0
        self.shortages: dict[Requirement, Shortage] = {}
        self._fleet: Fleet | None = None
        self._candidates: dict[Requirement, Candidates] = {}
        self._rankings: OrderedDict[_Kind, Ranking] = OrderedDict()  # the most recently read last

    def ranking(self, fleet: Fleet, shape: Requirement, preferences: Preferences, now: float) -> Ranking:
        """Return the up-to-date ranking of a shape's free groups by some preferences."""
        kind, candidates = (shape, preferences), self._up_to_date(fleet, shape, now)
        ranking = self._rankings.get(kind)
        if ranking is not None:
            ranking.catch_up()
        else:
            ranking = self._rankings[kind] = Ranking(candidates, preferences)
            ranking.catch_up()
            self._count(ranking.cost)
        self._rankings.move_to_end(kind)
        return ranking

    def trim(self) -> None:
        """Drop candidates whose grouping is no longer maintained.

        Then drop the least recently read rankings beyond `EVALUATIONS_KEPT`, and candidates without any ranking.
        """
        fleet = self._fleet
        for kind, ranking in list(self._rankings.items()):
            if fleet is None or not fleet.keeps(kind[0].group_by, ranking.candidates.grouping):
                self._drop(kind)
        known = sum(len(candidates.known) for candidates in self._candidates.values())
        kept = known + sum(ranking.cost for ranking in self._rankings.values())
        while kept > EVALUATIONS_KEPT and len(self._rankings) > 1:
            kept -= self._drop(next(iter(self._rankings)))

    def check(self, now: float) -> None:
        """Raise AssertionError if candidates or rankings differ from fresh ones. For tests."""
        for shape, preferences in list(self._rankings):
            assert self._fleet is not None
            have, candidates = self.ranking(self._fleet, shape, preferences, now), Candidates(shape, self._fleet)
            candidates.update((), now)
            want = Ranking(candidates, preferences)
            assert have.contents() == want.contents(), f"groups for {shape} and {preferences} are out of order"
            assert have.candidates.contents() == candidates.contents(), f"candidates for {shape} are out of date"

    def _up_to_date(self, fleet: Fleet, shape: Requirement, now: float) -> Candidates:
        if fleet is not self._fleet:
            self._fleet = fleet
            self._candidates.clear()
            self._rankings.clear()
        found = self._candidates.get(shape)
        if found is not None and not fleet.keeps(shape.group_by, found.grouping):
            found = None
        changed = None if found is None else fleet.changes_since(found.fleet_version)
        if found is None or changed is None:
            for kind in [kind for kind in self._rankings if kind[0] == shape]:
                del self._rankings[kind]
            found, changed = Candidates(shape, fleet, self._count), ()
            self._candidates[shape] = found
        found.update(changed, now)
        found.fleet_version = fleet.version
        return found

    def _drop(self, kind: _Kind) -> int:
        """Drop a ranking, and its candidates if it was their last ranking. Return the number of evaluations saved."""
        saved = self._rankings.pop(kind).cost
        if all(shape != kind[0] for shape, _ in self._rankings):
            saved += len(self._candidates.pop(kind[0]).known)
        return saved

    def _count(self, evaluated: int) -> None:
        self.evaluated += evaluated


class EvaluationLimits:
    """Selects the jobs that a plan considers: the first kinds in the queue whose evaluations fit into the cache.

    If there are more kinds, each plan also considers a few of the others, taking turns between users. Every job is
    therefore considered within some plans, regardless of the number of waiting users and their requirements.
    """

    def __init__(self) -> None:
        self._refused: dict[str, dict[_Kind, None]] = {}  # by user; the first is next in turn
        self._due: set[_Kind] = set()  # kinds whose turn it is

    def begin_plan(self, fleet: Fleet) -> None:
        """Reset the counts for a new plan."""
        self._fleet = fleet
        self._read: set[_Kind] = set()
        self._shapes: set[Requirement] = set()  # of the kinds in `_read`
        self._refused_now: set[_Kind] = set()
        self._by_user: Counter[str] = Counter()
        self._evaluations = sum(map(self._cost, self._due))

    def admit(self, job: Job) -> bool:
        """Return whether the plan considers a job, and count the evaluations of a new kind."""
        shape, user = job.requirement.shape, job.spec.user
        kind = shape, job.requirement.preferences
        if kind in self._read:
            return True
        if kind not in self._due:
            cost, of_user = self._cost(kind), self._by_user[user]
            fits = not self._evaluations or self._evaluations + cost <= EVALUATIONS_KEPT
            if not fits or (of_user and of_user + cost > EVALUATIONS_KEPT // USERS_PART):
                self._refused.setdefault(user, {})[kind] = None
                self._refused_now.add(kind)
                return False
            self._evaluations += cost
            self._by_user[user] += cost
        self._read.add(kind)
        self._shapes.add(shape)
        return True

    def end_plan(self, complete: bool) -> None:
        """Choose the kinds whose turn is next, after a plan that went through the whole queue."""
        if not complete:
            return
        still = {user: {k: None for k in kinds if k in self._refused_now} for user, kinds in self._refused.items()}
        self._refused = {user: kinds for user, kinds in still.items() if kinds}
        self._due, left = set(), EVALUATIONS_IN_TURN
        while self._refused and left > 0:
            user, kinds = next(iter(self._refused.items()))
            kind = next(iter(kinds))
            self._due.add(kind)
            left -= self._cost(kind)
            del self._refused[user], kinds[kind]
            if kinds:
                self._refused[user] = kinds

    def _cost(self, kind: _Kind) -> int:
        """Return the approximate number of evaluations that a kind needs."""
        shape, preferences = kind
        groups = len(self._fleet.grouping(shape.group_by))
        return (0 if shape in self._shapes else groups) + (cost_of_ranks(groups) if preferences else 0)
