"""One event on its way through the state."""

from dataclasses import dataclass, field

from iris_ray.state.instructions import Instructions


@dataclass(frozen=True, slots=True)
class Change:
    """What the parts of the state share while they handle one event.

    Attributes:
        now: seconds on the clock of the events.
        instructions: what is to be done outside because of the event; parts add to it.
    """

    now: float
    instructions: Instructions = field(default_factory=Instructions)
