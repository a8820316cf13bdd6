"""Which jobs run where, and why the others wait."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import CoschedulingConfig, PriorityBand
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.workers import TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler import SchedulingResult
from iris_ray.scheduler.deadlines import HOPES_FOR_MORE_S
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    TimePassedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from tests.support.worlds import World, add_slices, assigned_gangs, cpu_host, host, placed

# -- whole slices of the right size ---------------------------------------------------------------------------------


def test_gang_takes_the_slice_of_its_size_past_larger_and_smaller_ones(world: World) -> None:
    add_slices(world, "a-large", tpu_type="v4-32")
    add_slices(world, "b-small", tpu_type="v4-8")
    add_slices(world, "c-right")
    world.submit(constraints=())
    assert placed(world) == {"job": ("c-right",)}


def test_gang_takes_no_part_of_a_larger_slice_while_one_of_its_size_exists_even_if_that_is_in_use(world: World) -> None:
    add_slices(world, "large", tpu_type="v4-32")
    add_slices(world, "right")
    world.start("other")
    world.submit(constraints=())
    assert placed(world) == {}
    assert "right: in use by other" in world.why("job")


def test_gang_takes_the_tightest_larger_slice_if_there_is_none_of_its_size(world: World) -> None:
    add_slices(world, "a-larger", tpu_type="v4-64")
    add_slices(world, "b-large", tpu_type="v4-32")
    world.submit(constraints=())
    (assignment,) = assigned_gangs(world.plan())
    assert assignment.groups == (("b-large-0", "b-large-1"),)


def test_gang_does_not_take_what_is_left_of_a_larger_slice(world: World) -> None:
    """Two live hosts of four are not a slice of two."""
    for number in (0, 1):
        world.do(host("large", number, "v4-32"))
    world.submit(constraints=())
    assert placed(world) == {}


def test_gang_of_one_host_runs_on_a_slice_of_one(world: World) -> None:
    add_slices(world, "a", tpu_type="v4-8")
    world.submit(tpu_type="v4-8")
    assert placed(world) == {"job": ("a",)}


def test_slice_that_lost_a_host_is_not_used_and_a_whole_one_is(world: World) -> None:
    """A slice fails as a whole: an idle spare host elsewhere does not make it healthy (defect 1)."""
    add_slices(world, "a", "b")
    world.do(WorkerFailedEvent("a-1", "gone"))
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("b",)}
    assert "a: host 1 of 2 is missing" in world.why("second")


def test_slice_with_hosts_that_claim_the_same_number_is_not_used(world: World) -> None:
    add_slices(world, "a")
    world.do(host("a", 1, node_id="impostor"))
    world.submit()
    assert placed(world) == {}
    assert "same worker id" in world.why("job")


def test_slice_with_a_host_beyond_its_size_is_not_used(world: World) -> None:
    add_slices(world, "a")
    world.do(host("a", 7))
    world.submit()
    assert placed(world) == {}


def test_host_without_a_number_is_not_host_0_and_does_not_stop_the_others(world: World) -> None:
    add_slices(world, "a", "b")
    numberless = host("b", 1)
    attributes = {key: value for key, value in numberless.attributes.items() if key != TPU_WORKER_ID}
    world.do(replace(numberless, attributes=attributes))
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("a",)}


def test_hosts_are_ordered_by_number_not_by_name_or_arrival(world: World) -> None:
    """Results once came in the order in which actors started (defect 5)."""
    for number in (10, 2, 0, 15, *(n for n in range(16) if n not in (10, 2, 0, 15))):
        world.do(host("a", number, "v4-128", node_id=f"node-{97 * number % 16}"))
    world.submit(tpu_type="v4-128")
    (assignment,) = assigned_gangs(world.plan())
    assert [world.state.workers[w].host_index for w in assignment.groups[0]] == list(range(16))


def test_live_size_of_a_slice_wins_over_the_rule_for_its_type(world: World) -> None:
    """A v5litepod-8 is one VM by rule; two VMs of four chips each take two tasks."""
    for number in (0, 1):
        plain = host("a", number, "v5litepod-8")
        world.do(replace(plain, attributes={**plain.attributes, TPU_VM_COUNT: AttributeValue(2)}))
    world.submit(tpu_type="v5litepod-8", replicas=2)
    assert placed(world) == {"job": ("a",)}


def live_slice(world: World, name: str, tpu_type: str, *vm_counts: int, chips: float = 4.0) -> None:
    """One host for each number of VMs that a host says its slice has."""
    for number, vm_count in enumerate(vm_counts):
        plain = host(name, number, tpu_type, resources={"TPU": chips})
        world.do(replace(plain, attributes={**plain.attributes, TPU_VM_COUNT: AttributeValue(vm_count)}))


def test_gang_of_whole_slices_has_as_many_tasks_as_the_live_slice_has_hosts(world: World) -> None:
    live_slice(world, "a", "v5litepod-8", 2, 2)
    job = world.start(tpu_type="v5litepod-8", resources={"TPU": 8.0}, whole_groups=True)
    assert [task.node_id for task in job.tasks] == ["a-0", "a-1"]
    assert all(worker.free["TPU"] == 0.0 for worker in world.state.workers.values())


def test_gang_of_whole_slices_never_mixes_sizes(world: World) -> None:
    live_slice(world, "a", "v5litepod-8", 1, chips=8.0)
    live_slice(world, "b", "v5litepod-8", 2, 2)
    world.submit(tpu_type="v5litepod-8", resources={"TPU": 8.0}, whole_groups=True, slices=(2,))
    assert placed(world) == {}
    live_slice(world, "c", "v5litepod-8", 2, 2)
    assert placed(world) == {"job": ("b", "c")}
    world.schedule()


def test_slice_whose_hosts_disagree_about_its_size_is_not_used(world: World) -> None:
    live_slice(world, "a", "v5litepod-8", 2, 1)
    world.submit(tpu_type="v5litepod-8", resources={"TPU": 8.0}, whole_groups=True)
    assert placed(world) == {}


# -- several slices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "free", "got"),
    [
        ((1, 3), 2, 1),
        ((1, 3), 3, 3),
        ((1, 2, 3), 2, 2),
        ((2, 4), 3, 2),
        ((2, 4), 1, 0),
        ((2,), 3, 2),
        ((3,), 2, 0),
    ],
)
def test_flexible_counts_start_at_the_largest_that_can_run_now(
    world: World, counts: tuple[int, ...], free: int, got: int
) -> None:
    """``[1, 3]`` with two slices free once waited a week for the third (defect 3)."""
    add_slices(world, *"abc"[:free])
    world.submit(slices=counts)
    assert len(placed(world).get("job", ())) == got


def test_flexible_counts_wait_for_a_slice_that_an_ended_attempt_is_about_to_leave(world: World) -> None:
    add_slices(world, "a", "b")
    over = world.start("over")
    world.report_all(over, TaskState.SUCCEEDED)
    world.submit(slices=(1, 2))
    assert placed(world) == {}
    assert "a: about to be freed by over" in world.why("job")
    world.confirm(over)
    assert placed(world) == {"job": ("a", "b")}


def test_flexible_counts_wait_for_a_slice_for_seconds_only(world: World) -> None:
    """Its process may take its time to end. Meanwhile others may have what is free."""
    add_slices(world, "a", "b")
    over = world.start("over")
    world.report_all(over, TaskState.SUCCEEDED)
    world.submit(slices=(1, 2))
    world.now += HOPES_FOR_MORE_S
    assert placed(world) == {}
    world.now += 0.1
    assert placed(world) == {"job": ("b",)}
    world.submit("other")
    world.now -= 0.1
    assert placed(world) == {"other": ("b",)}


@pytest.mark.parametrize("trouble", ["draining", "suspected", "incomplete"])
def test_flexible_counts_do_not_wait_for_a_slice_that_will_not_be_usable(world: World, trouble: str) -> None:
    """The gang gets the largest count that can run now (defect 3). A slice that drains does not become usable."""
    add_slices(world, "a", "b")
    over = world.start("over")
    troubles: dict[str, Event] = {
        "draining": WorkerDrainedEvent("a-1", "preemption"),
        "suspected": WorkerSuspectedEvent("a-1", "no answer", world.now),
        "incomplete": WorkerFailedEvent("a-1", "gone"),
    }
    world.do(troubles[trouble])
    world.report(over, TaskState.WORKER_FAILED)
    assert over.state.finished
    world.submit(slices=(1, 2), job_id="flexible", constraints=(Constraint("tpu-name", ConstraintOp.EXISTS),))
    assert placed(world) == {"flexible": ("b",)}


def test_two_multislice_jobs_never_share_out_the_slices_and_wait_for_each_other(world: World) -> None:
    """Drivers that each collect slices by themselves could wait for each other for ever."""
    add_slices(world, "a", "b", "c")
    world.submit("first", slices=(2,))
    world.submit("second", slices=(2,))
    assert placed(world) == {"first": ("a", "b")}
    assert "1 free" in world.why("second")


def test_slices_and_their_hosts_come_in_order(world: World) -> None:
    add_slices(world, "b", "a")
    world.submit(slices=(2,))
    (assignment,) = assigned_gangs(world.plan())
    assert assignment.group_names == ("a", "b")
    assert assignment.groups == (("a-0", "a-1"), ("b-0", "b-1"))


# -- who comes first ------------------------------------------------------------------------------------------------


def test_older_job_comes_first(world: World) -> None:
    add_slices(world, "a")
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("a",)}
    assert world.why("second").endswith("a: goes to first")


def test_unfittable_job_at_the_head_does_not_block_those_behind_it(world: World) -> None:
    add_slices(world, "a")
    world.submit("impossible", tpu_type="v4-512")
    world.submit("possible")
    assert placed(world) == {"possible": ("a",)}
    assert world.plan().pending_reasons.keys() == {"impossible"}


def test_own_warm_slices_come_before_unheld_ones_before_those_of_others(world: World) -> None:
    add_slices(world, "a", "b", "c")
    job = world.submit("one", owner="me")

    def choice(holders: dict[str, str], count: int = 1) -> tuple[str, ...]:
        for name in "abc":
            world.state.fleet.hold(name, holders.get(name))
        job.spec = replace(job.spec, coscheduling=CoschedulingConfig(num_groups=count))
        (assignment,) = assigned_gangs(world.plan())
        return assignment.group_names

    assert choice({"a": "you", "c": "me"}) == ("c",)
    assert choice({"a": "you", "c": "me"}, 2) == ("b", "c")
    assert choice({"a": "you"}) == ("b",)
    assert choice(dict.fromkeys("abc", "you")) == ("a",)


def test_jobs_with_different_groupings_do_not_get_the_same_hosts_in_one_cycle(world: World) -> None:
    """One by slice, one by rack, where the rack holds exactly that slice."""
    for number in (0, 1):
        plain = host("a", number)
        world.do(replace(plain, attributes={**plain.attributes, "rack": AttributeValue("rack-1")}))
    world.submit("by-slice")
    world.submit("by-rack", coscheduling=CoschedulingConfig("rack"))
    assert len(placed(world)) == 1


@given(st.permutations(range(8)))
def test_plan_does_not_depend_on_the_order_of_the_fleet(order: list[int]) -> None:
    def plan(order: Sequence[int]) -> SchedulingResult:
        world = World()
        for number in order:
            world.do(host("abcd"[number // 2], number % 2))
        world.submit("first", slices=(1, 2))
        world.submit("second")
        world.submit("third", slices=(2,))
        return world.plan()

    assert plan(order) == plan(range(8))


def test_planning_changes_nothing(world: World) -> None:
    add_slices(world, "a", "b")
    world.submit(slices=(2,))
    assert world.plan() == world.plan()
    assert world.busy() == set()


# -- why a job waits ------------------------------------------------------------------------------------------------


def test_reason_names_what_the_cluster_has_when_nothing_is_of_that_type(world: World) -> None:
    add_slices(world, "a", "b")
    add_slices(world, "c", tpu_type="v4-32")
    world.submit(tpu_type="v4-64", slices=(2, 4))
    reason = world.why("job")
    for part in ("2 or 4 slices", "tpu-topology == v4-64", "0 free", "2 × v4-16", "1 × v4-32"):
        assert part in reason


def test_reason_without_any_tpu_says_so(world: World) -> None:
    world.submit()
    assert "no TPU hosts at all" in world.why("job")


def test_reason_of_a_gang_by_an_attribute_that_no_host_has_says_so(world: World) -> None:
    world.do(cpu_host("x", rack="a"))
    by_zone = CoschedulingConfig("zone")
    world.submit_tasks("job", 1, coscheduling=by_zone, resources={"CPU": 1.0})
    assert world.why("job") == "waiting for 1 group by zone (any); 0 free; no host has the attribute zone"


def test_reason_of_a_task_without_chips_does_not_speak_of_tpus(world: World) -> None:
    world.submit_tasks("job", 1, resources={"CPU": 1.0})
    assert world.why("job") == "waiting for 1 host (any); 0 free; none like that in the cluster"


def test_reason_for_more_gpus_than_any_host_has_says_how_many_there_are(world: World) -> None:
    world.do(cpu_host("x", gpus=2.0))
    world.submit_tasks("job", 1, resources={"GPU": 4.0})
    assert "waiting for 1 host with 4 GPU a task (any); 0 free; host 10.0.0.9: host x has 2 GPU, a task needs 4" in (
        world.why("job")
    )


def test_tasks_without_gpus_leave_the_hosts_with_gpus_to_others(world: World) -> None:
    world.do(cpu_host("a", gpus=2.0))
    world.do(cpu_host("b"))
    world.start_tasks("none", 1, resources={"CPU": 1.0})
    world.start_tasks("two", 2, resources={"GPU": 1.0})
    assert [task.node_id for job in world.state.jobs.values() for task in job.tasks] == ["b", "a", "a"]
    world.check()


def test_reason_tells_how_many_are_free_of_how_many(world: World) -> None:
    add_slices(world, "a")
    world.submit(slices=(3,))
    assert "waiting for 3 slices" in world.why("job")
    assert "1 free" in world.why("job")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draining": "preemption in 30 s"}, "host 1 is draining (preemption in 30 s)"),
        ({"foreign": "4 chips of host 1 are in use outside iris_ray"}, "in use outside iris_ray"),
        ({"resources": {"TPU": 4.0, "CPU": 1.0}}, "host 1 has 1 CPU, a task needs 2"),
        ({"resources": {"TPU": 4.0}}, "host 1 has 0 CPU, a task needs 2"),
    ],
)
def test_reason_names_the_host_and_what_is_wrong_with_it(world: World, changes: dict[str, Any], words: str) -> None:
    add_slices(world, "a")
    world.do(host("a", 1, **changes))
    world.submit(resources={"TPU": 4.0, "CPU": 2.0})
    assert placed(world) == {}
    assert words in world.why("job")


def test_reason_names_who_uses_the_slice(world: World) -> None:
    add_slices(world, "a")
    world.start("other")
    world.submit()
    assert "a: in use by other" in world.why("job")


def test_reason_after_a_failed_launch_names_the_pause_and_the_error(world: World) -> None:
    add_slices(world, "a")
    job = world.submit()
    world.schedule()
    world.dispatch_fails(job)
    world.confirm(job)
    assert "no answer" in world.why("job")
    assert placed(world) == {}


def test_suspected_host_gets_no_tasks_until_the_suspicion_ends(world: World) -> None:
    add_slices(world, "a", "b")
    world.do(WorkerSuspectedEvent("a-0", "no answer", world.now))
    world.submit("first")
    world.submit("second")
    assert placed(world) == {"first": ("b",)}
    assert "a: host 0 may be lost (no answer)" in world.why("second")


def test_waiting_jobs_are_not_tried_again_for_a_new_job_that_finds_room(world: World) -> None:
    add_slices(world, "a")
    world.add_slice("small", "v4-8")
    running = world.start("running")
    world.submit("waits")
    waiting = world.plan().pending_reasons
    assert waiting.keys() == {"waits"}
    world.report_all(running, TaskState.SUCCEEDED)
    world.do(AttemptEndConfirmedEvent(AttemptId("running", 1)))
    world.submit("new", tpu_type="v4-8")
    assert [a.job_id for a in world.plan(waiting).assignments] == ["new"], "the caller says that nothing has changed"
    assert world.plan(waiting).pending_reasons == waiting
    assert {a.job_id for a in world.plan().assignments} == {"waits", "new"}


@pytest.mark.parametrize("tpu_type", ["v4-16", "v4-32"])
def test_waiting_jobs_are_tried_again_for_a_new_job_that_finds_no_room(world: World, tpu_type: str) -> None:
    add_slices(world, "a")
    world.start("running")
    world.submit("waits")
    waiting = world.plan().pending_reasons
    world.submit("new", tpu_type=tpu_type, priority=PriorityBand.PRODUCTION)
    assert world.plan(waiting).pending_reasons == world.plan().pending_reasons
    assert world.plan(waiting).pending_reasons["waits"].ahead == (tpu_type == "v4-16")


def test_end_of_a_suspicion_is_a_change_to_the_fleet(world: World) -> None:
    """Otherwise a job that comes later could overtake one that waits for that host."""
    add_slices(world, "a")
    world.do(WorkerSuspectedEvent("a-0", "no answer", world.now))
    world.do(WorkerSuspectedEvent("a-0", "still none", world.now + 1.0))
    version = world.state.fleet.version
    for seconds, changes in ((SUSPICION_S - 0.1, 0), (0.2, 0), (1.0, 1), (1.0, 0)):
        world.now += seconds
        world.do(TimePassedEvent(world.now))
        assert world.state.fleet.version == version + changes
        version += changes


def test_constraint_that_can_not_be_evaluated_stops_that_job_alone_and_says_why(world: World) -> None:
    add_slices(world, "a")
    world.submit("odd", constraints=(Constraint(TPU_TOPOLOGY, ConstraintOp.GT, AttributeValue(4)),))
    world.submit("plain")
    assert placed(world) == {"plain": ("a",)}
    (given_up,) = world.plan().unschedulable
    assert "can't be evaluated" in given_up.reason
    assert world.do(given_up).finished == ["odd"]
    assert world.state.jobs["odd"].state is JobState.UNSCHEDULABLE


def test_constraint_counts_on_every_host_of_the_slice(world: World) -> None:
    add_slices(world, "a", "b")
    plain = host("a", 1)
    world.do(replace(plain, attributes={**plain.attributes, "taint:hot": AttributeValue(True)}))
    world.submit(constraints=(Constraint("taint:hot", ConstraintOp.NOT_EXISTS),))
    assert placed(world) == {"job": ("b",)}


def test_constraint_that_one_host_fails_is_named_as_the_reason(world: World) -> None:
    """The slice that only lacks one suitable host is the closest one."""
    add_slices(world, "a")
    plain = host("a", 1)
    world.do(replace(plain, attributes={**plain.attributes, "taint:hot": AttributeValue(True)}))
    world.submit(
        constraints=(
            Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue("v4-16")),
            Constraint("taint:hot", ConstraintOp.NOT_EXISTS),
        )
    )
    assert "taint:hot not exists" in world.why("job")


def test_one_host_of_another_kind_does_not_end_jobs_whose_own_kind_is_not_there(world: World) -> None:
    """A constraint is impossible only if no host can evaluate it that satisfies the job's other constraints."""
    world.do(host("cpu", 0, "v4-8", attributes={"gen": AttributeValue("none")}))
    of_type = Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, "v4-16")
    world.submit(constraints=(of_type, Constraint("gen", ConstraintOp.GE, 4)))
    plan = world.plan()
    assert (plan.unschedulable, set(plan.pending_reasons)) == ([], {"job"})
    for number in range(2):
        event = host("a", number)
        world.do(replace(event, attributes={**event.attributes, "gen": AttributeValue("new")}))
    (given_up,) = world.plan().unschedulable
    assert "gen >= 4 can't be evaluated" in given_up.reason
