"""What a plan has given away so far."""

from dataclasses import dataclass, field

from iris_ray.model.workers import Resources, Worker


@dataclass(slots=True)
class Plan:
    """The hosts that a plan has given to gangs or keeps for them. What is given is never taken back.

    Attributes:
        taken: node_id → the resources that are taken of it.
        kept: node_id → the job that the host is kept for; no other job gets it.
        takers: node_id → the job that takes resources of the host.
        touched: the workers of all of these, in the order in which it happened.
        tasks: how many tasks were given resources.
    """

    taken: dict[str, Resources] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    takers: dict[str, str] = field(default_factory=dict)
    touched: list[Worker] = field(default_factory=list)
    tasks: int = 0

    def take(self, worker: Worker, demand: Resources, job_id: str) -> None:
        """Give resources of a worker to a job."""
        before = self.taken.get(worker.node_id)
        if before is not None:
            demand = {r: before.get(r, 0.0) + demand.get(r, 0.0) for r in {**before, **demand}}
        self.taken[worker.node_id] = demand
        self.takers[worker.node_id] = job_id
        self.touched.append(worker)
        self.tasks += 1

    def keep(self, worker: Worker, job_id: str) -> None:
        """Keep a worker for a job."""
        self.kept[worker.node_id] = job_id
        self.touched.append(worker)

    def lift(self, worker: Worker) -> None:
        """Keep a worker no more, for now."""
        del self.kept[worker.node_id]
        self.touched.append(worker)
