"""Which victims are chosen: of lower bands, old enough, as few as will do, and none unless the job then runs."""

import math
from random import Random
from typing import Any

import pytest

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler import Scheduler, SchedulingResult
from iris_ray.scheduler.eviction_costs import LEAST_RUN_S, EvictionRules
from iris_ray.scheduler.evictions import GROUPS_COMPARED, SEARCHES_AMONG_GANGS
from iris_ray.scheduler.pending_reason import PendingKind
from iris_ray.scheduler.planner import running
from iris_ray.state.attempt_ends import Owner
from iris_ray.state.events import (
    AttemptSavesEvent,
    Event,
    GangMovedEvent,
    JobCancelledEvent,
    LimitsSetEvent,
    TaintedEvent,
    TimePassedEvent,
)
from tests.support.costs import calls
from tests.support.worlds import World, add_slices, asked_to_leave, cpu_host, host

S = TaskState
SYSTEM, PRODUCTION, INTERACTIVE, BATCH = PriorityBand


@pytest.fixture
def world() -> World:
    return World()


def evicted(world: World) -> set[str]:
    """The ids of the jobs that a plan would evict."""
    return {attempt.job_id for event in asked_to_leave(world.plan()) for attempt in event.leave}


def run(
    world: World, job_id: str, band: PriorityBand = BATCH, slices: int = 1, ran_s: float = 1000.0, **changes: Any
) -> Job:
    """A gang that has run for some time."""
    now, world.now = world.now, world.now - ran_s
    job = world.start(job_id, priority=band, slices=(slices,), max_retries_preemption=9, **changes)
    world.now = now
    return job


def tasks(world: World, job_id: str, cpus: float, replicas: int = 1, band: PriorityBand = BATCH) -> Job:
    """Tasks on shared hosts that have run for long."""
    job = world.start_tasks(job_id, replicas, priority=band, resources={"CPU": cpus})
    world.now += 1000.0
    return job


# -- whole slices ------------------------------------------------------------------------------------------------------


def test_job_that_evicts_nothing_does_not_hold_up_those_like_it(world: World) -> None:
    """Hosts for slots evict nothing. A job of the same user may ask for the same."""
    world.add_slice("a")
    world.now = 10_000.0
    run(world, "running")
    world.submit("slots", may_evict=False)
    assert evicted(world) == set()
    world.submit("job")
    assert evicted(world) == {"running"}


def test_eviction_takes_gang_of_two_slices_before_two_gangs(world: World) -> None:
    add_slices(world, *"abcd")
    world.now = 10_000.0
    run(world, "pair", slices=2, ran_s=9000.0)
    for job_id in ("one", "two"):
        run(world, job_id)
    world.submit("prod", slices=(2,), priority=PRODUCTION)
    assert evicted(world) == {"pair"}


def test_slices_that_a_victim_frees_besides_spare_another_gang(world: World) -> None:
    """Two jobs need a slice each. The victim of the first has two."""
    add_slices(world, *"abc")
    world.now = 10_000.0
    run(world, "one", PRODUCTION)
    run(world, "pair", slices=2)
    for job_id in ("first", "second"):
        world.submit(job_id, priority=PRODUCTION)
    assert [event.node_ids for event in asked_to_leave(world.plan())] == [("b-0", "b-1"), ("c-0", "c-1")]
    assert evicted(world) == {"pair"}
    world.schedule()
    assert not asked_to_leave(world.plan())


def test_system_evicts_production_after_batch_and_is_evicted_by_nobody(world: World) -> None:
    add_slices(world, *"abc")
    world.now = 10_000.0
    for job_id, band in (("system", SYSTEM), ("prod", PRODUCTION), ("batch", BATCH)):
        run(world, job_id, band)
    one = world.submit("one", priority=SYSTEM)
    assert evicted(world) == {"batch"}
    world.do(JobCancelledEvent(one.spec.job_id, "the other way round"))
    world.submit("two", slices=(2,), priority=SYSTEM)
    assert evicted(world) == {"batch", "prod"}
    world.submit("three", slices=(3,), priority=SYSTEM)
    assert evicted(world) == {"batch", "prod"}


