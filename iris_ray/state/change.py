"""What the parts of the state share while they handle one event."""

from dataclasses import dataclass, field

from iris_ray.state.instructions import Instructions


@dataclass(slots=True)  # frozen, it would take longer to make, for every event
class Change:
    """One event being handled.

    Attributes:
        now: seconds on the clock of the events.
        instructions: what the event requires outside; the parts add to it.
    """

    now: float
    instructions: Instructions = field(default_factory=Instructions)
