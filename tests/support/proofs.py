"""What `make test` leaves to `make proofs`, and how much that is."""

import os
import random
from typing import Any

import pytest
from _pytest.mark import ParameterSet

EXAMPLES = float(os.environ.get("IRIS_TEST_EXAMPLES", "1"))
"""How many times as many random examples to try, and for how many minutes to go on with chaos. CI tries a part."""
LONGER = "IRIS_TEST_EXAMPLES" in os.environ and EXAMPLES >= 1
"""Whether to try new random examples each time. If not, they are always the same: a failure is due to a change."""


def examples(usual: int) -> int:
    """Return how many to try of what is tried so often if nobody says otherwise."""
    return max(1, round(usual * EXAMPLES))


def a_seed(usual: int) -> int:
    """Return the seed of what is random in a test."""
    return random.randrange(10**6) if LONGER else usual


def in_test(*values: Any) -> list[ParameterSet]:
    """Values of a parametrized proof that run in `make test` alone: in `make proofs` there are larger ones."""
    return _marked(pytest.mark.small, values)


def in_proofs(*values: Any) -> list[ParameterSet]:
    """Values of a parametrized test that run in `make proofs` alone; one of several names is a tuple."""
    return _marked(pytest.mark.proof, values)


def in_long(*values: Any) -> list[ParameterSet]:
    """Values that run in `make proofs-long` alone."""
    return _marked(pytest.mark.long, values)


def _marked(mark: pytest.MarkDecorator, values: tuple[Any, ...]) -> list[ParameterSet]:
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=mark) for v in values]
