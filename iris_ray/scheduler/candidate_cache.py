"""What the scheduler remembers between plans: how groups evaluate for each shape of requirements.

A plan changes none of it, and `CandidateCache.check` compares it with fresh evaluations. So it decides what a plan
costs, and not what a plan says. `EvaluationLimits` says which jobs a plan looks at, so that jobs with odd requirements
hold up nobody else.
"""

from collections import Counter, OrderedDict

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.candidates import Candidates, Preferences, Ranking, cost_of_ranks
from iris_ray.state.fleet import Fleet

EVALUATIONS_KEPT = 2_000_000
"""How many evaluations of groups are kept, of the shapes that were read last. It bounds the Controller's memory."""
EVALUATIONS_PER_GANG = 100
"""To evaluate so many groups is about the work of placing a gang. A plan that may place so many gangs ends once it has
made so many evaluations for shapes that no earlier job had, and the next plan goes on."""
USERS_PART = 4
"""One user's waiting jobs get the n-th part of the evaluations that are kept. Else one user with many odd requirements
would keep the jobs of all others from being looked at."""
EVALUATIONS_IN_TURN = 20_000
"""If not all evaluations can be kept, a plan makes about so many for shapes that take turns, and at least one shape's.
So the turns cost about a plan of 200 gangs."""

_Kind = tuple[Requirement, Preferences]
"""A shape and preferences: the jobs that see the same groups in the same order."""


class CandidateCache:
    """The candidates of each shape of requirements and their orders, for one fleet at a time.

    Attributes:
        evaluated: how many evaluations of groups were made for new shapes so far, or as much other work done.
    """

    def __init__(self) -> None:
        self.evaluated = 0
        self._fleet: Fleet | None = None
        self._candidates: dict[Requirement, Candidates] = {}
        self._rankings: OrderedDict[_Kind, Ranking] = OrderedDict()  # the last is the one that was read last

    def ranking(self, fleet: Fleet, shape: Requirement, preferences: Preferences, now: float) -> Ranking:
        """Return the free groups of a shape in the order of some preferences, up to date with the fleet."""
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
        """Drop the candidates whose groups are not kept up to date.

        Then drop those orders that were not read for longest, beyond `EVALUATIONS_KEPT`, and the candidates that no
        order has.
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
        """Raise AssertionError if any candidates or orders differ from freshly made ones. For tests."""
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
        """Drop an order, and the candidates if it was the last of their orders. Return what this saves."""
        saved = self._rankings.pop(kind).cost
        if all(shape != kind[0] for shape, _ in self._rankings):
            saved += len(self._candidates.pop(kind[0]).known)
        return saved

    def _count(self, evaluated: int) -> None:
        self.evaluated += evaluated


class EvaluationLimits:
    """Which jobs a plan looks at: those of the first kinds in the queue whose evaluations fit into the cache.

    If there are more kinds, each plan looks at a few of the others, in turn. The turn goes from user to user. So a job
    is looked at within some plans, how many users ever wait, and whatever they ask for.
    """

    def __init__(self) -> None:
        self._refused: dict[str, dict[_Kind, None]] = {}  # by user; the first is the next to have a turn
        self._due: set[_Kind] = set()  # whose turn it is

    def begin_plan(self, fleet: Fleet) -> None:
        """Start to count the evaluations of a plan."""
        self._fleet = fleet
        self._read: set[_Kind] = set()
        self._shapes: set[Requirement] = set()  # of the kinds that are read
        self._refused_now: set[_Kind] = set()
        self._by_user: Counter[str] = Counter()
        self._evaluations = sum(map(self._cost, self._due))

    def admit(self, job: Job) -> bool:
        """Return whether the plan looks at a job, and count the evaluations of its kind if the kind is new."""
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
        """Choose whose turn it is next, once a plan has gone through the whole queue."""
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
        """Return about how many evaluations a kind needs."""
        shape, preferences = kind
        groups = len(self._fleet.grouping(shape.group_by))
        return (0 if shape in self._shapes else groups) + (cost_of_ranks(groups) if preferences else 0)