@pytest.mark.parametrize("what", ["constraint", "taint", "pause", "too few"])
def test_job_that_could_not_run_afterwards_evicts_no_gang(world: World, what: str) -> None:
    add_slices(world, *"ab")
    world.now = 10_000.0
    run(world, "batch", slices=2)
    match what:
        case "constraint":
            world.submit("prod", tpu_type="v4-32", priority=PRODUCTION)
        case "taint":
            world.submit("prod", slices=(2,), priority=PRODUCTION)
            world.do(TaintedEvent("a", "bad", "an operator says so"))
        case "pause":
            job = world.submit("prod", priority=PRODUCTION)
            job.gang.not_before = world.now + 60.0
        case "too few":
            world.submit("prod", slices=(3,), priority=PRODUCTION)
    plan = world.plan()
    assert not asked_to_leave(plan)
    assert "taken from" not in str(plan.pending_reasons["prod"])


def test_no_spare_takes_hosts(world: World) -> None:
    add_slices(world, *"ab")
    world.now = 10_000.0
    run(world, "batch")
    world.start("prod", priority=PRODUCTION, spares=1)
    assert "prod/spare-1" in world.plan().pending_reasons
    assert not asked_to_leave(world.plan())


# -- what they lose ----------------------------------------------------------------------------------------------------


def tells(world: World, job: Job, saved_s: float | None = None, every_s: float = math.inf, heeds: bool = False) -> None:
    """A task of each gang tells that it has saved so many seconds ago, or that it asks for notices."""
    saved_at = 0.0 if saved_s is None else world.now - saved_s
    for gang in job.gangs:
        world.do(AttemptSavesEvent(job.current_attempt(gang), saved_at, every_s, heeds))


TOLD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "saved long ago": {"saved_s": 4000.0},
    "saved": {"saved_s": 130.0},
    "is about to save": {"saved_s": 280.0, "every_s": 300.0},
    "is to save later": {"saved_s": 280.0, "every_s": 600.0},
    "should have saved": {"saved_s": 280.0, "every_s": 200.0},
    "heeds notices": {"heeds": True},
}


@pytest.mark.parametrize(
    ("old", "leaves"),
    [
        ("nothing", "young"),
        ("saved long ago", "young"),
        ("saved", "old"),
        ("is about to save", "old"),
        ("is to save later", "young"),
        ("should have saved", "young"),
        ("heeds notices", "old"),
    ],
)
def test_eviction_takes_the_gang_that_loses_least(world: World, old: str, leaves: str) -> None:
    add_slices(world, *"ab")
    world.now = 10_000.0
    job = run(world, "old", ran_s=5000.0)
    run(world, "young", ran_s=200.0)
    tells(world, job, **TOLD[old])
    world.submit(priority=PRODUCTION)
    assert evicted(world) == {leaves}


@pytest.mark.parametrize(("fast_s", "leaves"), [(60.0, "fast"), (150.0, "unknown")])
def test_eviction_takes_the_gang_that_is_back_at_its_work_soonest(world: World, fast_s: float, leaves: str) -> None:
    add_slices(world, *"abc")
    world.now = 10_000.0
    jobs = {job_id: run(world, job_id) for job_id in ("slow", "unknown", "fast")}
    for job in jobs.values():
        tells(world, job, heeds=True)
    jobs["slow"].times.back_s, jobs["fast"].times.back_s = 300.0, fast_s
    world.submit(priority=PRODUCTION)
    assert evicted(world) == {leaves}


def test_eviction_counts_chips_and_not_hosts(world: World) -> None:
    for number, chips in enumerate((1.0, 8.0)):
        world.do(host(f"slice-{number}", 0, "v4-8", resources={"TPU": chips, "CPU": 8.0}))
    world.now = 10_000.0
    for job_id, chips, ran_s in (("few", 1.0, 3000.0), ("many", 8.0, 600.0)):
        run(world, job_id, tpu_type="v4-8", resources={"TPU": chips}, ran_s=ran_s)
    world.submit(tpu_type="v4-8", priority=PRODUCTION, resources={"TPU": 1.0})
    assert evicted(world) == {"few"}


@pytest.mark.parametrize("told", [{"heeds": True}, {"saved_s": 1.0}], ids=str)
def test_search_finds_what_loses_least_among_many_newer_gangs(world: World, told: dict[str, Any]) -> None:
    for number in range(2 * GROUPS_COMPARED):
        world.do(cpu_host(f"host-{number:03}", 1.0))
    old = tasks(world, "old", 1.0)
    tasks(world, "new", 1.0, replicas=2 * GROUPS_COMPARED - 1)
    tells(world, old, **told)
    world.submit_tasks("prod", 1, priority=PRODUCTION, resources={"CPU": 1.0})
    assert evicted(world) == {"old"}


