"""From what the user's function did, returned, raised or exited, to a `TaskEnd` that can travel to the driver."""

import errno
import traceback

from ray import cloudpickle

from iris_ray.actors.host.exits.program_exit import ProgramExit
from iris_ray.actors.wire.clocks import Moment
from iris_ray.actors.wire.payloads import Rebuilt
from iris_ray.errors import ResultNotPicklableError, ResultTooLargeError
from iris_ray.model.outcomes import EndKind, TaskEnd

MOST_RESULT_BYTES = 1 << 30
MOST_ERROR_BYTES = 1 << 20
"""A larger exception stays behind; its text travels."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
"""Numbers of errors that say that a disk is full, read-only or faulty."""


def returned(result: object) -> TaskEnd:
    """Return the end of a task whose function returned this. A result that can't travel makes it an error."""
    what = f"the function returned a {type(result).__name__}"
    try:
        payload = cloudpickle.dumps(result)
    except Exception as error:
        return raised(ResultNotPicklableError(f"{what} that can't be pickled: {error}"))
    if len(payload) > MOST_RESULT_BYTES:
        size, most = (f"{count / 2**20:,.0f} MiB" for count in (len(payload), MOST_RESULT_BYTES))
        return raised(ResultTooLargeError(f"{what} of {size}, and the limit is {most}; write it to files instead"))
    return TaskEnd(EndKind.RETURNED, Moment.now(), payload, exit_code=0)


def exited(stop: SystemExit) -> TaskEnd:
    """Return the end of a task whose function called ``sys.exit``. Without a code or with 0, it counts as a return."""
    if stop.code in (None, 0):
        return TaskEnd(EndKind.RETURNED, Moment.now(), cloudpickle.dumps(None), exit_code=0)
    code = stop.code if isinstance(stop.code, int) else 1  # as Python: anything else is printed, and the code is 1
    if isinstance(stop, ProgramExit):
        return TaskEnd(stop.kind, Moment.now(), error=stop.words, exit_code=code & 0xFF)
    error = f"the function called sys.exit({stop.code!r})"
    return TaskEnd(EndKind.EXITED, Moment.now(), error=error, exit_code=code & 0xFF)


def raised(error: BaseException) -> TaskEnd:
    """Return the end of a task whose function raised this."""
    ended_at = Moment.now()
    text = "".join(traceback.format_exception(error))
    summary = "".join(traceback.format_exception_only(error)).strip()
    payload = _pickled(error) if isinstance(error, Exception) else None
    return TaskEnd(_kind(error), ended_at, payload, summary, text, exit_code=1)


def _kind(error: BaseException) -> EndKind:
    if isinstance(error, MemoryError):
        return EndKind.OUT_OF_MEMORY
    return EndKind.DISK_ERROR if isinstance(error, OSError) and error.errno in DISK_ERRORS else EndKind.RAISED


def _pickled(error: Exception) -> bytes | None:
    """Return the exception, pickled in a way that was tried out here; None if no way works."""
    for travelling in (error, Rebuilt(error)):  # Rebuilt: for an __init__ that takes other arguments than it passes on
        try:
            payload: bytes = cloudpickle.dumps(travelling)
            cloudpickle.dumps(cloudpickle.loads(payload))  # as Ray does where it arrives
            return payload if len(payload) <= MOST_ERROR_BYTES else None
        except Exception:
            continue
    return None
