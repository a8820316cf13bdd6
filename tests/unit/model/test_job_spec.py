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
)
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.options import PriorityBand
from tests.support.worlds import gang_spec, tasks_spec

OP = ConstraintOp
GANG = CoschedulingConfig()
SSD = Constraint("disk", OP.EQ, "ssd")
NOT_COUNTS = [True, False, -1, 1.0, "1", math.nan, math.inf]


# -- jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"processes_per_host": 3}, "processes_per_host is 3; give one of 1, 2, 4"),
        ({"processes_per_host": True}, "processes_per_host is True; give one of 1, 2, 4"),
        ({"coscheduling": None}, "is for gangs on TPU slices"),
        ({"device": None, "coscheduling": CoschedulingConfig("rack"), "resources": {}}, "is for gangs on TPU slices"),
        ({"device": "v6e-8", "replicas": 1}, "needs hosts of 4 chips, and those of v6e-8 have 8"),
        ({"device": "v7x-2", "replicas": 1}, "needs hosts of 4 chips, and those of v7x-2 have 1"),
    ],
    ids=str,
)
def test_processes_that_hosts_can_not_have_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidJobError, match=re.escape(why)):
        gang_spec("job", **{"processes_per_host": 2} | changes)


@pytest.mark.parametrize("option", ["processes_per_host", "spares", "stop_without_progress"])
def test_option_of_gangs_says_how_tasks_on_single_hosts_become_one(option: str) -> None:
    given: dict[str, Any] = {option: 2}
    advice = re.escape("or make its tasks a gang: coscheduling=CoschedulingConfig(num_groups=3), --num-slices 3")
    with pytest.raises(InvalidJobError, match=f"{option}=2 .*; leave it out.*, {advice}$"):
        tasks_spec(replicas=3, device="v4-8", **given)
    with pytest.raises(InvalidJobError, match=f"{option}=2 .*; leave it out") as refused:
        tasks_spec(**given)
    assert "make its tasks a gang" not in str(refused.value)


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


@pytest.mark.parametrize("device", ["", "v9-32", "gpu", 32, True, ["v4-32"], b"v4-32"], ids=repr)
def test_job_on_no_device_value_is_refused(device: Any) -> None:
    with pytest.raises(InvalidRequestError):
        tasks_spec(device=device)


BUDGETS = ("max_retries_failure", "max_retries_preemption", "max_task_failures")
NO_CONSTRAINTS = [("disk == ssd",), (SSD, None), ({"disk": "ssd"},), "disk"]
NO_NAMES = [None, 7, ["me"], b"me"]
REFUSED: list[tuple[str, str, list[Any]]] = [
    ("replicas", "replicas.*give an int of 1 or more", [0, *NOT_COUNTS, None, [1]]),
    *((budget, f"'job'.*{budget}.*give an int of 0 or more", [*NOT_COUNTS, [1]]) for budget in BUDGETS),
    ("scheduling_timeout", "scheduling_timeout.*seconds, or None", [True, math.nan, math.inf, -math.inf, "60", [60]]),
    ("resources", "resources", [None, 4, "TPU", [("TPU", 4.0)], {4: 1.0}]),
    ("job_id", "job_id.*give a name", ["", None, 7, b"job", ["job"]]),
    (
        "job_id",
        "job_id.*give a name of letters, digits",
        ["$(touch PWNED)-1", "a b", "-rf", "../up", "a/../b", "=HYPERLINK(1)", "a\x1b[2J", "a\n"],
    ),
    ("user", "user.*give a name of letters, digits", ["$(id)", "=1+1", "-u", "ann lee", "a\x1b[2J"]),
    *((option, option, NO_NAMES) for option in ("owner", "user", "name")),
    ("owner", "owner", [""]),
    ("priority", "priority.*PRODUCTION.*INTERACTIVE.*BATCH", [0, 1, "PRODUCTION", None, True]),
    *((option, f"{option}.*Constraint", NO_CONSTRAINTS) for option in ("constraints", "preferences")),
    *((option, option, [SSD, None, 7]) for option in ("constraints", "preferences")),
    *(
        (option, rf"{option} has 'pool == a'; give a list of Constraint objects, such as \[", [(SSD, "pool == a")])
        for option in ("constraints", "preferences")
    ),
    ("tolerations", r'tolerations.*such as \["spot"\]', ["spot", b"spot", (True,), (None,), 7, None]),
    ("tolerations", "tolerations has .* without 'taint:'", [("",), ("taint:spot",)]),
    ("whole_groups", re.escape("coscheduling=CoschedulingConfig()"), [True]),
]
"""Option, what the refusal says, and values that are refused so."""


