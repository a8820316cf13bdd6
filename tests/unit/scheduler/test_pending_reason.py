"""Why a job waits, as data and as a sentence."""

import pytest

from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import TPU_TOPOLOGY
from iris_ray.scheduler import explanation
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Shortage
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import (
    JobCancelledEvent,
    TaskDispatchFailedEvent,
    WorkerDrainedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.support.worlds import World, add_slices, assigned_tasks, cpu_host, host, tagged

OP = ConstraintOp
LATE = BACKFILL_BOUND_S + 1
LARGE_POOL = Constraint("pool", OP.EQ, "large")


def waiting(world: World, job_id: str = "job") -> PendingReason:
    return world.plan().pending_reasons[job_id]


def shortage(world: World, job_id: str = "job") -> Shortage:
    found = waiting(world, job_id).shortage
    assert found is not None
    return found


def closest(world: World, job_id: str = "job") -> list[tuple[str, int]]:
    """The closest groups, and how many hosts each of them misses."""
    return [(obstacle.group, obstacle.hosts_missing) for obstacle in shortage(world, job_id).closest]


# -- the kinds of answers -------------------------------------------------------------------------------------------


def test_reason_for_missing_type_says_cluster_lacks_it(world: World) -> None:
    world.add_slice("a")
    world.submit(tpu_type="v4-32")
    found = waiting(world)
    assert (found.kind, found.free, found.suitable) == (PendingKind.NO_SUCH_WORKERS, 0, 0)
    assert found.summary == "It needs 1 slice. No slice in the cluster suits it."


def test_reason_when_too_few_slices_exist_counts_them(world: World) -> None:
    add_slices(world, "a", "b")
    world.start("other")
    world.submit(slices=(3,))
    found = waiting(world)
    assert (found.kind, found.free, found.suitable, found.num_groups) == (PendingKind.TOO_FEW, 1, 2, (3,))
    assert found.summary == "It needs 3 slices at once. Only 2 slices suit it, and 1 is free now."


def test_reason_when_all_slices_are_in_use_counts_them(world: World) -> None:
    add_slices(world, "a", "b")
    world.start("other", slices=(2,))
    world.submit()
    found = waiting(world)
    assert (found.kind, found.free, found.suitable) == (PendingKind.IN_USE, 0, 2)
    assert found.summary == "It needs 1 slice. 2 slices suit it, and none is free now."
    assert shortage(world).closest == (
        Obstacle("a", 2, "in use by other", ("other",)),
        Obstacle("b", 2, "in use by other", ("other",)),
    )


def test_reason_during_a_pause_has_its_seconds_and_its_cause(world: World) -> None:
    world.add_slice("a")
    job = world.submit()
    for pause in (0.5, 1.0, 2.0, 4.0):
        world.schedule()
        world.dispatch_fails(job)
        world.confirm(job)
        found = waiting(world)
        assert (found.kind, found.pause) == (PendingKind.PAUSED, (pause, "no answer"))
        world.now += pause
    assert "no answer" in str(found)
    assert "4 s" in str(found)


def test_reason_of_partly_running_job_is_of_waiting_tasks(world: World) -> None:
    world.add_slice("a")
    job = world.start_tasks("other", replicas=1)
    world.submit_tasks(replicas=3)
    found = waiting(world)
    assert (found.kind, found.num_groups) == (PendingKind.IN_USE, (1,))
    world.schedule()
    users = {user for obstacle in shortage(world).closest for user in obstacle.used_by}
    assert users == {"other", "job"}
    world.finish(job)
    world.do(TaskDispatchFailedEvent(AttemptId("job", 1), "no answer", world.now))
    assert [a.task_indices for a in assigned_tasks(world.plan())] == [(1,)]


# -- in words -------------------------------------------------------------------------------------------------------


def test_reason_without_type_names_types_of_cluster(world: World) -> None:
    add_slices(world, "a", "b")
    add_slices(world, "c", tpu_type="v4-32")
    world.submit(tpu_type="v4-64", slices=(2, 4))
    reason = world.why("job")
    for part in ("2 or 4 slices", "tpu-topology == v4-64", "0 free", "2 × v4-16", "1 × v4-32"):
        assert part in reason


def test_reason_without_any_tpu_says_so(world: World) -> None:
    world.submit()
    assert "no TPU hosts at all" in world.why("job")


def test_reason_of_gang_by_missing_attribute_says_so(world: World) -> None:
    world.do(cpu_host("x", rack="a"))
    by_zone = CoschedulingConfig("zone")
    world.submit_tasks("job", 1, coscheduling=by_zone, resources={"CPU": 1.0})
    assert world.why("job") == "waiting for 1 group by zone (any); 0 free; no host has the attribute zone"


def test_reason_of_a_task_without_chips_does_not_speak_of_tpus(world: World) -> None:
    world.submit_tasks("job", 1, resources={"CPU": 1.0})
    assert world.why("job") == "waiting for 1 host (any); 0 free; none like that in the cluster"


def test_reason_for_too_many_gpus_names_closest_host(world: World) -> None:
    world.do(cpu_host("x", gpus=2.0))
    world.submit_tasks("job", 1, resources={"GPU": 4.0})
    assert "waiting for 1 host with 4 GPU a task (any); 0 free; host 10.0.0.9: host x has 2 GPU, a task needs 4" in (
        world.why("job")
    )


@pytest.mark.parametrize(
    ("resource", "have", "need", "words"),
    [
        ("memory", 13_421_772_800.0, 13_422e6, "has 13.4217728 GB memory, a task needs 13.422 GB"),
        ("memory", 0.0, 2e12, "has 0 GB memory, a task needs 2,000 GB"),
        ("licences", 1_234_567.0, 1_234_568.5, "has 1,234,567 licences, a task needs 1,234,568.5"),
    ],
)
def test_reason_shows_large_amounts_that_differ_a_little(
    world: World, resource: str, have: float, need: float, words: str
) -> None:
    world.do(WorkerRegisteredEvent("x", "10.0.0.9", {}, {"CPU": 8.0, resource: have}))
    world.submit_tasks(replicas=1, resources={resource: need})
    assert words in world.why()


# -- which constraint excludes how many workers ---------------------------------------------------------------------


def test_reason_counts_the_workers_that_each_constraint_excludes(world: World) -> None:
    """Each counts only workers that the ones before it don't exclude."""
    world.add_slice("a", "v4-32")
    world.add_slice("b", "v4-16", pool="small")
    world.add_slice("c", "v4-16")
    world.submit(constraints=(Constraint(TPU_TOPOLOGY, OP.EQ, "v4-16"), LARGE_POOL))
    assert dict(shortage(world).excluded) == {"tpu-topology == v4-16": 4, "pool == large": 4}
    for part in ("tpu-topology == v4-16", "pool == large", "4 hosts"):
        assert part in world.why()


def test_reason_counts_the_workers_that_a_taint_excludes(world: World) -> None:
    world.add_slice("a", "v4-16", **{"taint:maintenance": True})
    world.submit()
    assert dict(shortage(world).excluded) == {"taint:maintenance": 2}
    assert "taint:maintenance" in world.why()
    world.add_slice("b", "v4-16", **{"taint:maintenance": False})
    assert dict(shortage(world).excluded) == {"taint:maintenance": 4}


def test_reason_counts_no_worker_that_could_never_run_the_job(world: World) -> None:
    """A head often has no CPUs, and never chips."""
    for number in (0, 1):
        world.do(host(f"a{number}", 0, "v4-8"))
    world.do(cpu_host("head", cpus=0.0))
    elsewhere = (Constraint("zone", OP.EQ, "us-z"),)
    world.submit_tasks(resources={"TPU": 4.0}, constraints=elsewhere)
    assert dict(shortage(world).excluded) == {"zone == us-z": 2}
    world.submit_tasks("cpus", resources={"CPU": 1.0}, constraints=elsewhere)
    assert dict(shortage(world, "cpus").excluded) == {"zone == us-z": 2}
    world.do(cpu_host("other"))
    assert dict(shortage(world, "cpus").excluded) == {"zone == us-z": 3}
    assert dict(shortage(world).excluded) == {"zone == us-z": 2}


# -- which group is closest, and how many hosts it misses -----------------------------------------------------------


def test_reason_names_the_slice_with_the_fewest_hosts_in_use_first(world: World) -> None:
    for name, used in {"a": 3, "b": 1, "c": 2}.items():
        world.add_slice(name, "v4-32")
        only = (Constraint("tpu-name", OP.EQ, name),)
        world.start_tasks(f"in-{name}", replicas=used, constraints=only)
    world.submit(tpu_type="v4-32")
    assert closest(world) == [("b", 1), ("c", 2), ("a", 3)]
    assert shortage(world).closest[0].used_by == ("in-b",)
    words = world.why()
    assert words.index("in-b") < words.index("in-c") < words.index("in-a")


def test_reason_names_the_slice_with_the_fewest_hosts_missing_first(world: World) -> None:
    add_slices(world, "a", "b", tpu_type="v4-64")
    for number in (1, 4, 6):
        world.lose(f"a-{number}")
    world.lose("b-5")
    world.submit(tpu_type="v4-64")
    assert closest(world) == [("b", 1), ("a", 3)]
    assert "b: host 5 of 8 is missing" in world.why()
    assert "a: host 1, 4, 6 of 8 is missing" in world.why()


@pytest.mark.parametrize("order", [1, -1])
def test_reason_of_a_slice_with_several_problems_counts_each_host_once(world: World, order: int) -> None:
    world.add_slice("a", "v4-32", pool="large")
    world.do(tagged(host("a", 0, "v4-32"), {"pool": "small", "taint:hot": True}))
    world.do(WorkerDrainedEvent("a-0", "maintenance"))
    constraints = (Constraint(TPU_TOPOLOGY, OP.EQ, "v4-32"), LARGE_POOL)[::order]
    world.submit(tpu_type="v4-32", constraints=constraints)
    assert closest(world) == [("a", 1)]


@pytest.mark.parametrize("problem", ["draining", "suspected", "foreign", "too small"])
def test_reason_counts_the_hosts_that_take_no_new_tasks(world: World, problem: str) -> None:
    world.add_slice("a", "v4-32")
    for number in (1, 3):
        match problem:
            case "draining":
                world.do(WorkerDrainedEvent(f"a-{number}", "maintenance"))
            case "suspected":
                world.do(WorkerSuspectedEvent(f"a-{number}", "no answer", world.now))
            case "foreign":
                world.do(host("a", number, "v4-32", foreign="a stranger"))
            case _:
                world.do(host("a", number, "v4-32", resources={"TPU": 2.0}))
    world.submit(tpu_type="v4-32")
    assert waiting(world).kind is PendingKind.TOO_FEW
    assert closest(world) == [("a", 2)]


def test_reason_names_a_few_groups_and_tells_that_there_are_more(world: World) -> None:
    for number in range(20):
        world.add_slice(f"s{number:02}")
        world.start(f"other-{number:02}")
    world.submit()
    found = shortage(world)
    assert 1 <= len(found.closest) < 10
    assert found.more == 20 - len(found.closest)
    assert "…" in world.why()
    assert len(world.why()) < 1000


# -- what it is queued behind ---------------------------------------------------------------------------------------


def test_plan_renews_a_bounded_number_of_shortages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """New ones come first, then the oldest. The others say what an earlier plan found."""
    monkeypatch.setattr(explanation, "SHORTAGES_RENEWED", 2)
    world.do(cpu_host("x", cpus=8.0))
    for number in range(4):
        world.submit_tasks(f"job-{number}", replicas=1, resources={"CPU": 10.0 + number})

    def explained() -> list[int]:
        reasons = world.plan().pending_reasons
        return [number for number in range(4) if "a task needs 1" in str(reasons[f"job-{number}"])]

    assert len(explained()) == 2
    assert explained() == [0, 1, 2, 3]
    world.do(cpu_host("y", cpus=9.0))
    for _ in range(2):
        assert explained() == [0, 1, 2, 3]
    reasons = world.plan().pending_reasons
    assert all("has 9 CPU" in str(reasons[f"job-{number}"]) for number in range(4))


def test_reason_counts_the_jobs_ahead_with_the_same_requirement(world: World) -> None:
    world.add_slice("a")
    world.start("running")
    for name in ("first", "second", "third"):
        world.submit(name)
    found = [(waiting(world, name).ahead, waiting(world, name).first_ahead) for name in ("first", "second", "third")]
    assert found == [(0, None), (1, "first"), (2, "first")]
    assert "behind 1 job " in world.why("second")
    assert "behind 2 jobs" in world.why("third")
    assert "first" in world.why("third")


# -- kept groups ----------------------------------------------------------------------------------------------------


def test_reason_tells_kept_room_and_its_job(world: World) -> None:
    add_slices(world, "a", "b")
    world.start("running")
    world.submit("large", slices=(2,))
    world.now += LATE
    world.submit("small")
    assert waiting(world, "large").kept == ("b", "a")
    assert "gets b, a" in world.why("large")
    obstacle = shortage(world, "small").closest[0]
    assert (obstacle.group, obstacle.used_by) == ("b", ("large",))
    assert "large" in world.why("small")


# -- every waiting job has one --------------------------------------------------------------------------------------


def test_reason_is_given_for_every_pending_job_and_for_no_other(world: World) -> None:
    world.add_slice("a")
    world.add_slice("b", "v4-32")
    world.start("running")
    paused = world.submit("paused", tpu_type="v4-32")
    world.schedule()
    world.dispatch_fails(paused)
    world.confirm(paused)
    world.submit("same")
    world.submit("impossible", tpu_type="v4-512")
    world.submit("picky", constraints=(LARGE_POOL,))
    world.submit("odd", constraints=(Constraint(TPU_TOPOLOGY, OP.GT, 4),))
    world.submit("late", slices=(9,), scheduling_timeout=0.05)
    world.submit_tasks("cpus", resources={"CPU": 99.0})
    world.submit("starts", tpu_type="v4-32")
    world.do(JobCancelledEvent(world.submit("cancelled").spec.job_id, "enough"))
    world.now += 0.1
    plan = world.plan()
    assert [a.job_id for a in plan.assignments] == ["starts"]
    assert [event.job_id for event in plan.timed_out] == ["late"]
    assert [event.job_id for event in plan.unschedulable] == ["odd"]
    assert plan.pending_reasons.keys() == {"paused", "same", "impossible", "picky", "cpus"}
    for job_id, reason in plan.pending_reasons.items():
        assert reason.job_id == job_id
        assert len(str(reason)) > 20


def test_job_given_up_after_timeout_says_its_reason(world: World) -> None:
    world.add_slice("a")
    late = world.submit("late", slices=(2,), scheduling_timeout=60.0)
    planner = Planner(world.state, look_again_s=0.5)
    planner.plan(world.now, Instructions())
    world.now += 61.0
    planner.plan(world.now, Instructions())
    assert late.error is not None
    assert "within its scheduling_timeout of 60 s; the last reason was: waiting for 2 slices" in str(late.error)
