"""A job that iris_ray can't plan, commit, record or order is set aside; all others go on.

Nothing of the kind is known: the tests put a defect into the place where one might be.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.node_table import NodeDiff
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.errors import ControllerUnavailableError, IllegalTransitionError
from iris_ray.model.lifecycle import JobState
from iris_ray.scheduler.cycle import Cycle
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import job_of
from iris_ray.state.events import GangAssignedEvent, TaskStateChangedEvent
from iris_ray.state.records import JobRecord
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until

POISON = "poison"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Two slices of two hosts each, and their Controller."""
    (tmp_path / "hosts").mkdir()
    with ControllerInProcess(tmp_path / "hosts", {"v4-16": 2}).installed(monkeypatch) as world:
        world.start_controller()
        yield world


class Defect:
    """Fails in a method if the poison is concerned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def in_method(
        self,
        cls: type,
        method: str,
        concerns: Callable[..., bool],
        error: Exception | None = None,
        then: Callable[..., object] = lambda *_: None,
    ) -> None:
        as_it_was = getattr(cls, method)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if concerns(*args):
                then(*args)
                raise error or TypeError("a defect")
            return as_it_was(*args, **kwargs)

        self._monkeypatch.setattr(cls, method, failing)


@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch) -> Defect:
    return Defect(monkeypatch)


def ask(world: ControllerInProcess, method: str, *args: Any) -> Any:
    return getattr(world.controller(), method).remote(*args).future().result(60)


def others_go_on(world: ControllerInProcess) -> None:
    """Those that were there, and those that come."""
    ask(world, "ping")
    world.succeed("earlier")
    world.succeed(world.start("later", user="ben"))


def aside(world: ControllerInProcess) -> dict[str, str]:
    """Why jobs are set aside."""
    return {one.name: one.why for one in ask(world, "about")["set_aside"]}


def submit_poison(world: ControllerInProcess) -> None:
    """It goes first."""
    pool = world.ray.create(SlicePoolManager, (), {})
    pool.run.remote(world.request(poison_spec()))
    pool.accepted.remote(POISON).future().result(60)


def poison_spec() -> Any:
    from tests.support.worlds import gang_spec

    return gang_spec(POISON, user="cleo", max_retries_failure=0)


# -- planning and committing ---------------------------------------------------------------------------------------


def test_unplannable_job_waits_and_says_why(world: ControllerInProcess, defect: Defect) -> None:
    defect.in_method(Cycle, "_try", lambda _, job: job.spec.job_id == POISON)
    world.start("earlier")
    submit_poison(world)
    wait_until(lambda: world.status(POISON).waiting)
    others_go_on(world)
    status = world.status(POISON)
    assert status.state is JobState.PENDING
    assert "defect of iris_ray (TypeError: a defect)" in str(status.waiting)
    assert "iris-ray cancel poison" in world.iris("why", POISON).stdout
    assert "TypeError: a defect" in aside(world)[POISON]
    assert "set aside, for they could not be handled: poison (why: iris-ray doctor)" in world.iris("ls").stdout
    world.iris("cancel", POISON)
    assert world.state(POISON) is JobState.KILLED
    assert aside(world) == {}


def test_job_whose_placement_is_refused_waits_and_says_why(world: ControllerInProcess, defect: Defect) -> None:
    def is_assigned(_: object, event: object) -> bool:
        return isinstance(event, GangAssignedEvent) and event.job_id == POISON

    defect.in_method(ControllerState, "handle_event", is_assigned, IllegalTransitionError("no place for it"))
    world.start("earlier")
    submit_poison(world)
    wait_until(lambda: world.status(POISON).waiting)
    others_go_on(world)
    assert "no place for it" in aside(world)[POISON]


def test_uncommittable_job_is_ended_and_says_why(world: ControllerInProcess, defect: Defect) -> None:
    def is_assigned(_: object, event: object) -> bool:
        return isinstance(event, GangAssignedEvent) and event.job_id == POISON

    defect.in_method(ControllerState, "handle_event", is_assigned)
    world.start("earlier")
    submit_poison(world)
    world.wait_for_state(POISON, JobState.KILLED)
    others_go_on(world)
    assert "could not be handled, by a defect of iris_ray (TypeError: a defect)" in world.iris("why", POISON).stdout
    assert list(aside(world)) == [POISON]


def test_unmanageable_report_ends_its_job_alone(world: ControllerInProcess, defect: Defect) -> None:
    def is_report(_: object, event: object) -> bool:
        return isinstance(event, TaskStateChangedEvent) and job_of(event) == POISON

    defect.in_method(ControllerState, "handle_event", is_report)
    world.start("earlier")
    submit_poison(world)
    world.wait_for_state(POISON, JobState.KILLED)
    others_go_on(world)
    wait_until(lambda: not ask(world, "list_workers")[1].tasks)  # what it had is free


# -- recording and carrying out ------------------------------------------------------------------------------------


def test_unrecordable_job_is_ended_and_says_why(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    as_it_was = ControllerState.record

    def record(state: ControllerState, job_id: str) -> JobRecord | None:
        if job_id == POISON:
            raise TypeError("a defect")
        return as_it_was(state, job_id)

    monkeypatch.setattr(ControllerState, "record", record)
    world.start("earlier")
    submit_poison(world)
    world.wait_for_state(POISON, JobState.KILLED)
    others_go_on(world)
    assert "could not be recorded" in world.iris("job", "status", POISON).stdout
    assert list(aside(world)) == [POISON]
    assert not world.tasks_of(POISON), "nothing follows from what is not recorded"


def test_job_that_became_unrecordable_does_not_come_back(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last record says that it waits."""
    as_it_was = ControllerState.record

    def record(state: ControllerState, job_id: str) -> JobRecord | None:
        if job_id == POISON and state.jobs[POISON].state is not JobState.PENDING:
            raise TypeError("a defect")
        return as_it_was(state, job_id)

    monkeypatch.setattr(ControllerState, "record", record)
    world.start("earlier", slices=(2,))
    submit_poison(world)
    world.succeed("earlier")
    world.wait_for_state(POISON, JobState.KILLED)
    monkeypatch.setattr(ControllerState, "record", as_it_was)
    world.restart_controller()
    assert world.state(POISON) is JobState.KILLED
    assert "could not be recorded" in aside(world)[POISON]
    world.succeed(world.start("later", user="ben"))
    assert not world.tasks_of(POISON)


