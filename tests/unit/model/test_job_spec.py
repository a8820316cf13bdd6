"""What is refused when a job is submitted, and how the refusal says to mend it."""

import math
import pickle
import re
from typing import Any

import pytest

from iris_ray.errors import (
    InvalidConstraintError,
    InvalidJobError,
    InvalidRequestError,
    InvalidSliceCountError,
    UnknownTPUTypeError,
)
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.options import PriorityBand
from tests.support.worlds import World, gang_spec, tasks_spec

OP = ConstraintOp
GANG = CoschedulingConfig()
SSD = Constraint("disk", OP.EQ, "ssd")
NOT_COUNTS = [True, False, -1, 1.0, "1", math.nan, math.inf]


# -- jobs -----------------------------------------------------------------------------------------------------------


def test_job_needs_only_a_name_and_an_owner() -> None:
    spec = JobSpec(job_id="job", owner="pool")
    assert (spec.replicas, spec.coscheduling, spec.device) == (1, None, None)
    assert (spec.priority, spec.max_task_failures, spec.scheduling_timeout) == (PriorityBand.INTERACTIVE, None, None)
    assert (spec.max_retries_failure, spec.max_retries_preemption) == (0, 100)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"processes_per_host": 3}, "processes_per_host is 3; give one of 1, 2, 4"),
        ({"processes_per_host": True}, "processes_per_host is True; give one of 1, 2, 4"),
        ({"coscheduling": None}, "gangs on TPU slices only"),
        ({"device": None, "coscheduling": CoschedulingConfig("rack"), "resources": {}}, "gangs on TPU slices only"),
        ({"device": "v6e-8", "replicas": 1}, "needs hosts of 4 chips, and those of v6e-8 have 8"),
        ({"device": "v7x-2", "replicas": 1}, "needs hosts of 4 chips, and those of v7x-2 have 1"),
    ],
    ids=str,
)
def test_processes_that_hosts_can_not_have_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidJobError, match=re.escape(why)):
        gang_spec("job", **{"processes_per_host": 2} | changes)


def test_coscheduled_job_without_device_is_refused_with_advice() -> None:
    with pytest.raises(InvalidJobError, match=r'coscheduled.*device="v4-32"'):
        JobSpec(job_id="job", owner="pool", coscheduling=GANG)


@pytest.mark.parametrize(
    ("device", "replicas", "right"),
    [("v4-32", 3, 4), ("v4-32", 8, 4), ("v4-8", 2, 1), ("v5litepod-16", 2, 4), ("v5litepod-8", 3, 1), ("v5p-32", 1, 4)],
)
def test_job_with_wrong_replicas_for_device_is_refused(device: str, replicas: int, right: int) -> None:
    with pytest.raises(InvalidJobError, match=f"replicas={right}\\b.*num_groups"):
        JobSpec(job_id="job", owner="pool", device=device, replicas=replicas, coscheduling=GANG)


@pytest.mark.parametrize(("device", "replicas"), [("v4-32", 4), ("v4-8", 1), ("v5litepod-8", 1), ("v5litepod-8", 2)])
def test_job_with_devices_replicas_is_accepted_on_any_slices(device: str, replicas: int) -> None:
    for groups in (1, (2, 4)):
        gang = CoschedulingConfig(num_groups=groups)
        spec = JobSpec(job_id="job", owner="pool", device=device, replicas=replicas, coscheduling=gang)
        assert (spec.device, spec.replicas, spec.coscheduling) == (device, replicas, gang)


@pytest.mark.parametrize("replicas", [1, 3, 1000])
def test_job_without_coscheduling_takes_any_number_of_replicas(replicas: int) -> None:
    assert tasks_spec(replicas=replicas, device="v4-32").replicas == replicas


@pytest.mark.parametrize(
    ("device", "nearest"),
    [("v4-33", ["v4-32", "v4-40"]), ("v4-30", ["v4-24", "v4-32"]), ("v5p-9", ["v5p-8"]), ("v6e-255", ["v6e-256"])],
)
def test_job_on_unknown_device_is_refused_with_nearest(device: str, nearest: list[str]) -> None:
    with pytest.raises(UnknownTPUTypeError) as refusal:
        tasks_spec(device=device)
    assert all(name in str(refusal.value) for name in nearest)


@pytest.mark.parametrize("device", ["", "v9-32", "gpu", 32, True, ["v4-32"], b"v4-32"], ids=repr)
def test_job_on_no_device_value_is_refused(device: Any) -> None:
    with pytest.raises(InvalidRequestError):
        tasks_spec(device=device)


