"""After how long without a heartbeat a gang counts as hung: learned from its own steps, unless its user has set it.

A process measures its `Rhythm` where it calls ``heartbeat``; the gang's `StallLimit` learns from those of all tasks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FLOOR_S = 600.0
"""The shortest learned limit. So a gang may pause for ten minutes without declaring it."""
FACTOR = 10.0
"""The ratio of a learned limit to the longest step."""
ENOUGH_STEPS = 10
"""The number of steps of one process after which a limit is learned."""
FIRST_STEPS = 2
"""The number of steps at the start of an attempt that are not measured, because programs compile in them."""
WORTH_TELLING = 1.1
"""The factor by which the longest step must grow before it is reported again."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How regularly a process has called ``heartbeat`` in this attempt.

    Attributes:
        steps: how many steps it has measured, as far as it has told; a step is the time between two heartbeats.
        longest_s: the longest of them, without declared pauses; seconds.
        pause: the declared pause that it is in, or None.
        pauses: the longest pause of each kind that is over; seconds.
    """

    steps: int = 0
    longest_s: float = 0.0
    pause: str | None = None
    pauses: Mapping[str, float] = field(default_factory=dict)


class RhythmMeter:
    """Measures the `Rhythm` of one process. Times are seconds on any clock that never stands still."""

    def __init__(self) -> None:
        self.told = Rhythm()
        self._beats = 0
        self._beat_at = 0.0
        self._longest = 0.0
        self._open: list[str] = []  # pauses that are not over; several threads may be in one
        self._paused_at = 0.0
        self._paused_s = 0.0  # since the last beat
        self._pauses: dict[str, float] = {}

    def beat(self, now: float) -> bool:
        """Note a heartbeat. Return whether there is something new to tell."""
        self._note_pause(now)
        if self._beats > FIRST_STEPS:
            self._longest = max(self._longest, now - self._beat_at - self._paused_s)
        self._beats += 1
        self._beat_at, self._paused_s = now, 0.0
        grew = self._longest > WORTH_TELLING * self.told.longest_s
        if self._steps in (1, ENOUGH_STEPS) or (grew and self._steps > 0):
            self._tell()
            return True
        return False

    def pause_begins(self, what: str, now: float) -> None:
        """Note that a thread begins a declared pause."""
        self._note_pause(now)
        self._open.append(what)
        self._tell()

    def pause_ends(self, what: str, seconds: float, now: float) -> None:
        """Note that a thread ends a declared pause, which took so many seconds."""
        self._note_pause(now)
        self._open.remove(what)
        self._pauses[what] = max(self._pauses.get(what, 0.0), seconds)
        self._tell()

    @property
    def _steps(self) -> int:
        return max(0, self._beats - 1 - FIRST_STEPS)

    def _note_pause(self, now: float) -> None:
        if self._open:
            self._paused_s += now - self._paused_at
        self._paused_at = now

    def _tell(self) -> None:
        pause = self._open[0] if self._open else None
        self.told = Rhythm(self._steps, self._longest, pause, dict(self._pauses))


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

        If it comes to the same step again and is silent there once more, that may be what its program does, such as an
        evaluation that it does not declare. So it has `FACTOR` times as long there.
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
