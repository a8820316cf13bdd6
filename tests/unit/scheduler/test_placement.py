"""Which hosts a job gets: size, fit, warm slices, preferences, taints, racks, and the order of the hosts."""

from typing import Any

import pytest

from iris_ray.errors import InvalidRequestError
from iris_ray.model.constraints import Constraint, ConstraintOp, Scalar
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.state.events import GangAssignedEvent, TasksAssignedEvent, WorkerDrainedEvent, WorkerSuspectedEvent
from tests.support.worlds import World, add_slices, cpu_host, host, one_by_one, tagged

OP = ConstraintOp
BY_RACK = CoschedulingConfig("rack")


def hosts(world: World, job_id: str = "job") -> list[str]:
    """The hosts that the job would get now, in the order of its tasks; only of tasks that would be placed."""
    found: list[str] = []
    for assignment in one_by_one(world.plan().assignments):
        if assignment.job_id == job_id and isinstance(assignment, GangAssignedEvent):
            found += [node_id for group in assignment.groups for node_id in group]
        elif assignment.job_id == job_id and isinstance(assignment, TasksAssignedEvent):
            found.append(assignment.node_id)
    return found


def slices(world: World, job_id: str = "job") -> list[str]:
    return list(dict.fromkeys(node_id.rpartition("-")[0] for node_id in hosts(world, job_id)))


# -- size and fit ---------------------------------------------------------------------------------------------------


def test_gang_of_several_slices_takes_only_those_of_its_size(world: World) -> None:
    add_slices(world, "a", tpu_type="v4-32")
    add_slices(world, "b", "c")
    world.submit(constraints=(), slices=(2,))
    assert slices(world) == ["b", "c"]


def test_multislice_gang_fills_up_with_parts_of_larger_slices(world: World) -> None:
    add_slices(world, "a", tpu_type="v4-32")
    add_slices(world, "b")
    job = world.submit(constraints=(), slices=(2,))
    assert hosts(world) == ["a-0", "a-1", "b-0", "b-1"]
    world.schedule()
    assert job.gang.placed


def test_gang_takes_larger_slice_with_fewest_idle_hosts(world: World) -> None:
    """The free part of "b" is exactly what it needs."""
    add_slices(world, "a", "b", tpu_type="v4-32")
    world.start_tasks("others", replicas=2, constraints=(Constraint("tpu-name", OP.EQ, "b"),))
    world.submit(constraints=())
    assert hosts(world) == ["b-2", "b-3"]


def test_tightest_fit_counts_hosts_given_away_in_plan(world: World) -> None:
    add_slices(world, "a", "b", tpu_type="v4-32")
    world.submit_tasks("first", replicas=2, constraints=(Constraint("tpu-name", OP.EQ, "b"),))
    world.submit(constraints=())
    assert (hosts(world, "first"), hosts(world)) == (["b-0", "b-1"], ["b-2", "b-3"])


@pytest.mark.parametrize("trouble", ["suspected", "in use outside"])
def test_gang_waits_for_unsuitable_slice_of_own_size(world: World, trouble: str) -> None:
    """The gang waits for that slice instead."""
    add_slices(world, "a", tpu_type="v4-32")
    add_slices(world, "b")
    if trouble == "suspected":
        world.do(WorkerSuspectedEvent("b-0", "no answer", world.now))
    else:
        world.do(host("b", 0, foreign="a stranger"))
    world.submit(constraints=())
    assert hosts(world) == []


def test_task_without_chips_runs_where_chips_are_in_use_outside(world: World) -> None:
    add_slices(world, "a")
    for number in (0, 1):
        world.do(host("a", number, foreign="a stranger"))
    world.submit_tasks("with", replicas=1)
    world.submit_tasks("without", replicas=2, resources={"CPU": 1.0})
    assert (hosts(world, "with"), hosts(world, "without")) == ([], ["a-0", "a-1"])


def test_task_with_chips_takes_slice_wasting_fewest_hosts(world: World) -> None:
    add_slices(world, "a", tpu_type="v4-32")
    add_slices(world, "b", tpu_type="v4-16")
    add_slices(world, "c", tpu_type="v4-8")
    world.submit_tasks(replicas=4)
    assert hosts(world) == ["c-0", "b-0", "b-1", "a-0"]