@pytest.mark.parametrize(
    ("option", "said", "value"), [(option, said, one) for option, said, values in REFUSED for one in values], ids=repr
)
def test_job_with_a_bad_value_is_refused_by_name_with_advice(option: str, said: str, value: Any) -> None:
    with pytest.raises(InvalidJobError, match=said):
        tasks_spec(**{option: value})


@pytest.mark.parametrize("value", [0, -1, -0.5])
def test_scheduling_timeout_of_0_or_less_means_never(value: float) -> None:
    assert tasks_spec(scheduling_timeout=value).scheduling_timeout is None


@pytest.mark.parametrize("amount", [-1, -0.5, True, math.nan, math.inf, "4", None, [4]], ids=repr)
@pytest.mark.parametrize("resource", ["TPU", "CPU", "disk"])
def test_job_with_bad_resource_amount_is_refused_by_name(resource: str, amount: Any) -> None:
    with pytest.raises(InvalidJobError, match=rf"of {resource}.*give a number of 0 or more"):
        tasks_spec(resources={"CPU": 1.0, resource: amount})


@pytest.mark.parametrize("value", ["tpu-name", True, 2, {"group_by": "tpu-name"}], ids=repr)
def test_job_with_invalid_coscheduling_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJobError, match="CoschedulingConfig"):
        gang_spec(coscheduling=value)


# -- coscheduling ---------------------------------------------------------------------------------------------------


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


# -- values and constraints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, math.nan, [1], (1,), {"a": 1}, b"x", 1j, object], ids=repr)
def test_incomparable_attribute_value_is_refused_with_alternatives(value: Any) -> None:
    with pytest.raises(InvalidConstraintError, match="give a str, a number or a bool"):
        AttributeValue(value)


COMPARISONS = (OP.EQ, OP.NE, OP.GT, OP.GE, OP.LT, OP.LE)
INCOMPARABLE: tuple[Any, ...] = (math.nan, [1], b"x", {})
WITH_INCOMPARABLE: tuple[list[Any], ...] = ([math.nan], ["a", None], [["a"]])
NO_VALUES: tuple[Any, ...] = ([], (), set(), iter(()))
IMPOSSIBLE: list[tuple[str, list[tuple[Any, ...]]]] = [
    ("give a str, a number or a bool", [("k", op, value) for op in COMPARISONS for value in INCOMPARABLE]),
    ("give a str, a number or a bool", [("k", OP.IN, values) for values in WITH_INCOMPARABLE]),
    (r"'k'.*IN needs at least one value", [("k", OP.IN, values) for values in NO_VALUES]),
    # A bare string would be taken for its letters.
    (r"'k'.*\['a', 'b'\]", [("k", OP.IN, values) for values in ("ab", b"ab", 7, True, AttributeValue("ab"))]),
    ("name of an attribute", [(key, OP.EXISTS) for key in ("", None, 7, b"k", ("k",))]),
    (r"'k'.*ConstraintOp", [("k", op, 1) for op in ("==", "EQ", 0, None)]),
]


@pytest.mark.parametrize(("said", "parts"), [(said, parts) for said, all_parts in IMPOSSIBLE for parts in all_parts])
def test_impossible_constraint_is_refused_with_advice(said: str, parts: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidConstraintError, match=said):
        Constraint(*parts)


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
