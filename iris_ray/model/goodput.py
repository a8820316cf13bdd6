"""How a job spent its time: the kinds of time, the marks that its tasks set, and the measurement based on both."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from iris_ray.model.time_lost import Failure, FailureCause, TimeLost, move_s, reinit_s


class TimeKind(Enum):
    """Kinds of time. The first ten are defined and counted as in Google's ``ml-goodput-measurement``.

    PRODUCTIVE: steps whose results were kept.
    TPU_INITIALIZATION, TRAINING_PREP, DATA_LOADING_SYNC, UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME: time before the
        first step of an attempt, as marked by the task. Unmarked time counts as TRAINING_PREP.
    PROGRAM_STARTUP: the extra time of an attempt's first step compared to its other steps, that is, compilation.
    UNPRODUCTIVE_CHECKPOINT_SAVE_TIME: saves between steps, as marked by the task.
    WASTED_PROGRESS_FROM_DISRUPTION: steps that were repeated after a disruption.
    INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION: from the last step before a disruption until user code runs again.
    OTHER: the step in progress now, or when the job ended without success.

    Google does not define these:

    QUEUEING: until the job got its first slices.
    LAUNCH: until user code ran for the first time.
    UNMEASURED: user code ran without reporting steps by ``heartbeat(step)``.
    """

    PRODUCTIVE = "productive"
    TPU_INITIALIZATION = "tpu_initialization"
    TRAINING_PREP = "training_prep"
    PROGRAM_STARTUP = "program_startup"
    DATA_LOADING_SYNC = "data_loading_sync"
    UNPRODUCTIVE_CHECKPOINT_SAVE_TIME = "unproductive_checkpoint_save_time"
    UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME = "unproductive_checkpoint_restore_time"
    WASTED_PROGRESS_FROM_DISRUPTION = "wasted_progress_from_disruption"
    INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION = "infrastructure_recovery_from_disruption"
    OTHER = "other"
    QUEUEING = "queueing"
    LAUNCH = "launch"
    UNMEASURED = "unmeasured"


MARKS = {
    "tpu_init": TimeKind.TPU_INITIALIZATION,
    "training_prep": TimeKind.TRAINING_PREP,
    "data_loading": TimeKind.DATA_LOADING_SYNC,
    "checkpoint_restore": TimeKind.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME,
    "checkpoint_save": TimeKind.UNPRODUCTIVE_CHECKPOINT_SAVE_TIME,
}
"""The names that tasks use to mark parts of their time."""


# -- marks -------------------------------------------------------------------------------------------------------------

MOST_STEPS = 64
"""The number of steps remembered for an attempt: the first two, the latest, and some in between."""

StepTime = tuple[int, float]
"""A step, and its start in seconds since user code began."""


@dataclass(frozen=True, slots=True)
class Marks:
    """A task's account of its time in one attempt. Times are in seconds since its user code began.

    Attributes:
        steps: some steps and their starts, both ascending.
        before: seconds that it marked before its first step, by the names in `MARKS`.
        during: seconds that it marked after the start of its first step, by the names in `MARKS`.
    """

    steps: tuple[StepTime, ...] = ()
    before: Mapping[str, float] = field(default_factory=dict)
    during: Mapping[str, float] = field(default_factory=dict)

    @property
    def makes_sense(self) -> bool:
        """Whether the marks are consistent: steps and times ascend, and all names are known."""
        ascending = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(self.steps))
        return len(self.steps) <= MOST_STEPS and ascending and {*self.before, *self.during} <= MARKS.keys()

    def began(self, step: int) -> float:
        """Return the start of a step, interpolated if the step is not remembered. Requires at least one step."""
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
    """Return the steps with one more, which is ignored unless it follows the last one. Old steps are thinned out."""
    if steps and (step <= steps[-1][0] or began < steps[-1][1]):
        return steps
    if len(steps) >= MOST_STEPS:
        steps = (*steps[:2], *steps[3::2])
    return (*steps, (step, began))


# -- job times ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AttemptTimes:
    """The times of one attempt, in seconds on the clock of the events.

    Attributes:
        number: the attempt's number within the job, from 1.
        chips: the number of chips that it holds.
        assigned_at: when it got its chips.
        began_at: when user code began; None if it never did.
        ended_at: when its end became known; None before that.
        marks: its task's account of its time.
        cause: why it ended early; None if it did not.
    """

    number: int
    chips: float
    assigned_at: float
    began_at: float | None = None
    ended_at: float | None = None
    marks: Marks = field(default_factory=Marks)
    cause: FailureCause | None = None


@dataclass(slots=True)
class JobTimes:
    """When the attempts of a job held chips and ran.

    Attributes:
        attempts: the latest attempts, in order.
        settled: seconds and chip-seconds before `settled_until`, by the value of a `TimeKind`.
        settled_until: the end of the last settled attempt; None if no attempt is settled.
        has_run: whether user code ran in a settled attempt.
        ended_at: when the job ended; None before that.
        succeeded: whether the job has succeeded.
        settled_failures: the costs of the ends of settled attempts.
        back_s: the average time from new slices to the first step after a failure; None if unknown.
    """

    attempts: list[AttemptTimes] = field(default_factory=list)
    settled: dict[str, tuple[float, float]] = field(default_factory=dict)
    settled_until: float | None = None
    has_run: bool = False
    ended_at: float | None = None
    succeeded: bool = False
    settled_failures: dict[FailureCause, TimeLost] = field(default_factory=dict)
    back_s: float | None = None

    def assigned(self, number: int, chips: float, now: float) -> None:
        """Record that an attempt got its chips."""
        self.attempts.append(AttemptTimes(number, chips, now))

    def began(self, now: float) -> None:
        """Record that user code of the latest attempt has begun."""
        if self.attempts and self.attempts[-1].began_at is None:
            self.attempts[-1].began_at = now

    def failed(self, cause: FailureCause) -> None:
        """Record why the latest attempt ends early. Only the first cause is kept."""
        if self.attempts and self.attempts[-1].cause is None:
            self.attempts[-1].cause = cause

    def ended(self, now: float) -> None:
        """Record that the latest attempt has ended."""
        if self.attempts and self.attempts[-1].ended_at is None:
            self.attempts[-1].ended_at = now

    def marked(self, number: int, marks: Marks, now: float) -> None:
        """Record a task's account of an attempt's time, if it is consistent."""
        for attempt in self.attempts:
            if attempt.number == number and marks.makes_sense:
                attempt.marks = marks
                self.back_s = reinit_s(time_lost(self, now))


# -- measurement -------------------------------------------------------------------------------------------------------

_K = TimeKind
_RECOVERY = TimeKind.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION

ATTEMPTS_KEPT = 8
"""The largest number of attempts that are kept individually. Earlier ones are settled into sums."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a job's time.

    Attributes:
        kind: the kind of time.
        seconds: its length.
        chips: the number of chips that the job held during it.
    """

    kind: TimeKind
    seconds: float
    chips: float


def measure(times: JobTimes, submitted_at: float, now: float) -> list[Span]:
    """Split the time from a job's submission to its end, or to now, into spans.

    The kinds are counted as in Google's ``ml-goodput-measurement``.
    """
    spans = [
        Span(TimeKind(kind), seconds, chip_seconds / seconds if seconds else 0.0)
        for kind, (seconds, chip_seconds) in times.settled.items()
    ]
    until = submitted_at if times.settled_until is None else times.settled_until
    has_run = times.has_run
    for index, attempt in enumerate(times.attempts):
        spans += _attempt(times, index, until, has_run, now)
        until = _end(attempt, now)
        has_run = has_run or attempt.began_at is not None
    spans.append(Span(_recovery(has_run, _K.QUEUEING), max(0.0, _job_end(times, now) - until), 0.0))
    return [span for span in spans if span.seconds > 0]


def failures(times: JobTimes, now: float) -> list[Failure]:
    """Return the failures of the attempts that are kept, in order, with their costs until now.

    A failure is the end of an attempt in which user code ran and after which the job continued. In Google's terms, its
    costs are wasted progress, infrastructure recovery, and for each later attempt the time before its first step and
    its program startup.
    """
    return [_failure(times, index, now) for index in range(len(times.attempts)) if _has_failed(times, index)]


def time_lost(times: JobTimes, now: float) -> dict[FailureCause, TimeLost]:
    """Return the total cost of a job's completed failures, by cause."""
    found = dict(times.settled_failures)
    for failure in failures(times, now):
        if failure.is_over:
            _add(found, failure)
    return found


