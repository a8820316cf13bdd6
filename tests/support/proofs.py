"""What `make test` leaves to `make proofs`."""

from typing import Any

import pytest
from _pytest.mark import ParameterSet


def in_proofs(*values: Any) -> list[ParameterSet]:
    """Values of a parametrized test that run in `make proofs` alone; one of several names is a tuple."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.proof) for v in values]
