"""Which numbers slices and tasks have from one attempt to the next: who stays keeps its own."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import GangMovedEvent, SliceHeldEvent
from iris_ray.state.gangs import keep_positions
from iris_ray.state.quarantine import AVOIDED_S
from tests.support.worlds import S, World, cpu_host, host


@pytest.fixture
def slices() -> str:
    return "bcd"


def lose_slice(world: World, name: str) -> None:
    for worker in list(world.state.fleet.slice_workers(name)):
        world.lose(worker.node_id)


def again(world: World, job: Job, runs: bool = True) -> tuple[str, ...]:
    """The job's next attempt starts; the names of its slices by slice id."""
    world.confirm(job)
    world.now += 100.0
    world.schedule()
    if runs:
        world.report_all(job, S.RUNNING)
    world.state.check()
    return job.gang.groups


def start(world: World, *counts: int, **more: Any) -> Job:
    return world.start(slices=counts, max_retries_preemption=50, max_retries_failure=50, **more)


@pytest.mark.parametrize(
    ("before", "now", "then"),
    [
        ("abc", "bcd", "dbc"),  # a is lost, d comes: nobody else moves
        ("bcd", "acd", "acd"),
        ("abc", "abcde", "abcde"),  # growth adds numbers
        ("bcd", "abcde", "bcdae"),
        ("abcd", "bd", "db"),  # b keeps 1, so d closes the gap
        ("abcd", "ac", "ac"),
        ("abcd", "cd", "cd"),  # both must move
        ("abcd", "abd", "abd"),
        ("", "ab", "ab"),
        ("ab", "cd", "cd"),
    ],
)
def test_few_names_leave_their_places(before: str, now: str, then: str) -> None:
    assert "".join(keep_positions(before, now)) == then


@pytest.mark.parametrize("new", ["a", "e"])
def test_new_slice_takes_the_lost_number(world: World, new: str) -> None:
    job = start(world, 3)
    world.add_slice(new)
    lose_slice(world, "b")
    assert again(world, job) == (new, "c", "d")
    assert job.gang.previous_indices == {node: i for i, node in enumerate(["b-0", "b-1", "c-0", "c-1", "d-0", "d-1"])}


def test_gang_with_a_spare_returns_to_its_own_slices(world: World) -> None:
    job = start(world, 2, spares=1)
    world.add_slice("a")
    lose_slice(world, "d")
    world.schedule()
    world.report_all(world.state.jobs["job/spare-1"], S.RUNNING)
    world.report(job, S.FAILED)
    assert again(world, job) == ("b", "c")


@pytest.mark.parametrize("started", [True, False])
def test_gang_moved_before_its_start_has_no_earlier_tasks(world: World, started: bool) -> None:
    job = world.submit(slices=(2,))
    world.schedule()
    world.do(GangMovedEvent(job.current_attempt(job.gang), "Ray is draining it", started))
    again(world, job)
    assert bool(job.gang.previous_indices) is started


def test_failed_launches_do_not_change_what_a_task_was(world: World) -> None:
    """Nothing ran there: what lies on the hosts is of the attempt before."""
    job = start(world, 2, 3)
    world.add_slice("a")
    lose_slice(world, "c")
    lose_slice(world, "a")
    assert again(world, job, runs=False) == ("b", "d")
    world.dispatch_fails(job)
    world.now += AVOIDED_S
    world.add_slice("a")
    assert again(world, job) == ("b", "a", "d")
    assert job.gang.previous_indices["d-0"] == 4


def test_hosts_of_a_rack_keep_their_numbers_in_it(world: World) -> None:
    for name in ("h1", "h2", "h3"):
        world.do(cpu_host(name, rack="r"))
    rack = CoschedulingConfig("rack", 1)
    job = world.start_tasks(replicas=2, coscheduling=rack, resources={"CPU": 8.0})
    assert [task.node_id for task in job.tasks] == ["h1", "h2"]
    world.lose("h1")
    again(world, job)
    assert [task.node_id for task in job.tasks] == ["h3", "h2"]


def test_hosts_of_a_slice_keep_the_order_of_their_worker_ids(world: World) -> None:
    job = start(world, 1)
    world.report(job, S.FAILED)
    world.confirm(job)
    for node_id in ("b-0", "b-1"):
        world.lose(node_id)
    for name in ("c", "d"):
        lose_slice(world, name)
    world.do(host("b", 1, node_id="b-0"))
    world.do(host("b", 0, node_id="b-1"))
    again(world, job, runs=False)
    assert [task.node_id for task in job.tasks] == ["b-1", "b-0"]


def test_task_of_its_own_knows_its_former_host(world: World) -> None:
    job = world.start_tasks("tasks", 3)
    node_id = job.task(2).node_id
    world.report(job, S.WORKER_FAILED, 2)
    assert [gang.previous_indices for gang in job.gangs] == [{}, {}, {node_id: 2}]