def planned_move_s(times: JobTimes, now: float) -> float | None:
    """Return the expected cost of moving a job to ready slices; None if it reports no steps or never failed."""
    return move_s(time_lost(times, now)) if _says_steps(times) else None


def _add(found: dict[FailureCause, TimeLost], failure: Failure) -> None:
    found[failure.cause] = found.get(failure.cause, TimeLost()).with_failure(failure)


def _has_failed(times: JobTimes, index: int) -> bool:
    """Return whether user code ran in an attempt after whose end the job continued."""
    attempt, is_last = times.attempts[index], index == len(times.attempts) - 1
    if attempt.began_at is None or attempt.ended_at is None:
        return False
    return not is_last or times.ended_at is None or attempt.ended_at < times.ended_at


def _failure(times: JobTimes, index: int, now: float) -> Failure:
    attempt = times.attempts[index]
    own = _parts(times, index, now)
    again_s, away_s = own.get(_K.WASTED_PROGRESS_FROM_DISRUPTION, 0.0), own.get(_RECOVERY, 0.0)
    start_s = waited_s = reinit_s = 0.0
    if not attempt.marks.steps:  # all its time is lost, or its progress is unknown
        again_s, away_s, start_s = 0.0, 0.0, sum(own.values()) if _says_steps(times) else 0.0
    chip_seconds = (again_s + away_s + start_s) * attempt.chips
    since, is_over = _end(attempt, now), times.ended_at is not None
    for later in range(index + 1, len(times.attempts)):
        following = times.attempts[later]
        waited_s += max(0.0, following.assigned_at - since)
        since = _end(following, now)
        launch_s = max(0.0, (since if following.began_at is None else following.began_at) - following.assigned_at)
        reinit_s, chip_seconds = reinit_s + launch_s, chip_seconds + launch_s * following.chips
        if following.began_at is not None:
            before_s, startup_s, is_over = _to_first_step(times, later, now)
            chip_seconds += (before_s + startup_s) * following.chips
            away_s, start_s, reinit_s = away_s + reinit_s, start_s + before_s + startup_s, reinit_s + before_s
            break
    else:
        away_s, waited_s = away_s + reinit_s, waited_s + max(0.0, _job_end(times, now) - since)
    cause, away_s = attempt.cause or FailureCause.LOST, away_s + waited_s
    return Failure(attempt.number, cause, again_s, away_s, start_s, waited_s, reinit_s, chip_seconds, is_over)


