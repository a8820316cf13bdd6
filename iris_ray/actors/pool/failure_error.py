"""What a caller gets if a job has failed by itself."""

from ray import cloudpickle
from ray.exceptions import RayTaskError

from iris_ray.actors.wire.payloads import PickledError
from iris_ray.errors import RemoteUserError, TaskCrashedError, TaskOutOfMemoryError
from iris_ray.model.outcomes import RunErrorKind, TpuResult, TpuRunError


def failure_error(name: str, who: str, why: str, result: TpuResult) -> Exception:
    """Return the error to raise.

    Args:
        name: what people call the job.
        who: its id, or its task's.
        why: which task was the first cause, and how it ended.
        result: that task's outcome.
    """
    if isinstance(result, TpuRunError) and result.traceback:
        payload = result.exception or cloudpickle.dumps(RemoteUserError(result.error))
        where = f"{why}\n{result.traceback}"  # which task it was, then its own traceback
        error: Exception = RayTaskError(name, where, PickledError(payload))
        return error
    no_memory = isinstance(result, TpuRunError) and result.kind is RunErrorKind.OUT_OF_MEMORY
    return (TaskOutOfMemoryError if no_memory else TaskCrashedError)(f"job {who} failed: {why}")
