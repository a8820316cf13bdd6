"""From what is known about a task process that has ended without a report to the way in which its task ended."""

from dataclasses import dataclass
from signal import SIGKILL

from iris_ray.actors.host.exits.status import as_shells_say, in_words
from iris_ray.model.outcomes import EndKind, TaskEnd


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """What is known about a task process that has ended.

    Attributes:
        at: seconds since the epoch.
        had_started: whether user code had begun to run in it.
        memory_was_short: whether the kernel killed any process of this host for lack of memory in the minute before.
        code: its exit code, or the negative number of the signal that killed it; None if the kernel can't tell.
        stopped_for: why iris_ray ended it, or None if it ended by itself.
    """

    at: float
    had_started: bool
    memory_was_short: bool
    code: int | None
    stopped_for: str | None


def diagnose(found: ProcessExit) -> TaskEnd:
    """Return how the task ended. That iris_ray stopped it comes first, then that it never began."""
    if found.stopped_for is not None:
        return TaskEnd(EndKind.STOPPED, found.at, error=found.stopped_for)
    how = "ended without a word" if found.code is None else in_words(found.code)
    exit_code = as_shells_say(found.code)
    if not found.had_started:
        return TaskEnd(EndKind.NEVER_STARTED, found.at, error=f"the waiting task process {how}", exit_code=exit_code)
    if found.memory_was_short and found.code in (None, -SIGKILL):
        reason = "the task process was killed by the kernel, because the host's memory was used up"
        return TaskEnd(EndKind.OUT_OF_MEMORY, found.at, error=reason, exit_code=exit_code)
    return TaskEnd(EndKind.CRASHED, found.at, error=f"the task process {how}", exit_code=exit_code)
