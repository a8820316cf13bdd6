"""What `make test` leaves to `make proofs`, and how much that is."""

import os
import random
from typing import Any

import pytest
from _pytest.mark import ParameterSet

LONGER = "IRIS_TEST_EXAMPLES" in os.environ
"""Whether to try new random examples each time. If not, they are always the same: a failure is due to a change."""
EXAMPLES = int(os.environ.get("IRIS_TEST_EXAMPLES", "1"))
"""How many times as many to try, and for how many minutes to go on with chaos."""


def a_seed(usual: int) -> int:
    """Return the seed of what is random in a test."""
    return random.randrange(10**6) if LONGER else usual


def in_proofs(*values: Any) -> list[ParameterSet]:
    """Values of a parametrized test that run in `make proofs` alone; one of several names is a tuple."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.proof) for v in values]