# -- random sequences --------------------------------------------------------------------------------------------------


class Sequence:
    """What happens to one gang, and where each of its attempts ran."""

    def __init__(self, spares: int) -> None:
        self.world, self.named = World(), 0
        for name in "cdef":
            self.world.add_slice(name)
        self.ran: tuple[str, ...] = ()
        self.indices: dict[str, int] = {}
        start(self.world, 1, 2, 3, 5, spares=spares)
        self.note()

    @property
    def job(self) -> Job:
        return self.world.state.jobs["job"]

    def lose(self, which: int) -> None:
        if names := sorted({w.slice_name or "" for w in self.world.state.workers.values()}):
            lose_slice(self.world, names[which % len(names)])

    def add(self, which: int) -> None:
        self.named += 1
        self.world.add_slice(f"{'agz'[which % 3]}{self.named}")

    def crash(self, which: int) -> None:
        if self.job.gang.placed:
            self.world.report(self.job, S.FAILED, which % len(self.job.tasks))

    def move(self, which: int) -> None:
        if self.job.gang.placed:
            self.world.do(GangMovedEvent(self.job.current_attempt(self.job.gang), "moves"))

    def urgent(self, which: int) -> None:
        """A job of a higher band takes slices."""
        self.named += 1
        more: dict[str, Any] = {"owner": "pool-b", "priority": PriorityBand.PRODUCTION, "slices": (1 + which % 2,)}
        self.world.submit(f"urgent-{self.named}", **more)
        self.world.now += 1000.0
        self.world.schedule()
        if self.job.gang.eviction is not None:
            self.move(which)

    def urgent_ends(self, which: int) -> None:
        for job in self.rivals():
            if job.gang.placed:
                self.world.finish(job)

    def restart(self, which: int) -> None:
        """The Controller dies, and the next one reads its records."""
        old, self.world = self.world, World()
        self.world.now = old.now
        for worker in old.state.workers.values():
            self.world.do(host(worker.slice_name or "", worker.host_index or 0))
        for name, owner in old.state.holders.items():
            self.world.do(SliceHeldEvent(name, owner))
        self.world.restore(old)

    def rivals(self) -> list[Job]:
        return [job for job_id, job in self.world.state.jobs.items() if job_id.startswith("urgent")]

    def go_on(self, launch_fails: bool) -> None:
        """What has ended is gone, and what can start does."""
        world = self.world
        world.now += 100.0
        for job_id, held in list(world.state._allocations.all_of().items()):
            for attempt in list(held):
                job = world.state.jobs[job_id]
                if attempt.number < job.gang.attempt or not job.gang.placed:
                    world.confirm(job, attempt.number)
        world.schedule()
        world.state.check()
        if self.job.gang.placed and self.job.gang.tasks[0].state is TaskState.ASSIGNED:
            if launch_fails:
                world.dispatch_fails(self.job)
                world.confirm(self.job)
            else:
                assert self.job.gang.previous_indices == self.indices
                self.require_few_moves()
                self.note()
        for job in (*self.rivals(), *world.state.spares()):
            if job.gang.placed:
                world.report_all(job, S.RUNNING)
        world.state.check()

    def require_few_moves(self) -> None:
        """A slice that stays keeps its number, and its hosts their tasks, unless there are fewer numbers now."""
        gang = self.job.gang
        moved = {name for name in gang.groups if name in self.ran and gang.groups.index(name) != self.ran.index(name)}
        assert moved == {name for name in gang.groups if name in self.ran[len(gang.groups) :]}
        for task in gang.tasks:
            slice_name = str(task.node_id).rpartition("-")[0]
            assert slice_name in moved or self.indices.get(str(task.node_id), task.index) == task.index

    def note(self) -> None:
        """The gang's attempt runs."""
        self.world.report_all(self.job, S.RUNNING)
        self.ran = self.job.gang.groups
        self.indices = {str(task.node_id): task.index for task in self.job.tasks}


STEPS: list[Callable[[Sequence, int], None]] = [
    Sequence.lose,
    Sequence.lose,
    Sequence.add,
    Sequence.add,
    Sequence.crash,
    Sequence.move,
    Sequence.urgent,
    Sequence.urgent_ends,
    Sequence.restart,
]


@given(
    st.integers(0, 1),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.booleans()), max_size=15),
)
def test_who_stays_keeps_its_number_whatever_happens(
    spares: int, steps: list[tuple[Callable[[Sequence, int], None], int, bool]]
) -> None:
    story = Sequence(spares)
    for step, which, launch_fails in steps:
        step(story, which)
        story.go_on(launch_fails)