@pytest.mark.parametrize("seed", range(60))
def test_in_any_world_a_slice_is_taken_where_least_is_lost(seed: int) -> None:
    """Compared with all gangs, one by one."""
    chance, world = Random(f"lost {seed}"), World()
    add_slices(world, *"abcdef")
    world.now = 10_000.0
    costs: dict[str, tuple[int, float]] = {}
    ages = sorted((chance.choice([30.0, 300.0, 900.0, 5000.0]) for _ in range(6)), reverse=True)
    bands = [chance.choice([INTERACTIVE, BATCH]) for _ in ages]
    jobs = [run(world, f"job-{i}", bands[i], ran_s=ran_s) for i, ran_s in enumerate(ages)]
    for job, band, ran_s in zip(jobs, bands, ages, strict=True):
        saved_s, every_s = chance.choice([None, 50.0, 250.0, 8000.0]), chance.choice([math.inf, 60.0, 270.0])
        heeds, job.times.back_s = chance.random() < 0.2, chance.choice([None, 40.0, 700.0])
        tells(world, job, saved_s, every_s, heeds)
        has_saved = saved_s is not None and saved_s < ran_s
        lost_s = saved_s if has_saved and saved_s is not None else ran_s
        if heeds or (has_saved and lost_s <= every_s <= lost_s + 30.0 + 25.0):
            lost_s = 0.0
        if ran_s >= LEAST_RUN_S[band]:
            lost_s += 120.0 if job.times.back_s is None else job.times.back_s
            costs[job.spec.job_id] = int(band is INTERACTIVE), lost_s
    world.submit("taker", priority=PRODUCTION)
    leave = evicted(world)
    assert {costs[job_id] for job_id in leave} == ({min(costs.values())} if costs else set())


# -- budgets -----------------------------------------------------------------------------------------------------------


def evict(world: World, job: Job) -> None:
    """A gang gives its hosts to another job and comes back there."""
    taker = world.submit(f"taker-{job.gang.attempt}", priority=PRODUCTION)
    world.schedule()
    assert job.gang.eviction is not None, world.why(taker.spec.job_id)
    attempt = job.gang.attempt
    world.do(GangMovedEvent(job.current_attempt(job.gang), "it has saved"))
    world.confirm(job, attempt)
    world.schedule()
    assert taker.gang.placed
    world.finish(taker)
    world.schedule()
    world.report_all(job, S.RUNNING)
    world.now += 150.0


def test_gang_evicted_too_often_stays_and_waiting_job_says_so(world: World) -> None:
    world.scheduler.evictions = EvictionRules(per_job=3)
    world.add_slice("a")
    world.now = 10_000.0
    job = run(world, "batch")
    for _ in range(3):
        evict(world, job)
    world.submit("prod", priority=PRODUCTION)
    assert not asked_to_leave(world.plan())
    assert "may take the hosts of batch in 53 min, since batch had enough evictions in the past hour" in world.why(
        "prod"
    )
    world.now = job.gang.evicted_at[0] + 3600.0
    assert evicted(world) == {"batch"}


@pytest.mark.parametrize(("needed", "takes"), [(1, {"carl"}), (2, {"ann"}), (3, {"ann", "carl"})])
def test_users_budget_bounds_how_many_of_their_gangs_leave(world: World, needed: int, takes: set[str]) -> None:
    """Carl may be evicted once more; ann twice."""
    world.scheduler.evictions = EvictionRules(per_user=2)
    add_slices(world, *"abcd")
    world.now = 10_000.0
    for number, user in enumerate(("ann", "ann", "carl", "carl")):
        run(world, f"{user}-{number}", ran_s=1000.0 - 100.0 * number, user=user)
    world.state.evicted_at[Owner("carl")] = [world.now - 600.0]  # type: ignore[index]
    world.submit("prod", slices=(needed,), priority=PRODUCTION)
    leave = evicted(world)
    if needed == 3:  # it does not look for a mixture
        assert "may take the hosts of" in world.why("prod")
        assert not leave
    else:
        assert {job_id.split("-")[0] for job_id in leave} == takes


def test_first_eviction_of_user_may_exceed_budget(world: World) -> None:
    world.scheduler.evictions = EvictionRules(per_user=2)
    add_slices(world, *"abc")
    world.now = 10_000.0
    for name in ("one", "two", "three"):
        run(world, name)
    world.submit("prod", slices=(3,), priority=PRODUCTION)
    assert evicted(world) == {"one", "two", "three"}
    world.schedule()
    world.add_slice("d")
    run(world, "four", user=world.state.jobs["one"].spec.user)
    world.now += 600.0
    world.submit("more", priority=PRODUCTION)
    assert "since jobs of" in world.why("more")


