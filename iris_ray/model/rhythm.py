"""How regularly a process calls ``heartbeat``: measured in the process and told to its host."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ENOUGH_STEPS = 10
"""The number of steps of one process after which its rhythm is known."""
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
        """Note that a thread ends a declared pause of this length; seconds."""
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