@pytest.mark.parametrize("resources", [{}, {"CPU": 1.0}], ids=str)
def test_gangs_on_device_without_chips_share_no_host(world: World, resources: dict[str, float]) -> None:
    """libtpu allows one process per host. To refuse such a job would be right, too."""
    add_slices(world, "a")
    try:
        world.submit("first", resources=resources)
        world.submit("second", resources=resources)
    except InvalidRequestError:
        return
    assert len(world.plan().assignments) == 1


# -- warm slices ----------------------------------------------------------------------------------------------------


def test_warm_slice_comes_before_others_for_its_owner_alone(world: World) -> None:
    add_slices(world, "b")
    world.finish(world.start("warm-up", owner="me"))
    add_slices(world, "a", "c")
    world.submit("mine", owner="me")
    world.submit("yours", owner="you")
    assert (slices(world, "mine"), slices(world, "yours")) == (["b"], ["a"])


# -- preferences ----------------------------------------------------------------------------------------------------

FAST = Constraint("disk", OP.EQ, "fast")
NEW = Constraint("age", OP.LT, 3)


@pytest.mark.parametrize("coscheduled", [True, False])
def test_preference_chooses_among_suitable_hosts(world: World, coscheduled: bool) -> None:
    add_slices(world, "a", disk="slow")
    add_slices(world, "b", disk="fast")
    add_slices(world, "c")
    submit = world.submit if coscheduled else world.submit_tasks
    submit(preferences=(FAST,))
    assert slices(world) == ["b"]


def test_slice_that_meets_more_preferences_comes_first(world: World) -> None:
    add_slices(world, "a", disk="fast", age=9)
    add_slices(world, "b", disk="slow", age=9)
    add_slices(world, "c", disk="fast", age=1)
    add_slices(world, "d", disk="slow", age=1)
    world.submit(preferences=(NEW, FAST))
    assert slices(world) == ["c"]
    world.submit("next", preferences=(NEW, FAST))
    assert slices(world, "next") == ["a"]


def test_preference_that_can_not_be_evaluated_counts_as_unmet(world: World) -> None:
    add_slices(world, "a", age="old")
    add_slices(world, "b", age=9)
    add_slices(world, "c", age=1)
    world.submit(preferences=(NEW,))
    assert slices(world) == ["c"]
    world.lose("c-0")
    assert slices(world) == ["a"]
    assert world.plan().unschedulable == []


def test_slice_meets_preference_only_with_all_hosts(world: World) -> None:
    add_slices(world, "a", "b", disk="fast")
    world.do(tagged(host("a", 1), {"disk": "slow"}))
    world.submit(preferences=(FAST,))
    assert slices(world) == ["b"]


def test_preference_does_not_lead_to_a_larger_slice(world: World) -> None:
    add_slices(world, "a", tpu_type="v4-32", disk="fast")
    add_slices(world, "b", disk="slow")
    world.submit(constraints=(), preferences=(FAST,))
    assert slices(world) == ["b"]


# -- taints ---------------------------------------------------------------------------------------------------------

SPOT: dict[str, Any] = {"taint:spot": True}
HOT: dict[str, Any] = {"taint:hot": True}


@pytest.mark.parametrize("value", [True, False, 0, "", "soon"], ids=repr)
@pytest.mark.parametrize("coscheduled", [True, False])
def test_taint_keeps_jobs_away_whatever_its_value(world: World, value: Scalar, coscheduled: bool) -> None:
    taint: dict[str, Any] = {"taint:maintenance": value}
    add_slices(world, "a", **taint)
    add_slices(world, "b")
    submit = world.submit if coscheduled else world.submit_tasks
    submit()
    assert slices(world) == ["b"]


def test_tainted_host_keeps_gangs_off_slice_tasks_off_host(world: World) -> None:
    add_slices(world, "a")
    world.do(tagged(host("a", 0), {"taint:hot": True}))
    world.submit("gang")
    world.submit_tasks("tasks", replicas=2)
    assert (hosts(world, "gang"), hosts(world, "tasks")) == ([], ["a-1"])