# -- limits of the taker's user ----------------------------------------------------------------------------------------


def limit(world: World, **limits: float) -> None:
    """The limits of ann, whose jobs take."""
    world.do(LimitsSetEvent("ann", PRODUCTION, Limits(**limits)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("chips", "victims"), [(4, 1), (8, 2), (12, 3)])
def test_tasks_evict_only_for_what_users_limit_allows(world: World, chips: int, victims: int) -> None:
    add_slices(world, *"ab")
    world.now = 10_000.0
    world.start_tasks("batch", 4, priority=BATCH)
    world.now += 1000.0
    limit(world, chips=chips)
    world.submit_tasks("prod", 4, priority=PRODUCTION, user="ann")
    assert [len(event.leave) for event in asked_to_leave(world.plan())] == [victims]
    for _ in range(2):  # what it is about to take counts in later plans
        world.schedule()
    assert len(world.state.evicted) == victims


@pytest.mark.parametrize("limits", [{"chips": 8}, {"running_jobs": 1}], ids=str)
def test_jobs_exceeding_limit_together_evict_for_first_alone(world: World, limits: dict[str, float]) -> None:
    add_slices(world, *"ab")
    world.now = 10_000.0
    for job_id in ("one", "two"):
        run(world, job_id)
    limit(world, **limits)
    for job_id in ("first", "second"):
        world.submit(job_id, priority=PRODUCTION, user="ann")
    assert [event.job_id for event in asked_to_leave(world.plan())] == ["first"]
    for _ in range(2):
        world.schedule()
    assert len(world.state.evicted) == 1


@pytest.mark.parametrize("limits", [{"chips": 8}, {"running_jobs": 1}], ids=str)
def test_hosts_about_to_be_taken_count_against_users_limit(world: World, limits: dict[str, float]) -> None:
    """Else another job of the user would use the limit up meanwhile, and the eviction would be in vain."""
    world.add_slice("a")
    world.now = 10_000.0
    victim = run(world, "batch")
    world.add_slice("b", "v5p-16")
    limit(world, **limits)
    world.submit("takes", priority=PRODUCTION, user="ann")
    world.submit("other", priority=PRODUCTION, user="ann", tpu_type="v5p-16")
    for _ in range(2):
        assert not world.schedule()
        assert victim.gang.eviction is not None
    assert world.plan().pending_reasons["other"].kind is PendingKind.LIMITED
    world.do(TimePassedEvent(world.now + 60.0))
    world.confirm(victim, 1)
    assert world.schedule().keys() == {"takes"}


def test_job_evicts_nobody_for_chips_beyond_users_limit(world: World) -> None:
    for number in range(2):
        world.do(host("a", number, resources={"TPU": 8.0, "CPU": 8.0}))
    world.now = 10_000.0
    run(world, "batch")
    limit(world, chips=8)  # as many as two hosts of four chips
    world.submit("prod", priority=PRODUCTION, user="ann")
    assert not asked_to_leave(world.plan())
    limit(world, chips=16)
    assert evicted(world) == {"batch"}


# -- what may be taken later -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran_s", "said"), [(60.0, "in 9 min"), (360.0, "in 4 min"), (590.0, "in 10 s"), (600.0, None)]
)
def test_job_says_when_gang_has_run_long_enough_to_evict(world: World, ran_s: float, said: str | None) -> None:
    world.add_slice("a")
    world.now = 10_000.0
    run(world, "young", INTERACTIVE, ran_s=ran_s)
    world.submit("prod", priority=PRODUCTION)
    assert bool(asked_to_leave(world.plan())) is (said is None)
    assert (f"may take the hosts of young {said}" in world.why("prod")) is (said is not None)


@pytest.mark.parametrize(("count", "may_take"), [(2, "old, younger in 60 s"), (3, "old, younger, youngest in 2 min")])
def test_job_that_may_evict_later_names_victims_and_wait(world: World, count: int, may_take: str) -> None:
    add_slices(world, *"abc")
    world.now = 10_000.0
    for job_id, ran_s in (("old", 5000.0), ("younger", 60.0), ("youngest", 30.0)):
        run(world, job_id, ran_s=ran_s)
    world.submit("waits", slices=(count,), priority=PRODUCTION)
    assert f"may take the hosts of {may_take}" in world.why("waits")


@pytest.mark.parametrize("running_band", [PRODUCTION, INTERACTIVE])
def test_job_that_will_never_find_victims_names_none(world: World, running_band: PriorityBand) -> None:
    add_slices(world, *"ab")
    world.now = 10_000.0
    run(world, "young", running_band, ran_s=60.0)
    run(world, "equal", PRODUCTION)
    world.submit("prod", slices=(2,), priority=PRODUCTION)
    assert "may take" not in world.why("prod")