def _to_first_step(times: JobTimes, index: int, now: float) -> tuple[float, float, bool]:
    """Return an attempt's time until its first step, that step's extra time, and whether the step has ended.

    If the attempt failed before its first step, that time is a cost of its own failure, and 0 here.
    """
    attempt, run = times.attempts[index], _run(times, index, now)
    if attempt.marks.steps:
        first_at = min(attempt.marks.steps[0][1], run.seconds)
        is_over = len(attempt.marks.steps) > 1 or attempt.ended_at is not None
        return first_at, run.startup(attempt.marks), is_over
    if not _says_steps(times) or _has_failed(times, index):
        return 0.0, 0.0, True
    return run.seconds, 0.0, attempt.ended_at is not None


def settle(times: JobTimes, submitted_at: float) -> None:
    """Settle the earliest attempts: those without steps, those that a later one continued, and those beyond the limit.

    The latest attempt that ran is settled only beyond `ATTEMPTS_KEPT`, since the cost of its end is still unknown.
    """
    while len(times.attempts) > 1 and _can_settle(times):
        first = times.attempts[0]
        if _has_failed(times, 0):
            _add(times.settled_failures, _failure(times, 0, first.ended_at or first.assigned_at))
        until = submitted_at if times.settled_until is None else times.settled_until
        for span in _attempt(times, 0, until, times.has_run, first.ended_at or first.assigned_at):
            seconds, chip_seconds = times.settled.get(span.kind.value, (0.0, 0.0))
            times.settled[span.kind.value] = seconds + span.seconds, chip_seconds + span.seconds * span.chips
        times.settled_until = first.ended_at
        times.has_run = times.has_run or first.began_at is not None
        del times.attempts[0]


