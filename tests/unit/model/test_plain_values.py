"""What a user hands over is rebuilt of plain values, or refused; nothing of it is kept as it is."""

import enum
import math
import pickle
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from iris_ray.errors import InvalidConstraintError, InvalidJobError, InvalidMessageError, InvalidRequestError
from iris_ray.model.constraints import MOST_VALUES, AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import MOST_TASKS, CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.multislice import MOST_COUNTS, MOST_SLICES
from iris_ray.model.plain_values import MOST_CHARACTERS, MOST_ITEMS, Scalar, Words, plain
from iris_ray.state.events import AttemptEndConfirmedEvent, TaskStateChangedEvent, WorkerDrainedEvent
from tests.support.worlds import gang_spec, tasks_spec

HALF_A_PAIR = "job\udc80"
HUGE = 10**400


class Pool(enum.StrEnum):
    """As a user's script has it: nobody else can unpickle its members."""

    LARGE = "large"


class Count(enum.IntEnum):
    FOUR = 4


class Loud(str):
    """A str that has ideas of its own."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Stranger:
    reason: str


def is_plain(value: Any) -> bool:
    """Whether any process of ours can unpickle it."""
    named = [str(argument) for code, argument, _ in pickletools.genops(pickle.dumps(value, 2)) if code.name == "GLOBAL"]
    return not [name for name in named if name.startswith(("tests.", "numpy"))]


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "given", "made"),
    [
        (str, Pool.LARGE, "large"),
        (str, Loud("x"), "x"),
        (str, np.str_("x"), "x"),
        (int, np.int64(4), 4),
        (int, Count.FOUR, 4),
        (float, np.float64(0.5), 0.5),
        (float, np.float32(0.5), 0.5),
        (float, 4, 4.0),
        (Scalar, np.float64(0.5), 0.5),
        (Scalar, Pool.LARGE, "large"),
        (Scalar, True, True),
        (Scalar, math.inf, math.inf),
        (bytes, np.bytes_(b"x"), b"x"),
        (tuple[str, ...], [Pool.LARGE], ("large",)),
        (list[int], (np.int32(1),), [1]),
        (dict[str, float], {Pool.LARGE: np.float64(1)}, {"large": 1.0}),
        (str | None, None, None),
        (str | None, Pool.LARGE, "large"),
        (tuple[int, str], (np.int8(1), Pool.LARGE), (1, "large")),
    ],
    ids=repr,
)
def test_value_of_subclass_becomes_plain(kind: Any, given: Any, made: Any) -> None:
    found = plain(kind, given, "it")
    assert found == made
    assert type(found) is type(made)
    assert is_plain(found)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (str, b"x"),
        (str, HALF_A_PAIR),
        (str, "x" * (MOST_CHARACTERS + 1)),
        (int, True),
        (int, 1.0),
        (int, HUGE),
        (float, "1"),
        (float, HUGE),
        (float, math.nan),
        (float, math.inf),
        (Scalar, HUGE),
        (Scalar, math.nan),
        (Scalar, None),
        (bool, 1),
        (bytes, "x"),
        (tuple[str, ...], "abc"),
        (tuple[str, ...], ("a", 1)),
        (tuple[int, str], (1,)),
        (dict[str, float], {HALF_A_PAIR: 1.0}),
        (dict[str, float], [("a", 1.0)]),
        (str | None, 0),
        (TaskState, "running"),
        (AttemptId, ("job", 1, 0)),
        (AttemptEndConfirmedEvent, Stranger("x")),
        (None, 0),
    ],
    ids=lambda one: repr(one)[:40],
)
def test_other_value_is_refused_by_name(kind: Any, given: Any) -> None:
    with pytest.raises(InvalidMessageError, match="the thing"):
        plain(kind, given, "the thing")


def test_our_object_is_rebuilt_with_plain_values() -> None:
    one: Any = np.int64(1)
    none: Any = np.int64(0)
    event = TaskStateChangedEvent(AttemptId(Pool.LARGE, one), none, TaskState.FAILED, Loud("boom"))
    found = plain(TaskStateChangedEvent | WorkerDrainedEvent, event, "event")
    assert found == TaskStateChangedEvent(AttemptId("large", 1), 0, TaskState.FAILED, "boom")
    assert is_plain(found)


def test_object_lacking_a_field_is_refused() -> None:
    """Unpickling fills in what was sent, and asks no constructor."""
    event = object.__new__(AttemptEndConfirmedEvent)
    with pytest.raises(InvalidMessageError, match="attempt"):
        plain(AttemptEndConfirmedEvent, event, "event")


def test_object_refused_by_its_constructor_is_refused() -> None:
    spec = tasks_spec()
    object.__setattr__(spec, "replicas", -1)
    with pytest.raises(InvalidJobError, match="replicas"):
        plain(JobSpec, spec, "spec")


def test_odd_text_never_refuses_a_report() -> None:
    """An exception about a file whose name is no Unicode has such a text; its report must arrive."""
    assert plain(Words, f"no such file: {HALF_A_PAIR}", "error") == "no such file: job\\udc80"
    assert len(plain(Words, "x" * 10**6, "error")) == MOST_CHARACTERS
    with pytest.raises(InvalidMessageError, match="error"):
        plain(Words, 7, "error")


def test_value_failing_on_inspection_is_refused() -> None:
    class Bomb(dict[str, float]):
        def items(self) -> Any:
            raise RuntimeError("boom")

        def __repr__(self) -> str:
            raise RuntimeError("boom")

    with pytest.raises(InvalidMessageError, match="boom"):
        plain(dict[str, float], Bomb(a=1.0), "resources")
    with pytest.raises(InvalidMessageError, match="a Bomb"):
        plain(str, Bomb(), "name")


# -- what users write ----------------------------------------------------------------------------------------------


def test_job_of_user_types_becomes_plain() -> None:
    spec = tasks_spec(
        Loud("job"),
        user=Pool.LARGE,
        name=np.str_("n"),
        resources={Pool.LARGE: np.float64(1.0)},
        tolerations=(Pool.LARGE,),
        replicas=np.int64(3).item(),
        constraints=(
            Constraint(Pool.LARGE, ConstraintOp.EQ, Pool.LARGE),
            Constraint("rack", ConstraintOp.IN, [Pool.LARGE, np.float64(1)]),
        ),
        scheduling_timeout=np.float64(5),
    )
    assert is_plain(spec)
    assert (spec.user, spec.constraints[0].value) == ("large", AttributeValue("large"))
    assert hash(spec.requirement) == hash(tasks_spec("other", **_parts(spec)).requirement)


def _parts(spec: JobSpec) -> dict[str, Any]:
    return {"constraints": spec.constraints, "resources": dict(spec.resources), "tolerations": spec.tolerations}


@pytest.mark.parametrize(
    "changes",
    [
        {"resources": {"CPU": HUGE}},
        {"resources": {"CPU": 1e300}},
        {"resources": {HALF_A_PAIR: 1.0}},
        {"tolerations": (HALF_A_PAIR,)},
        {"max_retries_preemption": HUGE},
        {"scheduling_timeout": HUGE},
        {"grow_after": HUGE},
        {"user": "x" * (MOST_CHARACTERS + 1)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_unplannable_or_unrecordable_job_is_refused_at_once(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError, match=next(iter(changes))):
        tasks_spec(**changes)


@pytest.mark.parametrize("value", [HUGE, -HUGE, HALF_A_PAIR, b"x", None], ids=lambda one: repr(one)[:10])
def test_unstorable_attribute_value_is_refused(value: Any) -> None:
    with pytest.raises(InvalidConstraintError, match="can't be the value of an attribute"):
        AttributeValue(value)


def test_label_with_too_many_digits_is_text() -> None:
    assert AttributeValue.parse("9" * 5000) == AttributeValue("9" * 5000)


# -- too many of anything ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"replicas": 10**8}, "100000000 tasks"),
        ({"constraints": [Constraint("rack", ConstraintOp.EXISTS)] * 101}, "101 constraints"),
        ({"preferences": [Constraint("rack", ConstraintOp.EXISTS)] * 101}, "101 preferences"),
        ({"tolerations": ["spot"] * 101}, "101 tolerations"),
        ({"resources": {str(number): 1.0 for number in range(101)}}, "101 resources"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_oversized_job_is_refused_with_number(changes: dict[str, Any], number: str) -> None:
    with pytest.raises(InvalidJobError, match=f"{number}, and the limit is"):
        tasks_spec(**changes)


def test_gang_on_too_many_slices_is_refused_with_number() -> None:
    with pytest.raises(InvalidRequestError, match=r"300000\b.*limit is 100,000"):
        CoschedulingConfig(num_groups=[1, 300_000])
    with pytest.raises(InvalidRequestError, match=f"more than {MOST_COUNTS:,} numbers"):
        CoschedulingConfig(num_groups=range(1, 10**9))
    for number in (10**8, 10**5000):
        with pytest.raises(InvalidRequestError, match="limit"):
            CoschedulingConfig(num_groups=number)
    with pytest.raises(InvalidJobError, match=rf"{2 * MOST_SLICES} tasks, and the limit is {MOST_TASKS:,}"):
        gang_spec(slices=(1, MOST_SLICES))
    with pytest.raises(InvalidJobError, match="1001 spares"):
        gang_spec(spares=1001)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (list[int], [1] * (MOST_ITEMS + 1)),
        (list[list[int]], [[1] * (MOST_ITEMS // 10)] * 11),
        (dict[str, tuple[int, ...]], {str(number): (1,) * (MOST_ITEMS // 10) for number in range(11)}),
        (list[str], ["x" * MOST_CHARACTERS] * 10_000),
        (list[Words], ["x" * MOST_CHARACTERS] * 10_000),
    ],
    ids=["a list", "a list many times", "a dict of tuples", "long texts", "long words"],
)
def test_value_with_too_many_items_is_refused(kind: Any, given: Any) -> None:
    """Ten thousand references to one list of a million numbers travel in two megabytes."""
    with pytest.raises(InvalidMessageError, match=f"the thing.* more than {MOST_ITEMS:,} items"):
        plain(kind, given, "the thing")
    assert plain(list[int], [1] * MOST_ITEMS, "the next thing") == [1] * MOST_ITEMS


def test_constraint_on_too_many_values_is_refused() -> None:
    with pytest.raises(InvalidConstraintError, match="more than 1,000 values"):
        Constraint("rack", ConstraintOp.IN, range(MOST_VALUES + 1))
    assert Constraint("rack", ConstraintOp.IN, range(MOST_VALUES)).accepts(AttributeValue(7))