# -- shared hosts ------------------------------------------------------------------------------------------------------


def test_eviction_takes_sufficient_small_task_before_longer_running_large_one(world: World) -> None:
    world.do(cpu_host("x"))
    tasks(world, "large", 7.0)
    tasks(world, "small", 1.0)
    world.submit_tasks("prod", 1, priority=PRODUCTION, resources={"CPU": 1.0})
    assert evicted(world) == {"small"}


def plan_for(world: World, job: Job) -> SchedulingResult:
    """A plan as if nobody else waited. The world's own scheduler knows of searches for the others that were in vain."""
    state = world.state
    return Scheduler().find_assignments([job], state.fleet, state.usage, world.now, running=running(state))


# -- any world ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_in_any_world_victims_are_necessary_and_sufficient(seed: int) -> None:
    chance, world = Random(seed), World()
    names = "abcdefgh"[: chance.randint(1, 8)]
    for name in names:
        world.add_slice(name)
    for number in range(8):
        world.now += chance.choice([0.0, 60.0, 400.0])
        job = world.submit(
            f"job-{number}", priority=chance.choice([*PriorityBand]), slices=(chance.randint(1, 3),), owner="pool-a"
        )
        for assignment in world.plan().assignments:
            world.do(assignment)
        if job.gang.placed and chance.random() < 0.9:
            world.report_all(job, S.RUNNING)
    world.now += chance.choice([0.0, 130.0, 700.0])
    taker = world.submit("taker", priority=chance.choice([PRODUCTION, INTERACTIVE]), slices=(chance.randint(1, 3),))
    plan = plan_for(world, taker)
    assert taker.spec.coscheduling is not None
    needed, band = taker.spec.coscheduling.num_groups[0], taker.spec.priority

    def free_without(ended: set[AttemptId]) -> int:
        """How many slices are free once these have ended."""
        hosts = {name: [w for w in world.state.workers.values() if w.slice_name == name] for name in names}
        return sum(all(a in ended for w in there for _, a in w.occupants) for there in hosts.values())

    may_go = {
        job.current_attempt(job.gang)
        for job in world.state.jobs.values()
        if job.gang.placed
        and job.spec.priority > band
        and world.now - job.gang.running_since >= LEAST_RUN_S[job.spec.priority]
    }
    if plan.assignments:
        assert free_without(set()) >= needed
        return
    if not asked_to_leave(plan):
        assert free_without(may_go) < needed, "somebody could have been evicted"
        return
    victims = {*asked_to_leave(plan)[0].leave}
    assert victims <= may_go
    assert free_without(set()) < needed <= free_without(victims)
    for victim in victims:
        assert free_without(victims - {victim}) < needed, f"{victim} is superfluous"
    events: list[Event] = [*plan.promises]
    for event in events:
        world.do(event)
    world.now += 30.0
    for stop in world.state.handle_event(TimePassedEvent(world.now)).stop:
        world.confirm(world.state.jobs[stop.attempt.job_id], stop.attempt.number)
    assert [event.job_id for event in plan_for(world, taker).assignments] == ["taker"]


def test_job_without_victims_lets_next_job_evict(world: World) -> None:
    """There are more of them than a plan has searches."""
    world.add_slice("a")
    world.now = 10_000.0
    victim = run(world, "batch", ran_s=1000.0)
    for number in range(3 * SEARCHES_AMONG_GANGS):
        world.submit(f"odd-{number}", user="odd", priority=PRODUCTION, slices=(2 + number,))
    world.submit("last", user="other", priority=PRODUCTION)
    for _ in range(4):
        world.schedule()
    assert victim.gang.eviction is not None
    assert victim.gang.eviction.job_id == "last"


def test_search_costs_no_more_in_a_larger_fleet() -> None:
    """It looks at the newest attempts, and at so many groups only."""
    costs = []
    for count in (300, 600):
        world = World()
        for number in range(count):
            world.do(cpu_host(f"host-{number:04}", 1.0))
        tasks(world, "batch", 1.0, replicas=count)
        for number in range(30):
            world.submit_tasks(f"prod-{number}", 1, priority=PRODUCTION, resources={"CPU": 1.0})
        world.plan()  # its evaluations are kept
        costs.append(calls(world.plan))
        assert len(asked_to_leave(world.plan())) == SEARCHES_AMONG_GANGS
    assert costs[1] < 1.2 * costs[0]
