"""What counts as a number, a time or a name, and how a value that is none is refused."""

import enum
import math
import random
import time
from typing import Any

import numpy as np
import pytest

from iris_ray.errors import InvalidRequestError, InvalidSlotError, UnknownNameError
from iris_ray.model import checks
from iris_ray.model.checks import (
    FLAG,
    MOST_COMPARED,
    NAME,
    VARIABLES,
    Check,
    Holds,
    ListOf,
    Number,
    OneOf,
    Seconds,
    Whole,
    as_user,
    is_job_id,
    is_user,
    nearest,
    part_of_id,
    require,
    shown,
    unknown,
)
from iris_ray.model.options import PriorityBand

HUGE = 10**400


class Count(enum.IntEnum):
    FOUR = 4


TAKEN: dict[str, list[Any]] = {
    "is_whole": [0, -1, HUGE, np.int64(4), Count.FOUR],
    "is_real": [0, -0.5, HUGE, math.nan, math.inf, np.float32(1), np.int8(1)],
    "is_int": [0, -1, HUGE, Count.FOUR],
    "is_number": [0, -0.5, np.float64(1), 1e300],
    "is_timeout": [0, -1, 0.5, math.inf, -math.inf, np.float32(1)],
    "is_name": ["a"],
    "is_texts": [[], ("a",), ["a", "b"]],
    "is_variables": [{}, {"A": "b"}],
}
REFUSED: dict[str, list[Any]] = {
    "is_whole": [True, 1.0, "1", None],
    "is_real": [True, "1", None, 1j],
    "is_int": [False, 1.0, np.int64(4), "1"],
    "is_number": [True, HUGE, -HUGE, math.nan, math.inf, -math.inf, "1", None],
    "is_timeout": [math.nan, HUGE, True, "1", None],
    "is_name": ["", b"a", None],
    "is_texts": ["ab", [1], None, {"a"}],
    "is_variables": [[("A", "b")], {"A": 1}, {1: "b"}, None],
}


@pytest.mark.parametrize("predicate", sorted(TAKEN))
def test_predicate_accepts_exactly_what_it_names(predicate: str) -> None:
    holds = getattr(checks, predicate)
    assert [value for value in TAKEN[predicate] if not holds(value)] == []
    assert [value for value in REFUSED[predicate] if holds(value)] == []


CHECKS: list[tuple[Check, list[Any], list[Any]]] = [
    (Whole(), [0, 1, HUGE, Count.FOUR], [-1, True, 1.0, None, np.int64(4)]),
    (Whole(1, 8, or_none=True), [1, 8, None], [0, 9, True]),
    (Whole(exactly=True), [0, HUGE], [True, Count.FOUR, np.int64(4), 1.0, -1]),
    (Number(), [0, 0.5, 1e300, np.float64(1)], [-0.1, True, HUGE, math.nan, math.inf, "1", None]),
    (Number(most=2), [0, 2], [2.5, -1, math.inf]),
    (Seconds(above=True), [0.5, 1], [0, 0.0, True, math.inf]),
    (Seconds(endless=True), [0, 0.5, math.inf], [-1, -math.inf, HUGE, math.nan, True, None]),
    (Seconds(auto=True, or_none=True), [0, "auto", None], ["car", -1]),
    (Seconds(None), [-1, 1], [math.inf, "auto"]),
    (OneOf((1, 2)), [1, 2], [True, 3, "1", 1.0, None]),
    (OneOf(("a", "b")), ["a"], ["c", b"a", None]),
    (OneOf(tuple(PriorityBand)), [PriorityBand.BATCH], [2, "BATCH", None]),
    (ListOf(str, "names"), [[], ("a",)], ["a", [1], None]),
    (FLAG, [True, False], [0, 1, None]),
    (NAME, ["a"], ["", None]),
]


@pytest.mark.parametrize(("check", "taken", "refused"), CHECKS)
def test_check_accepts_exactly_what_it_wants(check: Check, taken: list[Any], refused: list[Any]) -> None:
    assert [value for value in taken if check.problem(value)] == []
    assert [value for value in refused if check.problem(value) != f"is {shown(value)}; give {check.wanted}"] in (
        [],
        [[1]],  # the message names the item
    )


def test_refusal_names_value_and_advice_in_callers_error() -> None:
    with pytest.raises(InvalidRequestError, match=r"^spares is -1; give an int of 0 or more$"):
        require("spares", -1, Whole())
    with pytest.raises(InvalidSlotError, match=r"^kind is 'cpu'; give a DeviceKind, or None$"):
        require("kind", "cpu", Holds(Count, "a DeviceKind", or_none=True), InvalidSlotError)
    assert OneOf(tuple(PriorityBand)).wanted.startswith("one of PriorityBand.SYSTEM, PriorityBand.PRODUCTION, ")
    assert OneOf((1, 2), or_none=True).wanted == "one of 1, 2, or None"


def test_refusal_of_variables_hides_their_values() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        require("env", {"TOKEN": b"secret"}, VARIABLES)
    assert "secret" not in str(refused.value)


def test_value_in_message_is_short_and_storable() -> None:
    assert shown("job\udc80") == "'job\\udc80'"
    assert len(shown(HUGE)) == checks.MOST_SHOWN + 1


def test_nearest_names_come_first_among_many() -> None:
    many = [f"job-{number:05}" for number in range(20 * MOST_COMPARED)]
    assert "job-00123" in nearest("job-00123x", many)
    assert nearest("nothing", ["v4-8"]) == []
    assert isinstance(unknown("job", "job-0012", many), UnknownNameError)


def test_long_names_of_same_letters_are_compared_in_bounded_time() -> None:
    made = random.Random(1)
    known = ["a" + "".join(made.sample("abcd" * 250, 1000)) + "-x" for _ in range(MOST_COMPARED)]
    began = time.process_time()
    said = str(unknown("job", "".join(made.sample("abcd" * 250, 1000)) + "b" * 1_000_000, known))
    assert time.process_time() - began < 1.0, "without a bound it takes minutes"
    assert said.startswith("there is no job '")
    assert len(said) < 4_000


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train.py", "train.py"),
        ("my run", "my-run"),
        ("$(rm -rf ~)", "rm--rf"),
        ("../..", "job"),
        ("größe", "gr-e"),
        ("a/b", "a-b"),
    ],
)
def test_any_name_makes_a_part_of_a_job_id(text: str, part: str) -> None:
    assert part_of_id(text) == part
    assert is_job_id(part_of_id(text))


@pytest.mark.parametrize(
    ("text", "user"),
    [("ann@example.com", "ann@example.com"), ("CORP\\ann", "CORP-ann"), ("=1", "1"), ("$$", "unnamed")],
)
def test_any_account_makes_a_user(text: str, user: str) -> None:
    assert as_user(text) == user
    assert is_user(as_user(text))
