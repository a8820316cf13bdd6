"""Random events in random order, late and doubled, with the real scheduler in the loop: see `state_machine`.

`make test` tries some sequences, `make proofs` many more, in parts so that all processes have some.
"""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.proofs.state_machine.machine import RandomEvents
from tests.support.proofs import EXAMPLES, in_proofs, in_test


@pytest.mark.timeout(900 * EXAMPLES)
@pytest.mark.parametrize(
    ("part", "sequences"), [*in_test(("some", 60)), *in_proofs(*((f"part {n}", 200) for n in range(4)))]
)
def test_random_events_break_no_invariant(part: str, sequences: int) -> None:
    machine = type(f"RandomEvents of {part}", (RandomEvents,), {})  # fixed seeds come from the name
    run_state_machine_as_test(machine, settings=settings(max_examples=sequences * EXAMPLES, stateful_step_count=25))