def _can_settle(times: JobTimes) -> bool:
    first, *later = times.attempts
    if first.ended_at is None:
        return False
    if len(times.attempts) > ATTEMPTS_KEPT:
        return True
    is_latest_that_ran = first.began_at is not None and all(one.began_at is None for one in later)
    return not is_latest_that_ran and (not first.marks.steps or any(one.marks.steps for one in later))


def _attempt(times: JobTimes, index: int, since: float, has_run: bool, now: float) -> Iterator[Span]:
    """Yield the spans from the end of the previous attempt to the end of this one."""
    attempt = times.attempts[index]
    yield Span(_recovery(has_run, _K.QUEUEING), max(0.0, attempt.assigned_at - since), 0.0)
    end = _end(attempt, now)
    began = end if attempt.began_at is None else attempt.began_at
    yield Span(_recovery(has_run, _K.LAUNCH), max(0.0, began - attempt.assigned_at), attempt.chips)
    for kind, seconds in _parts(times, index, now).items():
        yield Span(kind, seconds, attempt.chips)


def _parts(times: JobTimes, index: int, now: float) -> dict[TimeKind, float]:
    """Return the time in which an attempt's user code ran, by kind."""
    attempt, run = times.attempts[index], _run(times, index, now)
    return _with_steps(attempt.marks, run) if attempt.marks.steps else _without_steps(attempt.marks, run, times)


def _run(times: JobTimes, index: int, now: float) -> "_Run":
    attempt, end = times.attempts[index], _end(times.attempts[index], now)
    goes_on = attempt.ended_at is not None and times.ended_at is None
    is_last = index == len(times.attempts) - 1 and not goes_on
    resumed = next((later.marks.steps[0][0] for later in times.attempts[index + 1 :] if later.marks.steps), None)
    began = end if attempt.began_at is None else attempt.began_at
    return _Run(max(0.0, end - began), resumed, is_last, is_last and times.succeeded)


@dataclass(frozen=True, slots=True)
class _Run:
    """The part of an attempt in which user code ran.

    Attributes:
        seconds: how long user code ran.
        resumed: the first step of the next attempt that reported one; None if none did.
        is_last: whether it is the job's last attempt so far.
        succeeded: whether the job succeeded with this attempt.
    """

    seconds: float
    resumed: int | None
    is_last: bool
    succeeded: bool

    @property
    def unfinished(self) -> TimeKind:
        """The kind of the time after the last step."""
        return _K.OTHER if self.is_last else _RECOVERY

    def startup(self, marks: Marks) -> float:
        """Return the extra seconds of the first step compared to the average kept step. Requires at least one step."""
        steps = tuple((step, min(began, self.seconds)) for step, began in marks.steps)
        kept = steps[-1][0] if self.resumed is None else min(steps[-1][0], self.resumed)
        if len(steps) < 2 or kept <= steps[1][0]:
            return 0.0
        (first, first_at), (second, second_at) = steps[:2]
        average = (replace(marks, steps=steps).began(kept) - second_at) / (kept - second)
        return max(0.0, second_at - first_at - average * (second - first))


def _end(attempt: AttemptTimes, now: float) -> float:
    return now if attempt.ended_at is None else attempt.ended_at


def _job_end(times: JobTimes, now: float) -> float:
    return now if times.ended_at is None else times.ended_at


def _recovery(has_run: bool, else_kind: TimeKind) -> TimeKind:
    return _RECOVERY if has_run else else_kind


def _with_steps(marks: Marks, run: _Run) -> dict[TimeKind, float]:
    marks = replace(marks, steps=tuple((step, min(began, run.seconds)) for step, began in marks.steps))
    first_at, last_at = marks.steps[0][1], marks.steps[-1][1]
    kept_at = _kept_until(marks, run)
    parts, unmarked = _before_the_first_step(marks.before, first_at)
    startup = run.startup(marks)
    kept_s = max(0.0, kept_at - first_at - startup)
    saves = min(marks.during.get("checkpoint_save", 0.0), kept_s)
    return parts | {
        _K.TRAINING_PREP: parts.get(_K.TRAINING_PREP, 0.0) + unmarked,
        _K.PROGRAM_STARTUP: startup,
        _K.UNPRODUCTIVE_CHECKPOINT_SAVE_TIME: parts.get(_K.UNPRODUCTIVE_CHECKPOINT_SAVE_TIME, 0.0) + saves,
        _K.PRODUCTIVE: kept_s - saves,
        _K.WASTED_PROGRESS_FROM_DISRUPTION: max(0.0, last_at - kept_at),
        run.unfinished: run.seconds - max(kept_at, last_at),
    }


