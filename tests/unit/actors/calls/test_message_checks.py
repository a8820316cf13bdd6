"""A message to the Controller becomes plain; one of another type is refused, to its sender alone."""

import enum
import itertools
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.errors import InvalidJobError, InvalidMessageError, UnknownNameError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import JobSpec, SpareFor, SparePurpose
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.notices import NoticeKind
from iris_ray.model.teams import Team, Teams
from iris_ray.state.events import JobRestoredEvent, TaskStateChangedEvent, TimePassedEvent, WorkerDrainedEvent
from tests.support.controller_in_process import ControllerInProcess
from tests.support.ray_in_process import Handle
from tests.support.worlds import gang_spec, tasks_spec

HALF_A_PAIR = "\udc80"
ATTEMPT = AttemptId("job", 1)
_numbers = itertools.count(1)


class Colour(enum.StrEnum):
    """As a script has it that the Controller's process can't import."""

    RED = "red"


def odd(spec: JobSpec, **values: Any) -> JobSpec:
    """The spec with values that a client of ours would not have let through."""
    for name, value in values.items():
        object.__setattr__(spec, name, value)
    return spec


def odd_constraint() -> tuple[Constraint, ...]:
    value = AttributeValue("red")
    object.__setattr__(value, "value", Colour.RED)
    return (Constraint("colour", ConstraintOp.EQ, value),)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerInProcess]:
    """One slice of two hosts, and its Controller, which lives through all that these tests send it."""
    hosts = tmp_path_factory.mktemp("hosts")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        ControllerInProcess(hosts, {"v4-16": 1}).installed(monkeypatch) as world,
    ):
        world.start_controller()
        yield world


def a_pool(world: ControllerInProcess) -> Handle:
    return world.ray.create(SlicePoolManager, (), {})


def ask(world: ControllerInProcess, method: str, *args: Any) -> Any:
    return getattr(world.controller(), method).remote(*args).future().result(60)


def pool_of(world: ControllerInProcess, job_id: str) -> PoolProcess:
    """The pool whose job runs."""
    (slice_name,) = world.status(job_id).groups
    owner = next(host.holder for host in ask(world, "list_workers") if host.slice_name == slice_name)
    return PoolProcess(owner, 1_000_000)


def others_go_on(world: ControllerInProcess) -> None:
    """A job of somebody else runs to its end."""
    ask(world, "ping")
    other = world.start(f"other-{next(_numbers)}", user="ben")
    world.succeed(other)
    assert world.state(other) is JobState.SUCCEEDED


@pytest.mark.parametrize(
    "values",
    [
        {"resources": {"CPU": 10**400}},
        {"resources": {HALF_A_PAIR: 1.0}},
        {"job_id": f"job{HALF_A_PAIR}"},
        {"user": ["ann"]},
        {"replicas": 10**400},
        {"max_retries_failure": "many"},
        {"constraints": ("colour == red",)},
        {"tasks": 300_000},
    ],
    ids=lambda values: str(next(iter(values.items())))[:40],
)
def test_unmanageable_job_is_refused_and_others_go_on(world: ControllerInProcess, values: dict[str, Any]) -> None:
    (name,) = values
    spec = odd(tasks_spec(), **({"replicas": values["tasks"]} if name == "tasks" else values))
    with pytest.raises((InvalidMessageError, InvalidJobError), match=name):
        ask(world, "submit", spec, a_pool(world), 1)
    assert spec.job_id not in world.jobs()
    others_go_on(world)


def test_job_with_taken_id_is_refused_unless_identical(world: ControllerInProcess) -> None:
    spec = tasks_spec("taken", user="ann", constraints=(Constraint("colour", ConstraintOp.EQ, "red"),))
    again = pickle.loads(pickle.dumps(spec))
    for one in (spec, again):
        assert ask(world, "submit", one, a_pool(world), 1) is JobState.PENDING
    for changes in ({"user": "ben"}, {"owner": "another"}, {"replicas": 3}, {"constraints": ()}):
        with pytest.raises(InvalidJobError, match="there is a job taken already, of ann; choose another id"):
            ask(world, "submit", replace(spec, **changes), a_pool(world), 1)
    assert world.status("taken").tasks == {TaskState.PENDING: 2}
    ask(world, "cancel", "taken", "enough", "ann")
    with pytest.raises(InvalidJobError, match="choose another id"):
        ask(world, "submit", replace(spec, user="ben"), a_pool(world), 1)
    others_go_on(world)


def test_job_submitted_again_keeps_the_team_that_it_got(world: ControllerInProcess) -> None:
    """Its pool has not heard the first answer, and its user has left the team since."""
    before, after = Teams([Team("ads", users=("ann",))]), Teams([Team("ads")])
    world.set_teams(*before)
    spec = tasks_spec("of-ads", user="ann")
    ask(world, "submit", spec, a_pool(world), 1)
    world.set_teams(*after)
    for again in (spec, replace(spec, team="ads")):
        ask(world, "submit", again, a_pool(world), 1)
    assert world.spec("of-ads").team == "ads"
    world.iris("cancel", "of-ads")