@pytest.mark.parametrize(
    "changes",
    [
        {"tolerations": ("spot",)},
        {"tolerations": ("other", "spot")},
        {"constraints": (Constraint("taint:spot", OP.EXISTS),)},
        {"constraints": (Constraint("taint:spot", OP.EQ, True),)},
        {"constraints": (Constraint("taint:spot", OP.IN, [True]),)},
    ],
    ids=str,
)
def test_taint_is_tolerated_by_name_or_by_constraint(world: World, changes: dict[str, Any]) -> None:
    add_slices(world, "a", **SPOT)
    world.submit(**changes)
    assert slices(world) == ["a"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tolerations": ("other",)},
        {"tolerations": ("spo", "spott")},
        {"preferences": (Constraint("taint:spot", OP.EXISTS),)},
        {"constraints": (Constraint("taint:spot", OP.NOT_EXISTS),)},
        {"constraints": (Constraint("taint:spot", OP.NOT_EXISTS),), "tolerations": ("spot",)},
        {"constraints": (Constraint("taint:spot", OP.EQ, False),)},
    ],
    ids=str,
)
def test_taint_is_not_tolerated_by_other_names_or_preferences_or_constraints(
    world: World, changes: dict[str, Any]
) -> None:
    add_slices(world, "a", **SPOT)
    world.submit(**changes)
    assert slices(world) == []


def test_taints_must_all_be_tolerated(world: World) -> None:
    add_slices(world, "a", **SPOT, **HOT)
    world.submit("one", tolerations=("spot",))
    assert slices(world, "one") == []
    world.submit("both", tolerations=("spot", "hot"))
    assert slices(world, "both") == ["a"]


# -- tasks without chips --------------------------------------------------------------------------------------------


def test_task_without_chips_keeps_off_tpu_hosts_when_it_can(world: World) -> None:
    add_slices(world, "a", tpu_type="v4-8")
    world.do(cpu_host("z"))
    job = world.submit_tasks(replicas=3, resources={"CPU": 4.0})
    assert hosts(world) == ["z", "z", "a-0"]
    world.schedule()
    assert {task.node_id for task in job.tasks} == {"z", "a-0"}


def test_tasks_without_gpus_leave_the_hosts_with_gpus_to_others(world: World) -> None:
    world.do(cpu_host("a", gpus=2.0))
    world.do(cpu_host("b"))
    world.start_tasks("none", 1, resources={"CPU": 1.0})
    world.start_tasks("two", 2, resources={"GPU": 1.0})
    assert [task.node_id for job in world.state.jobs.values() for task in job.tasks] == ["b", "a", "a"]


# -- racks and other groups -----------------------------------------------------------------------------------------


def test_rack_gang_takes_one_racks_hosts_slice_by_slice(world: World) -> None:
    """Two slices of one host in rack "r", hosts of a slice in numeric order in rack "q"."""
    for name in ("s2", "s10"):
        add_slices(world, name, tpu_type="v4-8", rack="r")
    add_slices(world, "s3", tpu_type="v4-8", rack="other")
    job = world.submit(coscheduling=BY_RACK, constraints=())
    assert hosts(world) == ["s10-0", "s2-0"]
    world.schedule()
    assert job.gang.groups == ("r",)


def test_rack_gang_takes_rack_with_fewest_idle_hosts(world: World) -> None:
    add_slices(world, "a", "b", rack="p")
    add_slices(world, "c", rack="q")
    world.submit(coscheduling=BY_RACK)
    assert hosts(world) == ["c-0", "c-1"]


def test_rack_with_a_draining_host_is_used_without_that_host(world: World) -> None:
    add_slices(world, *"abc", tpu_type="v4-8", rack="r")
    world.do(WorkerDrainedEvent("b-0", "maintenance"))
    world.submit(coscheduling=BY_RACK, constraints=())
    assert hosts(world) == ["a-0", "c-0"]


