"""Random events in random order, late and doubled, with the real scheduler in the loop: see `state_machine`.

`make test` tries some sequences of its own each time, `make proofs` many more.
``IRIS_TEST_EXAMPLES=20 pytest tests/proofs/test_state_random.py`` tries twenty times as many sequences.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.proofs.state_machine.machine import RandomEvents

EXAMPLES = int(os.environ.get("IRIS_TEST_EXAMPLES", "1"))


class TestRandomEvents(RandomEvents.TestCase):  # type: ignore[misc, valid-type]
    """Some dozens of sequences."""

    settings = settings(
        max_examples=80 * EXAMPLES,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.mark.proof
@pytest.mark.timeout(900 * EXAMPLES)
class TestRandomEventsThoroughly(RandomEvents.TestCase):  # type: ignore[misc, valid-type]
    """Thousands of sequences."""

    settings = settings(TestRandomEvents.settings, max_examples=1670 * EXAMPLES)
