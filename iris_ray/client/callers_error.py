"""What a caller of a job gets to see of an error that Ray brings."""

from ray.exceptions import RayTaskError

from iris_ray.errors import IrisError, RemoteUserError


def callers_error(error: BaseException) -> BaseException:
    """Return the error of ours that Ray's error carries: its message says it all. Any other error as it is."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, IrisError) and not isinstance(cause, RemoteUserError) else error