def test_refused_job_does_not_end_job_of_same_id(world: ControllerInProcess) -> None:
    world.start("mine")
    with pytest.raises(InvalidJobError, match="choose another id"):
        world.submit("mine", user="ben")
    assert world.state("mine") is JobState.RUNNING
    world.succeed("mine")


def test_job_with_values_of_user_classes_gets_plain_values(world: ControllerInProcess) -> None:
    spec = odd(tasks_spec("red"), constraints=odd_constraint(), user=Colour.RED)
    assert ask(world, "submit", spec, a_pool(world), 1) is JobState.PENDING
    record = next(value for key, value in world.recorded().items() if key.endswith("/red"))
    assert b"Colour" not in record
    assert type(world.status("red").user) is str
    others_go_on(world)


@pytest.mark.parametrize(
    "events",
    [
        [TaskStateChangedEvent(ATTEMPT, 0, "running")],  # type: ignore[arg-type]
        [TaskStateChangedEvent(("job", 1, 0), 0, TaskState.RUNNING)],  # type: ignore[arg-type]
        [TaskStateChangedEvent(ATTEMPT._replace(number=10**400), 0, TaskState.RUNNING)],
        [TaskStateChangedEvent(ATTEMPT, 0, TaskState.FAILED, error=7)],  # type: ignore[arg-type]
        [TimePassedEvent(1e12)],
        [JobRestoredEvent(None)],  # type: ignore[arg-type]
        "events",
        [None],
    ],
    ids=lambda events: str(events)[:30],
)
def test_malformed_report_is_refused_and_others_go_on(world: ControllerInProcess, events: Any) -> None:
    with pytest.raises(InvalidMessageError, match="events"):
        ask(world, "report", "job", events)
    others_go_on(world)


def test_report_with_error_that_is_no_unicode_arrives(world: ControllerInProcess) -> None:
    world.start("unlucky")
    failed = TaskStateChangedEvent(AttemptId("unlucky", 1), 0, TaskState.FAILED, f"no such file: {HALF_A_PAIR}")
    view = ask(world, "report", "unlucky", [failed], 0, pool_of(world, "unlucky"))
    assert (view.state, view.error) == (JobState.FAILED, "no such file: \\udc80")
    json.dumps(view.error).encode()


def test_report_about_missing_task_is_refused_by_name(world: ControllerInProcess) -> None:
    job_id = world.start("one-gang")
    for gang in (-1, 1):
        with pytest.raises(UnknownNameError, match=str(gang)):
            ask(world, "report", job_id, [], gang)
    world.succeed(job_id)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("taint", ("v4-16-0", "spot", 7, "ann")),
        ("taint", ("v4-16-0", HALF_A_PAIR, "why", "ann")),
        ("taint", (["v4-16-0"], "spot", "why", "ann")),
        ("cancel", ("job", None, "ann")),
        ("cancel", ("job", "why", None)),
        ("set_yielding", ({"job": "yes"}, "ann")),
        ("set_settings", ({"evictions": 1}, False, "ann")),
        ("set_settings", ({"evictions": "off"}, False, None)),
        ("why", (None,)),
        ("evidence", ("node",)),
        ("is_to_grow", (("job", 1, 0),)),
        ("note_progress", (None, PoolProcess("pool", 1))),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_senseless_question_is_refused_and_others_go_on(
    world: ControllerInProcess, method: str, args: tuple[Any, ...]
) -> None:
    with pytest.raises(InvalidMessageError):
        ask(world, method, *args)
    others_go_on(world)


@pytest.mark.parametrize("pool", ["no actor", None, 7])
def test_job_whose_pool_is_no_actor_is_refused(world: ControllerInProcess, pool: Any) -> None:
    with pytest.raises(InvalidJobError, match="is not a SlicePoolManager"):
        ask(world, "submit", replace(tasks_spec("odd"), owner="odd"), pool, 1)


def test_job_whose_pool_is_another_actor_is_refused(world: ControllerInProcess) -> None:
    with pytest.raises(InvalidJobError, match="is not a SlicePoolManager"):
        ask(world, "submit", replace(tasks_spec("odd"), owner="odd"), world.controller(), 1)


def test_job_claiming_to_be_a_spare_is_refused(world: ControllerInProcess) -> None:
    spare = gang_spec("odd", user="eve", spare_for=SpareFor("job", SparePurpose.GROWTH))
    with pytest.raises(InvalidJobError, match="leave spare_for out"):
        ask(world, "submit", spare, a_pool(world), 1)


@pytest.mark.parametrize("kind", [NoticeKind.EVICTION, NoticeKind.GROWTH])
def test_notice_of_kind_reserved_to_controller_is_refused(world: ControllerInProcess, kind: NoticeKind) -> None:
    drained = WorkerDrainedEvent(world.node_id("v4-16-0", 0), "odd", kind, time.time() + 60.0)
    with pytest.raises(InvalidMessageError, match="preemption or maintenance only"):
        ask(world, "report", None, [drained])