def test_job_whose_order_fails_is_ended_and_says_why(world: ControllerInProcess, defect: Defect) -> None:
    defect.in_method(Dispatcher, "order", lambda _, job, gang: job.spec.job_id == POISON)
    world.start("earlier")
    submit_poison(world)
    world.wait_for_state(POISON, JobState.KILLED)
    others_go_on(world)
    assert list(aside(world)) == [POISON]


def test_pool_failing_at_its_order_is_a_failed_launch(world: ControllerInProcess, defect: Defect) -> None:
    defect.in_method(SlicePoolManager, "assign", lambda _, order: order.attempt.job_id == POISON)
    world.start("earlier")
    submit_poison(world)
    wait_until(lambda: "the job's pool failed: TypeError: a defect" in str(world.status(POISON).error))
    others_go_on(world)


# -- when only a new process helps ---------------------------------------------------------------------------------


def test_dead_loop_ends_process_and_next_one_goes_on(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.controller()
    world.start("earlier")
    fails, as_it_was = [True], Journal.write

    async def write(journal: Journal, state: ControllerState) -> None:
        if fails and state.jobs.get(POISON):
            fails.clear()
            raise TypeError("a defect")
        await as_it_was(journal, state)

    monkeypatch.setattr(Journal, "write", write)
    submit_poison(world)  # its pool asks again
    wait_until(lambda: world.controller() is not first)
    world.wait_for_state(POISON, JobState.RUNNING)
    others_go_on(world)


def test_failed_controller_does_not_report_health(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    controller = world.controller()._object
    controller._events._end = lambda: ended.append(True)

    async def write(journal: Journal, state: ControllerState) -> None:
        raise TypeError("a defect")

    monkeypatch.setattr(Journal, "write", write)
    for method, args in (("taint", ("v4-16-0", "spot", "why", "ann")), ("ping", ()), ("list_jobs", ())):
        with pytest.raises(ControllerUnavailableError, match="being restarted: TypeError: a defect"):
            ask(world, method, *args)
    assert ended == [True]


def test_job_that_breaks_state_is_ended_by_next_controller(world: ControllerInProcess, defect: Defect) -> None:
    """What is left of a half-handled event is not known, so the state comes from the records again: just once."""
    first = world.controller()

    def is_report(_: object, event: object) -> bool:
        return isinstance(event, TaskStateChangedEvent) and job_of(event) == POISON

    def break_it(state: ControllerState, _: object) -> None:
        state.jobs[POISON].counts.clear()

    world.start("earlier")
    defect.in_method(ControllerState, "handle_event", is_report, then=break_it)
    submit_poison(world)
    wait_until(lambda: world.controller() is not first)
    second = world.controller()
    world.wait_for_state(POISON, JobState.KILLED)
    assert "a defect" in str(world.status(POISON).error)
    assert list(aside(world)) == [POISON]
    others_go_on(world)
    assert world.controller() is second
    assert not [key for key in world.store.values if key.startswith("aside/")]


def test_failed_start_is_retried_by_next_process(world: ControllerInProcess, defect: Defect) -> None:
    world.start("earlier")
    failed: list[Any] = []
    then = lambda *_: failed.append(world.ray.current_actor())  # noqa: E731
    defect.in_method(NodeDiff, "events_of", lambda *_: not failed, then=then)
    world.restart_controller()
    wait_until(lambda: failed and world.controller() is not failed[0])
    others_go_on(world)