# -- constraints on some hosts of a group ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1], ids=["shared last", "shared first"])
@pytest.mark.parametrize("coscheduling", [CoschedulingConfig(), BY_RACK], ids=["slice", "rack"])
@pytest.mark.parametrize("odd_one", [0, 3])
def test_constraints_count_on_every_host_that_is_taken(
    world: World, order: int, coscheduling: CoschedulingConfig, odd_one: int
) -> None:
    """One constraint excludes one host of four, the other all of them. Their order does not matter."""
    add_slices(world, "a", tpu_type="v4-32", rack="r", pool="small", disk=9)
    world.do(tagged(host("a", odd_one, "v4-32"), {"rack": "r", "pool": "small", "disk": 1}))
    big_disk, large_pool = Constraint("disk", OP.GT, 5), Constraint("pool", OP.EQ, "large")
    world.submit("right", coscheduling=coscheduling, constraints=(big_disk,))
    assert hosts(world, "right") == [f"a-{i}" for i in range(4) if i != odd_one][:2]
    world.submit("wrong", coscheduling=coscheduling, constraints=(big_disk, large_pool)[::order])
    world.state.jobs["right"].gang.not_before = world.now + 60  # out of the way
    assert hosts(world, "wrong") == []


@pytest.mark.parametrize("coscheduled", [True, False])
def test_constraint_in_takes_any_of_its_values_and_no_other_kind(world: World, coscheduled: bool) -> None:
    add_slices(world, "a", zone="1")
    add_slices(world, "b", zone=True)
    add_slices(world, "c", zone=2)
    add_slices(world, "d")
    submit = world.submit if coscheduled else world.submit_tasks
    submit(constraints=(Constraint("zone", OP.IN, [1, 2.0, "x"]),))
    assert slices(world) == ["c"]


# -- hosts that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["by slice", "by rack", "one by one"])
@pytest.mark.parametrize("defect", ["no number", "a number twice"])
def test_host_without_a_number_of_its_own_is_refused(world: World, how: str, defect: str) -> None:
    """A host without a number is not host 0, and of two hosts with number 1 neither is known to be host 1."""
    rack = {"rack": "r"}
    world.do(tagged(host("a", 0), rack))
    world.do(tagged(host("a", 1), rack))
    if defect == "no number":
        plain = tagged(host("a", 1), rack)
        del plain.attributes["tpu-worker-id"]  # type: ignore[attr-defined]
        world.do(plain)
    else:
        world.do(tagged(host("a", 1, node_id="impostor"), rack))
    match how:
        case "by slice":
            world.submit()
            allowed: set[str] = set()
        case "by rack":
            world.submit(coscheduling=BY_RACK)
            allowed = set()
        case _:
            world.submit_tasks(replicas=3)
            allowed = {"a-0"}
    assert set(hosts(world)) <= allowed


@pytest.mark.parametrize("number", ["0", -1, True, 1.0, ""], ids=repr)
def test_host_with_an_invalid_number_is_refused(world: World, number: Scalar) -> None:
    world.do(tagged(host("a", 0, "v4-8"), {"tpu-worker-id": number}))
    world.submit("gang", tpu_type="v4-8")
    world.submit_tasks("tasks")
    assert world.plan().assignments == []


# -- the order of hosts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coscheduling", [CoschedulingConfig(), BY_RACK], ids=["slice", "rack"])
def test_part_of_group_takes_first_free_hosts_by_number(world: World, coscheduling: CoschedulingConfig) -> None:
    """Hosts 0, 1 and 2 of 16 are in use: 3 … 10 come next, where text would put 10 … 15 before 3."""
    for number in reversed(range(16)):
        world.do(tagged(host("a", number, "v4-128"), {"rack": "r"}))
    world.start_tasks("others", replicas=3, constraints=(Constraint("tpu-worker-id", OP.LT, 3),))
    assert world.busy() == {"a-0", "a-1", "a-2"}
    world.submit(tpu_type="v4-64", coscheduling=coscheduling, constraints=())
    assert hosts(world) == [f"a-{number}" for number in range(3, 11)]
