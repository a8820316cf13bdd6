"""Typed values and what constraints say of them."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.errors import InvalidConstraintError
from iris_ray.model.constraints import AttributeValue as V
from iris_ray.model.constraints import Constraint, ConstraintOp, Scalar

OP = ConstraintOp
ORDERINGS = [OP.GT, OP.GE, OP.LT, OP.LE]
SCALARS = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))


def holds(have: Scalar, op: ConstraintOp, asked: Scalar) -> bool:
    return Constraint("k", op, V(asked)).matches({"k": V(have)})


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (4, 4.0, True),
        (4, 5, False),
        ("4", 4, False),
        (True, 1, False),
        (False, 0, False),
        (1.0, True, False),
        ("True", True, False),
        (True, True, True),
        ("a", "a", True),
    ],
    ids=repr,
)
def test_attribute_value_equality_is_typed(left: Scalar, right: Scalar, equal: bool) -> None:
    assert (V(left) == V(right)) is equal
    assert holds(left, OP.EQ, right) is equal
    assert holds(left, OP.NE, right) is not equal


@given(SCALARS, SCALARS)
def test_attribute_value_equal_values_have_equal_hashes(left: Scalar, right: Scalar) -> None:
    if V(left) == V(right):
        assert hash(V(left)) == hash(V(right))


@pytest.mark.parametrize(
    ("have", "op", "asked", "expected"),
    [
        (8, OP.GT, 4, True),
        (4, OP.GT, 4, False),
        (4, OP.GE, 4, True),
        (4, OP.GE, 4.5, False),
        (3, OP.LT, 4, True),
        (4, OP.LT, 4, False),
        (4, OP.LE, 4.0, True),
        (5, OP.LE, 4, False),
        (math.inf, OP.GT, 10**30, True),
    ],
    ids=str,
)
def test_constraint_ordering_within_a_kind(have: Scalar, op: ConstraintOp, asked: Scalar, expected: bool) -> None:
    assert holds(have, op, asked) is expected


@pytest.mark.parametrize("op", ORDERINGS, ids=lambda op: op.name)
@pytest.mark.parametrize("have", ["4", "v4-128", True], ids=repr)
def test_constraint_ordering_other_values_than_numbers_is_an_error(have: Scalar, op: ConstraintOp) -> None:
    with pytest.raises(TypeError, match="order"):
        holds(have, op, 4)


@pytest.mark.parametrize("op", ORDERINGS, ids=lambda op: op.name)
@pytest.mark.parametrize("asked", ["v4-16", "4", "", True, False, V(True)], ids=repr)
def test_constraint_ordering_by_text_or_bool_is_refused(asked: Scalar | V, op: ConstraintOp) -> None:
    """As text, "v4-8" is more than "v4-16", and "v4-128" is less."""
    with pytest.raises(InvalidConstraintError, match=rf"tpu-topology {op.value} .*{op.name} orders numbers only"):
        Constraint("tpu-topology", op, asked)


@pytest.mark.parametrize("op", [op for op in OP if op not in (OP.EXISTS, OP.NOT_EXISTS)], ids=lambda op: op.name)
def test_constraint_missing_attribute_satisfies_no_comparison(op: ConstraintOp) -> None:
    assert not Constraint("k", op, [1, 2] if op is OP.IN else 1).matches({})


@pytest.mark.parametrize("value", [True, False, 0, "", "x"], ids=repr)
def test_constraint_existence_is_about_the_key_whatever_the_value(value: Scalar) -> None:
    """A taint is a boolean attribute; ``False`` and 0 are there too."""
    assert Constraint("k", OP.EXISTS).matches({"k": V(value)})
    assert not Constraint("k", OP.NOT_EXISTS).matches({"k": V(value)})
    assert not Constraint("k", OP.EXISTS).matches({"other": V(value)})
    assert Constraint("k", OP.NOT_EXISTS).matches({"other": V(value)})


@pytest.mark.parametrize("op", list(OP), ids=lambda op: op.name)
def test_constraint_with_wrong_number_of_values_is_refused(op: ConstraintOp) -> None:
    takes_none = op in (OP.EXISTS, OP.NOT_EXISTS)
    with pytest.raises(ValueError, match="'k'"):
        Constraint("k", op, V(1) if takes_none else None)


@pytest.mark.parametrize(
    ("have", "expected"),
    [(1, True), (1.0, True), ("a", True), ("1", False), (True, False), ("b", False), (2, False), ("", False)],
    ids=repr,
)
def test_constraint_in_is_any_of_its_values_typed(have: Scalar, expected: bool) -> None:
    assert Constraint("k", OP.IN, [1, "a", False]).matches({"k": V(have)}) is expected


def test_constraint_in_takes_any_collection_in_order() -> None:
    expected = Constraint("k", OP.IN, (V("b"), V("a")))
    collections: list[Iterable[Scalar | V]] = [
        ["b", "a"],
        ("b", "a"),
        (x for x in "ba"),
        [V("b"), "a"],
        {"b": 1, "a": 2},
    ]
    for values in collections:
        assert Constraint("k", OP.IN, values) == expected
    assert expected.value == (V("b"), V("a"))


@pytest.mark.parametrize("value", ["x", "", 4, 0, 1.5, True, False], ids=repr)
@pytest.mark.parametrize("op", [OP.EQ, OP.NE], ids=lambda op: op.name)
def test_constraint_plain_value_becomes_attribute_value(op: ConstraintOp, value: str | int | float) -> None:
    constraint = Constraint("k", op, value)
    assert constraint == Constraint("k", op, V(value))
    assert isinstance(constraint.value, V)
    assert constraint.matches({"k": V(value)}) is (op is OP.EQ)


def test_constraints_of_equal_parts_are_equal_and_hash_alike() -> None:
    assert len({Constraint("k", OP.GE, 4), Constraint("k", OP.GE, 4.0), Constraint("k", OP.GE, V(4))}) == 1
    assert Constraint("k", OP.EQ, True) != Constraint("k", OP.EQ, 1)
    assert Constraint("k", OP.IN, [1]) != Constraint("k", OP.EQ, 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("12", 12),
        ("-12", -12),
        ("1.50", 1.5),
        ("-0.5", -0.5),
        ("true", True),
        ("false", False),
        ("", ""),
        (" 12", " 12"),
        ("012", "012"),
        ("1.", "1."),
        (".5", ".5"),
        ("+1", "+1"),
        ("1e9", "1e9"),
        ("1_000", "1_000"),
        ("inf", "inf"),
        ("NaN", "NaN"),
        ("TRUE", "TRUE"),
        ("none", "none"),
        ("12\n", "12\n"),
    ],
    ids=repr,
)
def test_attribute_value_parsed_from_text_has_apparent_type(text: str, value: Scalar) -> None:
    parsed = V.parse(text)
    assert parsed == V(value)
    assert type(parsed.value) is type(value)


@given(st.text(max_size=20))
def test_attribute_value_parses_any_text(text: str) -> None:
    assert V.parse(text).value is not None


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint("k", OP.NE, "a"), "k != a"),
        (Constraint("k", OP.GT, 4), "k > 4"),
        (Constraint("k", OP.GE, 4.5), "k >= 4.5"),
        (Constraint("k", OP.LT, 4), "k < 4"),
        (Constraint("k", OP.LE, 4), "k <= 4"),
        (Constraint("k", OP.EQ, "4"), "k == '4'"),
        (Constraint("k", OP.EQ, "true"), "k == 'true'"),
        (Constraint("k", OP.IN, ["a", "b"]), "k in (a, b)"),
        (Constraint("k", OP.IN, ["a"]), "k in (a)"),
        (Constraint("k", OP.IN, [4, "4"]), "k in (4, '4')"),
        (Constraint("k", OP.EXISTS), "k exists"),
    ],
    ids=str,
)
def test_constraint_of_every_operator_reads_back(constraint: Constraint, text: str) -> None:
    assert str(constraint) == text


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ("zone=us-a", Constraint("zone", OP.EQ, "us-a")),
        ("zone == us-a", Constraint("zone", OP.EQ, "us-a")),
        (" zone != us a ", Constraint("zone", OP.NE, "us a")),
        ("gen>=4", Constraint("gen", OP.GE, 4)),
        ("gen < 4.5", Constraint("gen", OP.LT, 4.5)),
        ("spot=true", Constraint("spot", OP.EQ, True)),
        ("zone in (us-a, us-b)", Constraint("zone", OP.IN, ["us-a", "us-b"])),
        ("ray.io/tpu-topology", Constraint("ray.io/tpu-topology", OP.EXISTS)),
        ("! taint:hot", Constraint("taint:hot", OP.NOT_EXISTS)),
    ],
)
def test_constraint_is_read_as_people_write_it(text: str, constraint: Constraint) -> None:
    assert Constraint.parse(text) == constraint


@pytest.mark.parametrize(
    "text", ["", "=4", "zone=", "zone in us-a", "zone in ()", "a b", "zone => 4", "(zone)", "!a=4"]
)
def test_text_that_is_no_constraint_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidConstraintError, match=r"zone"):
        Constraint.parse(text)


@pytest.mark.parametrize(("op", "value"), [(OP.GT, math.inf), (OP.LT, -math.inf)])
def test_unsatisfiable_ordering_is_refused(op: ConstraintOp, value: Scalar) -> None:
    with pytest.raises(InvalidConstraintError, match="nothing is"):
        Constraint("k", op, value)
