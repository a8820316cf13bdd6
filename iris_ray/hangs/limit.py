"""After how long without a heartbeat a gang counts as hung: learned from its own steps, unless its user has set it.

A process measures its `Rhythm` where it calls ``heartbeat``; the gang's `StallLimit` learns from all rhythms.
"""

from collections.abc import Iterable

from iris_ray.model.rhythm import ENOUGH_STEPS, Rhythm

FLOOR_S = 600.0
"""The shortest learned limit. So a gang may pause for ten minutes without declaring it."""
FACTOR = 10.0
"""The ratio of a learned limit to the longest step."""


class StallLimit:
    """Says how long a gang may be without a heartbeat. It outlives attempts, and learns in each of them.

    Nothing is learned of a job that calls ``heartbeat`` less than `ENOUGH_STEPS` times, or never. The first steps of
    an attempt, in which it compiles, have no learned limit. A declared pause has none until one of its kind is over.

    Args:
        set_s: the option ``stall_timeout``: seconds; 0: there is no limit; None: it is learned.
        learns: whether it may learn. A job that must not lose an attempt is better off without.
    """

    def __init__(self, set_s: float | None, learns: bool = True) -> None:
        self.set_s = set_s or None
        self._learns = learns and set_s is None
        self._has_learned = False
        self._is_warm = False  # in this attempt
        self._longest = 0.0
        self._pauses: dict[str, float] = {}
        self._alarm: tuple[int | None, float] | None = None  # at which step, and the silence then

    def attempt_begins(self) -> None:
        """Note that the gang starts again: it compiles once more."""
        self._is_warm = False

    def note(self, rhythms: Iterable[Rhythm]) -> None:
        """Learn from the rhythms of the gang's processes."""
        for rhythm in rhythms:
            self._is_warm |= rhythm.steps > 0
            self._has_learned |= rhythm.steps >= ENOUGH_STEPS
            self._longest = max(self._longest, rhythm.longest_s)
            for what, seconds in rhythm.pauses.items():
                self._pauses[what] = max(self._pauses.get(what, 0.0), seconds)

    def seconds(self, pauses: Iterable[str] = (), step: int | None = None) -> float | None:
        """Return how long the gang may be silent now; None: for ever.

        Args:
            pauses: the declared pauses in which its processes are.
            step: the furthest step.
        """
        if not self._learns:
            return self.set_s
        pauses = set(pauses)
        if not (self._has_learned and self._is_warm) or not pauses <= self._pauses.keys():
            return None
        longest = max(self._longest, *(self._pauses[what] for what in pauses), 0.0)
        if self._alarm is not None and self._alarm[0] == step:  # the silence there may be intended
            longest = max(longest, self._alarm[1])
        return max(FLOOR_S, FACTOR * longest)

    def alarmed(self, step: int | None, silence_s: float) -> None:
        """Note that the gang was ended for its silence at a step.

        If it is silent again at this step, its program may pause there on purpose, for an evaluation that it does not
        declare, for example. So the limit at this step becomes `FACTOR` times the silence.
        """
        self._alarm = step, silence_s

    @property
    def is_learned(self) -> bool:
        """Whether the limit follows from the gang's steps."""
        return self._learns

    def in_words(self, pauses: Iterable[str] = (), step: int | None = None) -> str | None:
        """Return the limit and where it comes from; None if there is none now."""
        limit = self.seconds(pauses, step)
        if limit is None:
            return None
        if not self._learns:
            return f"{limit:g} s (stall_timeout)"
        return (
            f"{limit:.0f} s (learned: {FACTOR:g} times the longest step or pause, {limit / FACTOR:.3g} s)"
            if limit > FLOOR_S
            else f"{limit:.0f} s (learned: the longest step took {self._longest:.3g} s)"
        )
