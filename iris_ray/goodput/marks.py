"""What a task has said about the time of one attempt. Times are seconds since its user code began."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from iris_ray.goodput.kinds import MARKS

MOST_STEPS = 64
"""Steps of an attempt that are remembered: the first two, the latest, and some in between."""

StepTime = tuple[int, float]
"""A step, and when it began; seconds since user code began."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What the task said.

    Attributes:
        steps: some steps and when each began, in ascending order of both.
        before: seconds by the names of `MARKS` that it marked before its first step.
        during: the same, since then.
    """

    steps: tuple[StepTime, ...] = ()
    before: Mapping[str, float] = field(default_factory=dict)
    during: Mapping[str, float] = field(default_factory=dict)

    @property
    def makes_sense(self) -> bool:
        """Whether it can be what a task has said."""
        ascending = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.steps))
        return len(self.steps) <= MOST_STEPS and ascending and {*self.before, *self.during} <= MARKS.keys()

    def began(self, step: int) -> float:
        """Return when a step began; if it is not remembered, by its neighbours. There must be a step."""
        earlier = self.steps[0]
        for later in self.steps:
            if later[0] >= step:
                break
            earlier = later
        else:
            return later[1]
        if later[0] == earlier[0] or step <= earlier[0]:
            return later[1]
        share = (step - earlier[0]) / (later[0] - earlier[0])
        return earlier[1] + share * (later[1] - earlier[1])


def with_step(steps: tuple[StepTime, ...], step: int, began: float) -> tuple[StepTime, ...]:
    """Return remembered steps with one more. A step that is not later than the last one changes nothing."""
    if steps and (step <= steps[-1][0] or began < steps[-1][1]):
        return steps
    if len(steps) >= MOST_STEPS:
        steps = (*steps[:2], *steps[3::2])
    return (*steps, (step, began))