@pytest.mark.parametrize("value", [0, *NOT_COUNTS, None, [1]], ids=repr)
def test_job_with_bad_replicas_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"replicas.*give an int of 1 or more"):
        tasks_spec(replicas=value)


@pytest.mark.parametrize("option", ["max_retries_failure", "max_retries_preemption", "max_task_failures"])
@pytest.mark.parametrize("value", [*NOT_COUNTS, [1]], ids=repr)
def test_job_with_a_bad_budget_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidJobError, match=rf"'job'.*{option}.*give an int of 0 or more"):
        tasks_spec(**{option: value})


@pytest.mark.parametrize("option", ["max_retries_failure", "max_retries_preemption", "max_task_failures"])
def test_job_with_zero_budget_is_accepted(option: str) -> None:
    changes: dict[str, Any] = {option: 0}
    assert getattr(tasks_spec(**changes), option) == 0


@pytest.mark.parametrize("name", ["", "taint:spot"])
def test_impossible_toleration_is_refused(name: str) -> None:
    with pytest.raises(InvalidJobError, match=r"tolerations has .* without 'taint:'"):
        tasks_spec(tolerations=(name,))


@pytest.mark.parametrize("value", [0, -1, -0.5])
def test_scheduling_timeout_of_0_or_less_means_never(value: float) -> None:
    assert tasks_spec(scheduling_timeout=value).scheduling_timeout is None


@pytest.mark.parametrize("value", [True, math.nan, math.inf, -math.inf, "60", [60]], ids=repr)
def test_job_with_a_bad_scheduling_timeout_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"scheduling_timeout.*seconds, or None"):
        tasks_spec(scheduling_timeout=value)


@pytest.mark.parametrize("amount", [-1, -0.5, True, math.nan, math.inf, "4", None, [4]], ids=repr)
@pytest.mark.parametrize("resource", ["TPU", "CPU", "disk"])
def test_job_with_bad_resource_amount_is_refused_by_name(resource: str, amount: Any) -> None:
    with pytest.raises(InvalidJobError, match=rf"of {resource}.*give a number of 0 or more"):
        tasks_spec(resources={"CPU": 1.0, resource: amount})


@pytest.mark.parametrize("resources", [None, 4, "TPU", [("TPU", 4.0)], {4: 1.0}], ids=repr)
def test_job_with_malformed_resources_is_refused(resources: Any) -> None:
    with pytest.raises(InvalidJobError, match="resources"):
        tasks_spec(resources=resources)


@pytest.mark.parametrize(
    "job_id", ["$(touch PWNED)-1", "a b", "-rf", "../up", "a/../b", "=HYPERLINK(1)", "a\x1b[2J", "a\n"], ids=repr
)
def test_job_whose_id_would_act_on_its_reader_is_refused(job_id: str) -> None:
    with pytest.raises(InvalidJobError, match=r"job_id.*give a name of letters, digits"):
        tasks_spec(job_id)


@pytest.mark.parametrize("user", ["$(id)", "=1+1", "-u", "ann lee", "a\x1b[2J"], ids=repr)
def test_job_whose_user_would_act_on_its_reader_is_refused(user: str) -> None:
    with pytest.raises(InvalidJobError, match=r"user.*give a name of letters, digits"):
        tasks_spec(user=user)


@pytest.mark.parametrize("job_id", ["", None, 7, b"job", ["job"]], ids=repr)
def test_job_without_a_usable_id_is_refused(job_id: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"job_id.*give a name"):
        tasks_spec(job_id)


@pytest.mark.parametrize("option", ["owner", "user", "name"])
@pytest.mark.parametrize("value", [None, 7, ["me"], b"me"], ids=repr)
def test_job_with_non_string_identity_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidJobError, match=option):
        tasks_spec(**{option: value})


def test_job_without_an_owner_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="owner"):
        tasks_spec(owner="")


@pytest.mark.parametrize("priority", [0, 1, "PRODUCTION", None, True], ids=repr)
def test_job_with_invalid_priority_is_refused_with_bands(priority: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"priority.*PRODUCTION.*INTERACTIVE.*BATCH"):
        tasks_spec(priority=priority)


@pytest.mark.parametrize("option", ["constraints", "preferences"])
@pytest.mark.parametrize("value", [("disk == ssd",), (SSD, None), ({"disk": "ssd"},), "disk"], ids=repr)
def test_job_with_invalid_constraints_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidJobError, match=rf"{option}.*Constraint"):
        tasks_spec(**{option: value})