def _kept_until(marks: Marks, run: _Run) -> float:
    """Return the end of an attempt's kept steps, in seconds since user code began."""
    last, last_at = marks.steps[-1]
    if run.resumed is None:
        return run.seconds if run.succeeded else last_at
    if run.resumed <= last or len(marks.steps) < 2:
        return marks.began(run.resumed)
    before, before_at = marks.steps[-2]  # the last step was kept, and took about as long as the one before
    return min(run.seconds, last_at + (last_at - before_at) / (last - before))


def _before_the_first_step(before: Mapping[str, float], left_s: float) -> tuple[dict[TimeKind, float], float]:
    """Return the marked time before the first step, by kind, and the unmarked rest in seconds."""
    parts: dict[TimeKind, float] = {}
    for name, seconds in before.items():
        parts[MARKS[name]] = min(max(0.0, seconds), left_s)
        left_s -= parts[MARKS[name]]
    return parts, left_s


def _without_steps(marks: Marks, run: _Run, times: JobTimes) -> dict[TimeKind, float]:
    """Return the time of an attempt without steps, by kind."""
    parts, unmarked = _before_the_first_step(marks.before, run.seconds)
    kind = _K.UNMEASURED if not _says_steps(times) else _K.TRAINING_PREP if run.is_last else run.unfinished
    return parts | {kind: parts.get(kind, 0.0) + unmarked}


def _says_steps(times: JobTimes) -> bool:
    """Return whether any attempt of a job has reported a step."""
    return _K.PRODUCTIVE.value in times.settled or any(attempt.marks.steps for attempt in times.attempts)


# -- totals ------------------------------------------------------------------------------------------------------------

NOT_TRAINING = frozenset({TimeKind.QUEUEING.value, TimeKind.LAUNCH.value, TimeKind.UNMEASURED.value})
"""Kinds that don't count for goodput, which Google measures from the start of user code."""


@dataclass(slots=True)
class Totals:
    """The total time of some jobs, in seconds and in chip-seconds, by the value of its `TimeKind`."""

    seconds: dict[str, float] = field(default_factory=dict)
    chip_seconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(spans: Iterable[Span]) -> "Totals":
        """Return the totals of one job's spans."""
        totals = Totals()
        for span in spans:
            totals.add({span.kind.value: span.seconds}, {span.kind.value: span.seconds * span.chips})
        return totals

    def add(self, seconds: Mapping[str, float], chip_seconds: Mapping[str, float]) -> None:
        """Add the time of another job."""
        for totals, more in ((self.seconds, seconds), (self.chip_seconds, chip_seconds)):
            for kind, amount in more.items():
                totals[kind] = totals.get(kind, 0.0) + amount

    @property
    def goodput(self) -> float | None:
        """The productive share, from 0 to 1, of the time since user code began; None if no job measured its time."""
        return productive_share(self.seconds)

    @property
    def measured(self) -> float | None:
        """The share of user code's time that jobs measured; None if no user code ran."""
        ran = sum(amount for kind, amount in self.seconds.items() if kind not in ("queueing", "launch"))
        return 1.0 - self.seconds.get("unmeasured", 0.0) / ran if ran else None


def productive_share(amounts: Mapping[str, float]) -> float | None:
    """Return the productive share of seconds or chip-seconds; None if no job measured its time."""
    training = sum(amount for kind, amount in amounts.items() if kind not in NOT_TRAINING)
    return amounts.get(TimeKind.PRODUCTIVE.value, 0.0) / training if training else None


@dataclass(frozen=True, slots=True)
class ForgottenJob:
    """A job that is forgotten.

    Attributes:
        user: its user.
        ended_at: when it ended; by the clock of the events in the state, by the wall clock in sums.
        totals: its time by use.
        team: its team; empty for none.
    """

    user: str
    ended_at: float
    totals: Totals
    team: str = ""
