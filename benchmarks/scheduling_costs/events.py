"""One event, from its arrival to the committed assignment that follows."""

import gc
import statistics
import time
from itertools import pairwise

from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.state.events import AttemptEndConfirmedEvent, TaskStateChangedEvent
from scheduling_costs.cycles import cycle
from scheduling_costs.worlds import SLICE, full, gang, submit


def print_event(rounds: int) -> None:
    """A slice is freed while one gang waits at 10,000 full hosts."""
    gc.collect()
    state = full(10_000)
    parts: list[tuple[float, ...]] = []
    for number in range(rounds):
        submit(state, [gang(number, f"waits-{number}")])
        ending = f"full-{7 * number}"
        for i in range(SLICE):
            state.handle_event(TaskStateChangedEvent(AttemptId(ending, 1), i, TaskState.SUCCEEDED))
        cycle(state)
        times = [time.process_time()]
        state.handle_event(AttemptEndConfirmedEvent(AttemptId(ending, 1)))
        times.append(time.process_time())
        result = cycle(state)
        times.append(time.process_time())
        for assignment in result.assignments:
            state.handle_event(assignment)
        times.append(time.process_time())
        assert len(result.assignments) == 1
        parts.append(tuple(1000 * (after - before) for before, after in pairwise(times)))
    total = statistics.median(map(sum, parts))
    event, scheduling, commit = map(statistics.median, zip(*parts, strict=True))
    print(
        f"\nOne event (a slice freed, one gang waiting, 10,000 full hosts) to its committed assignment: {total:.2f} ms"
        f" (event {event:.2f}, cycle {scheduling:.2f}, commit {commit:.2f})."
    )
