"""Users end their own jobs, operators what they like; a pool that reports about what is another's is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.protocol.messages import GangProgress, PoolProcess
from iris_ray.cli.conventions import FAILED
from iris_ray.errors import InvalidJobError, NotPermittedError
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.model.outcomes import Fault
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    JobCancelledEvent,
    SliceReleasedEvent,
    TaskStateChangedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)
from tests.support.controller_in_process import ControllerInProcess


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Two slices of two hosts each, and their Controller, whose operators are olga and otto."""
    (tmp_path / "hosts").mkdir()
    with ControllerInProcess(tmp_path / "hosts", {"v4-16": 2}).installed(monkeypatch) as world:
        world.start_controller()
        world.iris("cluster", "settings", "set", "operators=olga, otto", user="olga")
        yield world


def ask(world: ControllerInProcess, method: str, *args: Any) -> Any:
    return getattr(world.controller(), method).remote(*args).future().result(60)


def report(world: ControllerInProcess, owner: str, job_id: str, events: list[Any]) -> Any:
    return ask(world, "report", job_id, events, 0, PoolProcess(owner, 1_000_000))


def pool_of(world: ControllerInProcess, job_id: str) -> str:
    (slice_name,) = world.status(job_id).groups
    return next(host.holder for host in ask(world, "list_workers") if host.slice_name == slice_name)


def test_only_user_and_operators_may_cancel_a_job(world: ControllerInProcess) -> None:
    mine, other = world.start("mine"), world.start("other")
    refused = world.iris("cancel", mine, user="bob", code=FAILED).stderr
    assert "mine belongs to ann: only ann and operators may cancel it, and bob is neither" in refused
    assert (
        "operators are: olga, otto (one of them can change that: iris-ray cluster settings set operators=...)"
        in refused
    )
    assert world.state(mine) is JobState.RUNNING
    world.iris("cancel", mine, user="ann")
    world.iris("cancel", other, user="otto")
    assert {world.state(job) for job in (mine, other)} == {JobState.KILLED}


def test_only_operators_may_submit_jobs_of_the_system_band_and_say_why(world: ControllerInProcess) -> None:
    about: dict[str, Any] = {"priority": PriorityBand.SYSTEM, "priority_reason": "tests new hosts"}
    with pytest.raises(NotPermittedError, match="only operators may submit jobs in the band system, and ann is not"):
        world.submit("refused", **about)
    with pytest.raises(InvalidJobError, match="needs a reason, which everybody sees"):
        world.submit("silent", user="olga", priority=PriorityBand.SYSTEM)
    assert world.jobs() == []
    job = world.start("tests", user="olga", **about)
    assert world.status(job).priority_reason == "tests new hosts"
    assert "system: tests new hosts" in world.iris("job", "status", job, user="ann").stdout


def test_only_user_and_operators_may_let_a_job_yield(world: ControllerInProcess) -> None:
    mine = world.start("mine")
    with pytest.raises(NotPermittedError, match="may say that it yields, and bob is neither"):
        ask(world, "set_yielding", {mine: True}, "bob")
    assert not world.status(mine).yields
    ask(world, "set_yielding", {mine: True, "unknown": True}, "ann")
    assert world.status(mine).yields
    assert "any job that waits may have its hosts" in world.status(mine).explanation
    ask(world, "set_yielding", {mine: False}, "olga")
    assert not world.status(mine).yields


@pytest.mark.parametrize(
    "command",
    [
        ("host", "drain", "v4-16-0"),
        ("host", "undrain", "v4-16-1"),
        ("host", "drain", "v4-16-0", "spot"),
        ("host", "undrain", "v4-16-1", "spot"),
        ("cluster", "settings", "set", "evictions=off"),
        ("cluster", "settings", "reset", "operators"),
    ],
    ids=" ".join,
)
def test_only_operators_may_drain_taint_and_change_settings(
    world: ControllerInProcess, command: tuple[str, ...]
) -> None:
    world.iris("host", "drain", "v4-16-1", user="olga")
    world.iris("host", "drain", "v4-16-1", "spot", user="olga")

    def seen() -> list[Any]:
        return [world.json(*shown) for shown in (("host", "ls"), ("cluster", "settings"))]

    before = seen()
    assert "only operators may" in world.iris(*command, user="ann", code=FAILED).stderr
    assert seen() == before
    world.iris(*command, user="olga")
    assert seen() != before


