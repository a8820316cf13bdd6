"""Slice counts that a job can use, and the MEGASCALE variables of a gang."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.errors import InvalidRequestError, InvalidSliceCountError
from iris_ray.model.multislice import MultisliceInfo, parse_num_slices


class IntLike:
    """An integer that is no int, as NumPy's are."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


class ClaimsToBeInt:
    """Has ``__index__`` and refuses to be one, as an array of several numbers does."""

    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")

    def __int__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("given_numbers", "numbers"),
    [
        (1, (1,)),
        (2, (2,)),
        ([2, 4], (2, 4)),
        ([4, 2], (2, 4)),
        ((3, 1), (1, 3)),  # a predecessor refused tuples
        (range(1, 4), (1, 2, 3)),
        (array("i", [2, 1]), (1, 2)),
        (IntLike(3), (3,)),
        ([IntLike(3), 1], (1, 3)),
    ],
)
def test_num_slices_may_be_int_or_any_sequence_and_is_sorted(given_numbers: Any, numbers: tuple[int, ...]) -> None:
    assert parse_num_slices(given_numbers) == numbers
    assert all(type(number) is int for number in parse_num_slices(given_numbers))


@pytest.mark.parametrize(
    "bad",
    [
        *(0, -1, True, False, None, 1.0, 2.5, "2", "", b"2", bytearray(b"2")),
        *([], (), [0], [2, -1], [True], [1, True], [2, 2], [1, 2, 1], ["2"], [1.0], [None], [[1]]),
        *({1, 2}, {1: 2}, iter([1, 2]), range(0), object(), int, ClaimsToBeInt(), [int], [IntLike(2), 2]),
    ],
    ids=lambda bad: repr(bad).partition(" at 0x")[0],
)
def test_invalid_num_slices_raises_typed_error(bad: Any) -> None:
    """``True`` as a count and tuples refused were a predecessor's slips (defect 6)."""
    with pytest.raises(InvalidSliceCountError) as refused:
        parse_num_slices(bad)
    assert isinstance(refused.value, (InvalidRequestError, ValueError))
    assert "num_slices" in str(refused.value)


@given(st.lists(st.integers(1, 1000), min_size=1, unique=True))
def test_num_slices_come_back_ascending(numbers: list[int]) -> None:
    assert parse_num_slices(numbers) == tuple(sorted(numbers))


def test_to_env_single_slice_has_no_megascale_variable() -> None:
    """MEGASCALE_NUM_SLICES=1 alone switches megascale on (defect 12)."""
    assert MultisliceInfo("10.0.0.1", 0, 1, 20_000, 20_001).to_env() == {}


def test_to_env_several_slices_names_coordinator_and_debug_ports() -> None:
    assert MultisliceInfo("10.0.0.1", 2, 4, 20_000, 20_007).to_env() == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1:20000",
        "MEGASCALE_NUM_SLICES": "4",
        "MEGASCALE_SLICE_ID": "2",
        "MEGASCALE_PORT": "20000",
        "MEGASCALE_DEBUG_PORT": "20007",
    }


@pytest.mark.parametrize("port", [8080, 8081, 8082, 20_000, 65_534])
def test_to_env_default_debug_port_differs_from_port(port: int) -> None:
    env = MultisliceInfo("10.0.0.1", 0, 2, port).to_env()
    assert env["MEGASCALE_PORT"] != env["MEGASCALE_DEBUG_PORT"]
    assert 0 < int(env["MEGASCALE_DEBUG_PORT"]) < 65_536
