"""The actors of one job, as they come and go."""

import time
from typing import TYPE_CHECKING, Any

from iris_ray.fray.actor_handle import ActorHandle, InTaskOf, unavailable
from iris_ray.fray.job_handle import JobHandle
from iris_ray.task.endpoints import endpoints_of

if TYPE_CHECKING:
    from fray.actor import ActorHandle as FraysHandle

    from iris_ray.actors.wire.status import JobStatus

POLL_S = 0.2


class ActorGroup:
    """The actors of one job: ``count`` tasks, each of which is one. It can be pickled.

    Actors are told apart by their number. One that is preempted or fails comes back as long as its job has retries, as
    a new object under its old handle.
    """

    def __init__(self, job_id: str, name: str, count: int) -> None:
        self._job, self._name, self._count = JobHandle(job_id), name, count
        self._handed_out: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorGroup, (self.job_id, self._name, self._count)  # whoever gets it has discovered nothing yet

    @property
    def job_id(self) -> str:
        """The job, for `iris-ray` and `IrisClient`."""
        return self._job.job_id

    @property
    def ready_count(self) -> int:
        """How many actors take calls now."""
        return len(self._ready())

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> "list[FraysHandle]":
        """Wait until so many actors take calls, and return their handles by number.

        Args:
            count: how many; None: all.
            timeout: seconds.

        Raises:
            TimeoutError: some are not ready in time; the message says what their job waits for. They go on.
            fray.actor.ActorUnavailableError: the job has ended. A RuntimeError, also where Fray has none.
        """
        wanted = self._count if count is None else min(count, self._count)
        deadline = time.monotonic() + timeout
        while len(ready := self._ready()) < wanted:
            status = self._job.look()
            if status.state.finished:
                raise self._gone(status)
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{len(ready)} of {wanted} actors of {self.job_id} are ready after {timeout:g} s:"
                    f" {status.explanation}"
                )
            time.sleep(POLL_S)
        return self._hand_out(ready[:wanted])

    def discover_new(self) -> "list[FraysHandle]":
        """Return the handles of actors that take calls now, and that this object has not returned before."""
        return self._hand_out([index for index in self._ready() if index not in self._handed_out])

    def is_done(self) -> bool:
        """Return whether the job has ended: no actor of it comes back."""
        return self._job.look().state.finished

    def shutdown(self) -> None:
        """End all actors."""
        self._job.terminate()

    def _ready(self) -> list[int]:
        prefix = f"{self._name}-"
        found = (name.removeprefix(prefix) for name in endpoints_of(self.job_id, prefix))
        return sorted(int(number) for number in found if number.isdecimal())  # others are the user's own

    def _hand_out(self, indexes: list[int]) -> "list[FraysHandle]":
        self._handed_out.update(indexes)
        return [ActorHandle(InTaskOf(self.job_id, f"{self._name}-{index}")) for index in indexes]

    def _gone(self, status: "JobStatus") -> RuntimeError:
        return unavailable(f"the actors of {self.job_id} have ended: {status.state.value}: {status.error}")
