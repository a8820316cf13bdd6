"""What validate checks beyond what every request is checked for, and the plan that it prints."""

import importlib.util
from collections.abc import Iterator

from iris_ray.actors.wire.messages import RunRequest
from iris_ray.actors.wire.payloads import INLINE_BYTES, load
from iris_ray.errors import InvalidFunctionError, InvalidRequestError
from iris_ray.model.topology import get_tpu_config


def require_runnable(request: RunRequest) -> None:
    """Check what can be checked on this machine.

    Raises:
        InvalidFunctionError: the function can't be unpickled.
        InvalidRequestError: a module of ``preload`` is not there.
    """
    try:
        load(request.pickled_function)
    except Exception as error:
        raise InvalidFunctionError(f"the function can't be unpickled: {type(error).__name__}: {error}") from error
    for module in request.process.preload:
        if not _exists(module):
            raise InvalidRequestError(
                f"preload holds {module!r}, and there is no such module here; install it, or leave it out"
            )


def plan_in_words(request: RunRequest) -> str:
    """Return what the job asks for and how it would run on a cluster, a line for each part."""
    return "\n".join([f"plan of {request.spec.job_id}", *(f"  {what:<12}{text}" for what, text in _parts(request))])


def _parts(request: RunRequest) -> Iterator[tuple[str, str]]:
    spec = request.spec
    assert spec.device is not None, "a gang on slices has a type"
    assert spec.coscheduling is not None, "and numbers of slices"
    config, counts = get_tpu_config(spec.device), spec.coscheduling.num_groups
    one_of = " or ".join(map(str, counts))
    yield "slices", f"{one_of} of {config.name}, each of {config.vm_count} hosts with {config.chips_per_vm} chips"
    most = max(counts)
    on = f"{most} slice{'s' * (most > 1)}"
    yield "tasks", f"{most * spec.replicas} on {on}, one process on each host, all or none"
    for slice_id in range(min(most, 8)):
        first = slice_id * spec.replicas
        yield "", f"slice {slice_id}: tasks {first} to {first + spec.replicas - 1}"
    if most > 8:
        yield "", "…"
    yield "retries", f"{spec.max_retries_failure:,} after failures, {spec.max_retries_preemption:,} after lost hosts"
    yield "queue", f"user {spec.user}, band {spec.priority.name}"
    yield "spares", str(spec.spares)
    if others := {name: amount for name, amount in spec.resources.items() if name != "TPU"}:
        yield "each task", ", ".join(f"{amount:g} {name}" for name, amount in others.items())
    yield "hosts", "; ".join(map(str, spec.constraints))
    if spec.preferences:
        yield "preferred", "; ".join(map(str, spec.preferences))
    if spec.tolerations:
        yield "tolerates", ", ".join(spec.tolerations)
    size = len(request.pickled_function) if isinstance(request.pickled_function, bytes) else 0
    travels = "once to each node" if size > INLINE_BYTES else "with each launch"
    yield "function", f"{spec.name}, {size:,} bytes, travels {travels}"
    env = {**request.env, **request.process.runtime_env.get("env_vars", {})}
    if env:
        yield "variables", ", ".join(sorted(env))
    if parts := sorted(set(request.process.runtime_env) - {"env_vars"}):
        yield "runtime_env", ", ".join(parts)
    if request.process.preload:
        yield "preload", ", ".join(request.process.preload)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False
