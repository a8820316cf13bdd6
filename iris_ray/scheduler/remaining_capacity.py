"""What a plan has left of the candidates of one shape. All requirements of that shape read it."""

from collections import defaultdict

from iris_ray.model.workers import TPU, Resources, Worker, rounded
from iris_ray.scheduler.candidates import Candidates, Standing
from iris_ray.scheduler.evaluation import Evaluation, Rank, Status
from iris_ray.scheduler.plan import Plan
from iris_ray.scheduler.ranked_groups import Room, room_of
from iris_ray.state.groups import Group


class RemainingCapacity:
    """The candidates, and where the groups stand that the plan has changed. The next plan finds them as they were.

    Attributes:
        candidates: the groups.
        plan: what was given away.
        kept: bucket → names of groups of which some host is kept for a job.
    """

    def __init__(self, candidates: Candidates, plan: Plan) -> None:
        self.candidates = candidates
        self.plan = plan
        self.kept: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._seen = 0  # how many of the plan's touched workers are accounted for

    def catch_up(self) -> None:
        """Account for what the plan has given away since the last call."""
        touched = self.plan.touched
        if self._seen < len(touched):
            name_of = self.candidates.grouping.name_of
            names = dict.fromkeys(name_of(worker) for worker in touched[self._seen :])
            self._seen = len(touched)
            for name in names:
                if name is not None:
                    self._account_for(name)

    def group(self, name: str) -> Group:
        """Return a candidate's group by its name."""
        group = self.candidates.grouping.get(name)
        assert group is not None, f"{name} is a candidate, but not a group"
        return group

    def rank(self, name: str) -> Rank | None:
        """Return where a group stands among the free ones now; None if it has too few idle hosts."""
        moves = self.candidates.moved.get(name)
        return self.candidates.evaluations[name].rank if moves is None else moves[1].rank

    def idle(self, name: str) -> list[tuple[Worker, Room]]:
        """Return the hosts of a free group that a task may go to, as far as their chips go, and what is left there."""
        kept, taken, chips = self.plan.kept, self.plan.taken, self.candidates.shape.chips
        idle: list[tuple[Worker, Room]] = []
        for worker in self.usable(name):
            if worker.node_id not in kept:
                amounts = taken.get(worker.node_id)
                if amounts is None:
                    idle.append((worker, worker.free))
                elif not (chips and amounts.get(TPU)):
                    idle.append((worker, _less(worker.free, amounts)))
        return idle

    def usable(self, name: str) -> tuple[Worker, ...]:
        """Return the hosts of a group whose chips were idle before the plan. Only of groups that were free."""
        usable = self.candidates.evaluations[name].usable
        return self.group(name).workers if usable is None else usable

    def _account_for(self, name: str) -> None:
        found = self.candidates.evaluations.get(name)
        if found is None or found.status is Status.UNSUITABLE:
            return
        if self.plan.kept and not self.plan.kept.keys().isdisjoint(self.group(name).node_ids):
            self.kept[found.bucket][name] = None
        else:
            self.kept[found.bucket].pop(name, None)
        if found.rank is not None:
            self.candidates.move(name, self._standing(name, found))

    def _standing(self, name: str, found: Evaluation) -> Standing:
        rooms, tasks, rank = [room for _, room in self.idle(name)], self.candidates.tasks(found), found.rank
        if len(rooms) < tasks or rank is None:
            missing = tasks - len(rooms)
            return Standing(distance=(missing, float(missing), name))
        if self.candidates.shape.group_by:
            rank = *rank[:3], len(rooms) - tasks, name
        room, is_mixed = room_of(rooms, tasks)
        return Standing(rank, room, is_mixed)


def _less(free: Resources, taken: Resources) -> Room:
    left = dict(free)
    for resource, amount in taken.items():
        left[resource] = rounded(left.get(resource, 0.0) - amount)
    return left