ATTEMPT = AttemptId("theirs", 1)


@pytest.mark.parametrize(
    "event",
    [
        TaskStateChangedEvent(ATTEMPT, 0, TaskState.FAILED, "boom"),
        JobCancelledEvent("theirs", "why not"),
        AttemptEndConfirmedEvent(ATTEMPT),
        WorkerBlamedEvent("node", "theirs", "boom", Fault.CRASH),
    ],
    ids=lambda event: type(event).__name__,
)
def test_report_about_another_pools_job_is_refused(world: ControllerInProcess, event: Any) -> None:
    mine, theirs = world.start("mine"), world.start("theirs")
    with pytest.raises(NotPermittedError, match="theirs is not a job of pool"):
        report(world, pool_of(world, mine), mine, [event])
    assert (world.state(theirs), world.state(mine)) == (JobState.RUNNING, JobState.RUNNING)


def test_questions_and_lines_about_another_pools_job_are_refused(world: ControllerInProcess) -> None:
    pool = pool_of(world, world.start("mine"))
    world.start("theirs")
    with pytest.raises(NotPermittedError, match="theirs is not a job"):
        report(world, pool, "theirs", [])
    with pytest.raises(NotPermittedError, match="theirs is not a job"):
        ask(world, "note_progress", GangProgress(ATTEMPT, 0.0, 1, "forged"), PoolProcess(pool, 1))


def test_report_without_sender_belongs_to_nobody(world: ControllerInProcess) -> None:
    mine = world.start("mine")
    with pytest.raises(NotPermittedError, match="mine is not a job of pool"):
        ask(world, "report", None, [JobCancelledEvent(mine, "why not")])
    assert world.state(mine) is JobState.RUNNING


def test_pool_may_not_release_another_pools_slice(world: ControllerInProcess) -> None:
    mine, theirs = world.start("mine"), world.start("theirs")
    (slice_name,) = world.status(theirs).groups
    with pytest.raises(NotPermittedError, match="can't release slices of another pool"):
        report(world, pool_of(world, mine), mine, [SliceReleasedEvent(slice_name, pool_of(world, theirs))])
    assert pool_of(world, theirs)


def test_host_report_counts_only_from_pool_that_may_use_it(world: ControllerInProcess) -> None:
    mine, theirs = world.start("mine"), world.start("theirs")
    pools = {job: pool_of(world, job) for job in (mine, theirs)}
    (slice_name,) = world.status(theirs).groups
    node_id = world.node_id(slice_name, 0)
    events = [
        WorkerSuspectedEvent(node_id, "no answer", 0.0),
        WorkerDrainedEvent(node_id, "a forged notice"),
        WorkerBlamedEvent(node_id, mine, "boom", Fault.HOST),
    ]

    def closed() -> dict[str, str | None]:
        return {host.node_id: host.unavailable for host in ask(world, "list_workers")}

    view = report(world, pools[mine], mine, events)
    assert view.state is JobState.RUNNING  # it goes on: it may just have lost the host
    assert set(closed().values()) == {None}
    report(world, pools[theirs], theirs, events[:2])
    assert "a forged notice" in str(closed()[node_id])


def test_anybody_may_report_about_unused_host(world: ControllerInProcess) -> None:
    mine = world.start("mine")
    (free,) = (host for host in ask(world, "list_workers") if host.holder is None and host.host_index == 0)
    report(world, pool_of(world, mine), mine, [WorkerSuspectedEvent(free.node_id, "no answer", 0.0)])
    assert "no answer" in next(host.unavailable for host in ask(world, "list_workers") if host.node_id == free.node_id)


def test_everybody_is_operator_where_none_is_set(world: ControllerInProcess) -> None:
    world.iris("cluster", "settings", "reset", "operators", user="olga")
    mine = world.start("mine")
    world.iris("host", "drain", "v4-16-1", user="bob")
    world.iris("cancel", mine, user="bob")
    assert world.state(mine) is JobState.KILLED
