"""Groups of jobs that start together or not at all: `JobGroup`, and the handle of one that was submitted."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.client.connection import new_job_id
from iris_ray.client.job_handle import JobHandle
from iris_ray.client.job_request import make_request
from iris_ray.client.placement import placement_of
from iris_ray.client.run_options import takes
from iris_ray.errors import InvalidRequestError, JobCancelledError
from iris_ray.model.checks import is_job_id, shown
from iris_ray.model.job_group import MOST_MEMBERS, GroupSpec
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import JobOptions
from iris_ray.model.requirement import ResourceSpec


@dataclass(frozen=True, slots=True)
class _Member:
    remote_fn: Any
    resources: ResourceSpec | None
    coscheduling: CoschedulingConfig | None
    options: JobOptions


class JobGroup:
    """Jobs of any kinds that start together or not at all, find each other by endpoints, and end as one.

    Args:
        name: what to call the group.
        main: the name of the main job, or the names of several. When they have succeeded, the others end; without it,
            all are main.

    Raises:
        InvalidRequestError: the name makes no sense.

    Example:
        >>> group = JobGroup("rl", main="trainer")
        >>> group.add(train, "trainer", resources=ResourceSpec(device=tpu_device("v4-32")))
        >>> group.add(sample, "samplers", resources=ResourceSpec(device=tpu_device("v4-8"), replicas=4))
        >>> IrisClient().submit_group(group).results()["trainer"]
    """

    def __init__(self, name: str, main: str | Sequence[str] = ()) -> None:
        if not is_job_id(name) or "/" in name:
            raise InvalidRequestError(f"name is {shown(name)}; give letters, digits, '.', '_' and '-'")
        self.name = name
        self._main = (main,) if isinstance(main, str) else tuple(main)
        self._members: dict[str, _Member] = {}

    @takes("JobGroup.add")
    def add(
        self,
        remote_fn: Callable[[], Any] | Any,
        name: str,
        *,
        resources: ResourceSpec | None = None,
        coscheduling: CoschedulingConfig | None = None,
        **options: Unpack[JobOptions],
    ) -> Self:
        """Add a job. Its arguments are those of `IrisClient.submit`; return the group.

        All jobs of a group have one priority and one team.

        Args:
            remote_fn: as for `IrisClient.submit`.
            name: by which the other jobs know it: ``lookup_endpoint("weights", member="trainer")``.
            resources, coscheduling: as for `IrisClient.submit`.
            options: those of `IrisClient.submit`.

        Raises:
            InvalidRequestError: something can't work as written, or the group has a job of that name already.
        """
        if not is_job_id(name) or "/" in name:
            raise InvalidRequestError(f"name is {shown(name)}; give letters, digits, '.', '_' and '-'")
        if name in self._members:
            raise InvalidRequestError(f"group {self.name} has a job {name} already; give another name")
        if len(self._members) == MOST_MEMBERS:
            raise InvalidRequestError(f"group {self.name} has {MOST_MEMBERS} jobs, the limit; add tasks to one of them")
        member = _Member(remote_fn, resources, coscheduling, options)
        _request(name, member)
        self._members[name] = member
        return self

    def _requests(self) -> dict[str, RunRequest]:
        """Return the complete requests of its jobs by name, with new ids.

        Raises:
            InvalidRequestError: the group is empty, or ``main`` names no job of it.
        """
        if not self._members:
            raise InvalidRequestError(f"group {self.name} has no jobs; add some")
        if unknown := [name for name in self._main if name not in self._members]:
            raise InvalidRequestError(f"main names {shown(unknown[0])}, and there are {', '.join(self._members)}")
        made = {name: _request(name, member) for name, member in self._members.items()}
        ids = tuple((name, request.spec.job_id) for name, request in made.items())
        group = GroupSpec(new_job_id(self.name), self.name, ids, self._main or tuple(made))
        first = next(iter(made.values())).spec
        for name, request in made.items():
            if (request.spec.team, request.spec.priority) != (first.team, first.priority):
                raise InvalidRequestError(f"{name} has another team or priority than {first.name}; all have the same")
        return {name: replace(one, spec=replace(one.spec, group=group)) for name, one in made.items()}


def _request(name: str, member: _Member) -> RunRequest:
    need = ResourceSpec() if member.resources is None else member.resources
    if not isinstance(need, ResourceSpec):
        raise InvalidRequestError(f"resources is a {type(need).__name__}; give ResourceSpec(cpu=…, memory_gb=…, …)")
    return make_request(member.remote_fn, placement_of(need, member.coscheduling), name, **member.options)


class GroupHandle:
    """A group of jobs that was submitted.

    Attributes:
        name: of the group.
        jobs: the handle of each job, by its name.
    """

    def __init__(self, name: str, jobs: dict[str, JobHandle], main: Sequence[str]) -> None:
        self.name = name
        self.jobs = jobs
        self._main = main

    def wait(self, timeout: float | None = None) -> dict[str, JobStatus]:
        """Wait until all jobs have ended, and return their status by name. A failure is not raised.

        Args:
            timeout: seconds after which to return anyway; None waits for ever.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return {
            name: job.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for name, job in self.jobs.items()
        }

    def results(self, timeout: float | None = None) -> dict[str, list[Any] | None]:
        """Wait until all jobs have ended; return the results of each by name, None for one that ended with the rest.

        Raises:
            TimeoutError: they have not ended in time, and go on.
            Exception: the error of the job that ended the group, as `JobHandle.results` raises it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        errors: dict[str, BaseException] = {}
        found: dict[str, list[Any] | None] = {}
        for name, job in self.jobs.items():
            error = job.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
            found[name] = job.results() if error is None else None
            if error is not None:
                errors[name] = error
        if any(found[name] is None for name in self._main):
            telling = (error for error in errors.values() if not isinstance(error, JobCancelledError))
            raise next(telling, next(iter(errors.values())))
        return found

    def status(self) -> dict[str, JobStatus]:
        """Return the status of each job, by name."""
        return {name: job.status() for name, job in self.jobs.items()}

    @property
    def state(self) -> JobState:
        """The state of the group: pending, then running; SUCCEEDED if all main jobs have, else how one failed."""
        states = {name: status.state for name, status in self.status().items()}
        if any(not state.finished for state in states.values()):
            waits = all(state is JobState.PENDING for state in states.values())
            return JobState.PENDING if waits else JobState.RUNNING
        failed = [state for state in states.values() if state not in (JobState.SUCCEEDED, JobState.KILLED)]
        lost = [states[name] for name in self._main if states[name] is not JobState.SUCCEEDED]
        return (failed or lost or [JobState.SUCCEEDED])[0] if lost else JobState.SUCCEEDED

    def cancel(self) -> bool:
        """End all jobs, whether they wait or run; return whether any had not ended."""
        return any(job.cancel() for job in self.jobs.values())  # one ends all

    def __repr__(self) -> str:
        return f"<GroupHandle {self.name}: {', '.join(job.job_id for job in self.jobs.values())}>"


def submit_all(group: JobGroup, launch: Callable[[RunRequest, bool], JobHandle], detached: bool) -> GroupHandle:
    """Submit all jobs of a group, or none of them. Raises like `IrisClient.submit_group`."""
    jobs: dict[str, JobHandle] = {}
    requests = group._requests()
    try:
        for name, request in requests.items():
            jobs[name] = launch(request, detached)
    except BaseException:  # the others wait for this one
        for job in jobs.values():
            with contextlib.suppress(Exception):  # it has ended with the one that was refused
                job.cancel()
        raise
    spec = next(iter(requests.values())).spec.group
    assert spec is not None
    return GroupHandle(group.name, jobs, spec.main)