@pytest.mark.parametrize("option", ["constraints", "preferences"])
@pytest.mark.parametrize("value", [SSD, None, 7], ids=str)
def test_job_with_constraints_in_no_sequence_is_refused(option: str, value: Any) -> None:
    with pytest.raises(InvalidJobError, match=option):
        tasks_spec(**{option: value})


@pytest.mark.parametrize("option", ["constraints", "preferences", "tolerations"])
def test_job_treats_list_as_tuple_or_refuses_it(option: str) -> None:
    """What was accepted must not fail once it is submitted."""
    changes: dict[str, Any] = {option: ["spot"] if option == "tolerations" else [SSD]}
    try:
        tasks_spec(**changes)
    except InvalidJobError:
        return
    world = World()
    world.submit_tasks(**changes)
    assert world.plan().pending_reasons.keys() == {"job"}
    world.state.check()


@pytest.mark.parametrize("value", ["spot", b"spot", (True,), (None,), 7, None], ids=repr)
def test_job_with_invalid_tolerations_is_refused_with_advice(value: Any) -> None:
    with pytest.raises(InvalidJobError, match=r'tolerations.*such as \["spot"\]'):
        tasks_spec(tolerations=value)


def test_job_of_whole_groups_requires_coscheduling() -> None:
    with pytest.raises(InvalidJobError, match=re.escape("coscheduling=CoschedulingConfig()")):
        tasks_spec(whole_groups=True)


@pytest.mark.parametrize("value", ["tpu-name", True, 2, {"group_by": "tpu-name"}], ids=repr)
def test_job_with_invalid_coscheduling_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJobError, match="CoschedulingConfig"):
        gang_spec(coscheduling=value)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": None},
        {"device": "v4-33"},
        {"replicas": 3},
        {"max_retries_failure": -1},
        {"resources": {"TPU": -4.0}},
        {"scheduling_timeout": math.nan},
        {"tolerations": "spot"},
    ],
    ids=str,
)
def test_refused_job_acquires_nothing(changes: dict[str, Any]) -> None:
    world = World("a")
    with pytest.raises(ValueError, match=r"."):
        world.submit(**changes)
    assert world.state.jobs == {}
    assert not world.state.pending()
    assert world.busy() == set()
    assert world.state.holders == {}
    world.state.check()


# -- coscheduling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_groups", "counts"),
    [(1, (1,)), (3, (3,)), ((2,), (2,)), ([4, 2], (2, 4)), ((1, 8, 3), (1, 3, 8)), (range(1, 4), (1, 2, 3))],
)
def test_coscheduling_takes_one_or_several_group_counts(num_groups: Any, counts: tuple[int, ...]) -> None:
    assert CoschedulingConfig(num_groups=num_groups).num_groups == counts


def test_coscheduling_defaults_to_one_slice() -> None:
    assert (CoschedulingConfig().group_by, CoschedulingConfig().num_groups) == ("tpu-name", (1,))
    assert CoschedulingConfig(num_groups=[2, 1]) == CoschedulingConfig(num_groups=(1, 2))


@pytest.mark.parametrize(
    "num_groups",
    [0, -1, True, 1.0, math.nan, math.inf, "2", b"2", None, [], (), [0], [1, 1], [2, -1], [True], [1.0], ["1"], [[1]]],
    ids=repr,
)
def test_coscheduling_with_bad_group_count_is_refused(num_groups: Any) -> None:
    with pytest.raises(InvalidSliceCountError):
        CoschedulingConfig(num_groups=num_groups)


@pytest.mark.parametrize("group_by", ["", None, 7, True, b"rack", ("rack",)], ids=repr)
def test_coscheduling_by_invalid_name_is_refused_with_example(group_by: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"group_by.*'tpu-name'"):
        CoschedulingConfig(group_by)


def test_gang_without_tpu_takes_any_number_of_tasks() -> None:
    spec = tasks_spec(replicas=3, coscheduling=CoschedulingConfig("rack", 2), resources={"CPU": 1.0})
    assert (spec.most_tasks, spec.requirement.group_by, spec.requirement.chips) == (6, "rack", False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"coscheduling": CoschedulingConfig()}, 'device="v4-32", or group by another attribute'),
        ({"spares": 1}, "a gang by rack has no spares"),
        ({"whole_groups": True}, "no whole groups"),
        ({"resources": {"TPU": 4.0}}, "no TPU chips"),
    ],
    ids=str,
)
def test_gang_without_tpu_asking_for_slice_features_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidJobError, match=re.escape(said)):
        tasks_spec(**{"coscheduling": CoschedulingConfig("rack"), "resources": {"CPU": 1.0}, **changes})


