"""When the attempts of a job held chips and ran."""

from dataclasses import dataclass, field

from iris_ray.goodput.marks import Marks


@dataclass(slots=True)
class AttemptTimes:
    """One attempt; times are seconds on the clock of the events.

    Attributes:
        number: counts the attempts of the job from 1.
        chips: how many it holds.
        assigned_at: when it got them.
        began_at: when user code began; None if it never did.
        ended_at: when its end was known; None before that.
        marks: what its task said about its time.
    """

    number: int
    chips: float
    assigned_at: float
    began_at: float | None = None
    ended_at: float | None = None
    marks: Marks = field(default_factory=Marks)


@dataclass(slots=True)
class JobTimes:
    """A job's times.

    Attributes:
        attempts: the latest ones, in order.
        settled: seconds and chip-seconds by the value of a `TimeKind`, of everything before `settled_until`.
        settled_until: until when everything is settled; None if nothing is.
        has_run: whether user code ran in a settled attempt.
        ended_at: when the job ended; None before that.
        succeeded: whether it has succeeded.
    """

    attempts: list[AttemptTimes] = field(default_factory=list)
    settled: dict[str, tuple[float, float]] = field(default_factory=dict)
    settled_until: float | None = None
    has_run: bool = False
    ended_at: float | None = None
    succeeded: bool = False

    def assigned(self, number: int, chips: float, now: float) -> None:
        """Note that an attempt got its chips."""
        self.attempts.append(AttemptTimes(number, chips, now))

    def began(self, now: float) -> None:
        """Note that user code of the latest attempt runs."""
        if self.attempts and self.attempts[-1].began_at is None:
            self.attempts[-1].began_at = now

    def ended(self, now: float) -> None:
        """Note that the latest attempt is over."""
        if self.attempts and self.attempts[-1].ended_at is None:
            self.attempts[-1].ended_at = now

    def marked(self, number: int, marks: Marks) -> None:
        """Note what a task of an attempt has said about its time, if it makes sense."""
        for attempt in self.attempts:
            if attempt.number == number and marks.makes_sense:
                attempt.marks = marks