@pytest.mark.parametrize(("groups", "tasks"), [(1, 4), (3, 12), ((1, 2), 8)])
def test_gang_has_replicas_for_each_group(groups: Any, tasks: int) -> None:
    """With several counts: as many as the largest of them needs, until it is placed."""
    job = World().submit(tpu_type="v4-32", coscheduling=CoschedulingConfig(num_groups=groups))
    assert [task.task_id for task in job.tasks] == [f"job/task-{i}" for i in range(tasks)]


# -- values and constraints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, math.nan, [1], (1,), {"a": 1}, b"x", 1j, object], ids=repr)
def test_incomparable_attribute_value_is_refused_with_alternatives(value: Any) -> None:
    with pytest.raises(InvalidConstraintError, match="give a str, a number or a bool"):
        AttributeValue(value)


@pytest.mark.parametrize("op", [OP.EQ, OP.NE, OP.GT, OP.GE, OP.LT, OP.LE], ids=lambda op: op.name)
@pytest.mark.parametrize("value", [math.nan, [1], b"x", {}], ids=repr)
def test_constraint_by_incomparable_value_is_refused(op: ConstraintOp, value: Any) -> None:
    with pytest.raises(InvalidConstraintError):
        Constraint("k", op, value)


@pytest.mark.parametrize("values", [[], (), set(), iter(())], ids=lambda values: type(values).__name__)
def test_constraint_in_empty_collection_is_refused(values: Any) -> None:
    with pytest.raises(InvalidConstraintError, match=r"'k'.*IN needs at least one value"):
        Constraint("k", OP.IN, values)


@pytest.mark.parametrize("values", ["ab", b"ab", 7, True, AttributeValue("ab")], ids=repr)
def test_constraint_in_no_collection_is_refused_with_advice(values: Any) -> None:
    """A bare string would be taken for its letters."""
    with pytest.raises(InvalidConstraintError, match=r"'k'.*\['a', 'b'\]"):
        Constraint("k", OP.IN, values)


@pytest.mark.parametrize("values", [[math.nan], ["a", None], [["a"]]], ids=repr)
def test_constraint_in_incomparable_values_is_refused(values: Any) -> None:
    with pytest.raises(InvalidConstraintError):
        Constraint("k", OP.IN, values)


@pytest.mark.parametrize("key", ["", None, 7, b"k", ("k",)], ids=repr)
def test_constraint_on_invalid_name_is_refused(key: Any) -> None:
    with pytest.raises(InvalidConstraintError, match="name of an attribute"):
        Constraint(key, OP.EXISTS)


@pytest.mark.parametrize("op", ["==", "EQ", 0, None], ids=repr)
def test_constraint_with_invalid_operator_is_refused(op: Any) -> None:
    with pytest.raises(InvalidConstraintError, match=r"'k'.*ConstraintOp"):
        Constraint("k", op, 1)


# -- travelling -----------------------------------------------------------------------------------------------------


def test_job_spec_survives_pickling() -> None:
    spec = gang_spec(
        slices=(1, 2),
        constraints=(SSD, Constraint("size", OP.IN, [1, 2.5, "x", True]), Constraint("taint:hot", OP.NOT_EXISTS)),
        preferences=(Constraint("zone", OP.NE, "b"),),
        tolerations=("spot",),
        priority=PriorityBand.BATCH,
        scheduling_timeout=60.0,
        max_task_failures=3,
        user="me",
    )
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.requirement == spec.requirement
    assert hash(again.requirement) == hash(spec.requirement)


def test_job_spec_is_independent_of_its_arguments() -> None:
    resources = {"TPU": 4.0}
    spec = tasks_spec(resources=resources)
    resources["TPU"] = 0.0
    assert spec.resources == {"TPU": 4.0}


def test_jobs_of_equal_wishes_have_equal_requirements() -> None:
    assert gang_spec("one", user="me").requirement == gang_spec("two", user="you").requirement
    assert gang_spec().requirement != gang_spec(tpu_type="v4-32").requirement
    assert gang_spec(tolerations=("spot",)).requirement != gang_spec().requirement


@pytest.mark.parametrize("name", ["constraints", "preferences"])
def test_constraint_as_text_is_refused_with_an_example(name: str) -> None:
    values: dict[str, Any] = {name: (SSD, "pool == a")}
    with pytest.raises(
        InvalidJobError, match=rf"{name} has 'pool == a'; give a list of Constraint objects, such as \["
    ):
        tasks_spec(**values)
