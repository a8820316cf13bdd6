"""A restarted Controller rebuilds its state from the records, and learns what happened in the meantime."""

import dataclasses
from collections.abc import Callable

import pytest

from iris_ray.errors import CorruptRecordError, UnknownRecordError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.goodput import AttemptTimes, JobTimes, Marks
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec, SpareFor, SparePurpose
from iris_ray.model.jobs import Eviction, Gang, Job, PastAttempt, Promise, Task
from iris_ray.model.lifecycle import AttemptId, JobState, TaskState
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.time_lost import FailureCause, TimeLost
from iris_ray.scheduler.fair_queue import WAITS_FOR_OWN_S
from iris_ray.state import job_table
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import (
    JobCancelledEvent,
    JobRestoredEvent,
    SliceHeldEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
)
from iris_ray.state.instructions import DropSpare, NotifyGang, StopAttempt
from iris_ray.state.records import HEADER, RECORD_VERSION, JobRecord
from tests.support.worlds import S, World, charged, host


def successor(world: World, without: tuple[str, ...] = ()) -> tuple[World, list[StopAttempt]]:
    """A new world from the records of an old one, and which attempts it wants stopped."""
    new = World()
    new.now = world.now
    for worker in world.state.workers.values():
        if worker.node_id not in without:
            new.do(host(str(worker.attributes["tpu-name"]), worker.host_index or 0, node_id=worker.node_id))
    stops = []
    for job_id in world.state.jobs:
        stops += [stop for _ in range(2) for stop in new.restore(world, job_id).stop]
    new.state.check()
    return new, stops


def records(world: World) -> list[JobRecord]:
    """What a successor reads."""
    found = (world.state.record(job_id) for job_id in world.state.jobs)
    return [JobRecord.joined(record.to_bytes()) for record in found if record is not None]


LIVES: dict[str, Callable[[World], object]] = {
    "waiting": lambda w: w.submit(),
    "assigned": lambda w: (w.submit(), w.schedule()),
    "running": lambda w: w.start(),
    "partly done": lambda w: w.report(w.start(), S.SUCCEEDED),
    "done": lambda w: w.report_all(w.start(), S.SUCCEEDED),
    "failed": lambda w: w.report(w.start(), S.FAILED),
    "to be tried again": lambda w: w.report(w.start(max_retries_failure=3), S.FAILED),
    "paused": lambda w: (w.submit(), w.schedule(), w.dispatch_fails(w.state.jobs["job"])),
    "told that it is to go": lambda w: (w.start(), w.do(WorkerDrainedEvent("a-0", "preempted", deadline=130.0))),
    "preempted": lambda w: (w.start(max_retries_preemption=3), w.lose("a-0")),
    "cancelled": lambda w: (w.start(), w.do(JobCancelledEvent("job", "enough"))),
}


@pytest.mark.parametrize("life", LIVES)
def test_restored_state_equals_the_original(world: World, life: str) -> None:
    LIVES[life](world)
    new, _ = successor(world)
    old_job, job = world.state.jobs["job"], new.state.jobs["job"]
    assert job == old_job
    assert job.requirement is old_job.requirement
    assert new.busy() == world.busy()
    assert new.state.usage == world.state.usage
    for one in (new, world):
        one.now += WAITS_FOR_OWN_S + 1.0  # no pool has told the new one which slices it holds
    assert new.plan() == world.plan()


@pytest.mark.parametrize("life", ["failed", "to be tried again", "paused", "cancelled", "done"])
def test_attempt_with_unconfirmed_end_is_stopped_again(world: World, life: str) -> None:
    """Its pool may not know that it is to be stopped. Its hosts are not free until its end is confirmed."""
    LIVES[life](world)
    new, stops = successor(world)
    assert [stop.attempt for stop in stops] == [AttemptId("job", 1)]
    assert new.busy() == {"a-0", "a-1"}
    new.confirm(new.state.jobs["job"], 1)
    assert new.busy() == set()
    assert not new.state.usage


def test_notice_is_repeated_after_restore(world: World) -> None:
    """The host's own notice may not be known any more, or be known before its jobs are."""
    world.start("other")
    job = world.start(max_retries_preemption=3)
    world.do(WorkerDrainedEvent("b-1", "preempted", NoticeKind.PREEMPTION, 130.0))
    for told_before in (False, True):
        new = World()
        for name, number in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
            new.do(host(name, number))
        if told_before:
            new.do(WorkerDrainedEvent("b-1", "preempted", NoticeKind.PREEMPTION, 130.0))
        instructions = apply_all(new.state, map(JobRestoredEvent, records(world)))
        assert job.gang.notice is not None
        assert instructions.notices == [NotifyGang(AttemptId("job", 1), job.gang.notice)]
        assert new.do(WorkerDrainedEvent("b-1", "preempted", NoticeKind.PREEMPTION, 130.0)).notices == []
        new.state.check()


def test_host_noticed_without_controller_is_told_after_restore(world: World) -> None:
    world.start(max_retries_preemption=3)
    new = World()
    new.do(host("a", 0))
    new.do(host("a", 1, draining="Ray drains it", deadline=130.0))
    instructions = apply_all(new.state, map(JobRestoredEvent, records(world)))
    (told,) = instructions.notices
    assert (told.attempt.job_id, told.notice.deadline) == ("job", 130.0)
    new.do(TimePassedEvent(new.now))
    assert list(new.state.jobs) == ["job", "job/replacement-1"]


def test_spares_are_dropped_if_job_lost_host_meanwhile(world: World) -> None:
    world.start(spares=1, max_retries_preemption=3)
    world.schedule()
    new = World()
    for name, number in (("a", 0), ("b", 0), ("b", 1)):
        new.do(host(name, number))
    instructions = apply_all(new.state, map(JobRestoredEvent, records(world)))
    assert [stop.attempt.job_id for stop in instructions.stop] == ["job"]
    new.do(TimePassedEvent(new.now))
    assert list(new.state.jobs) == ["job"]
    new.schedule()
    assert new.state.jobs["job"].gang.groups == ("b",)


def test_spare_ids_are_never_reused(world: World) -> None:
    """Pools know attempts by job and number."""
    world.add_slice("c")
    world.start(spares=1)
    world.schedule()
    world.do(WorkerDrainedEvent("b-0", "preempted"))
    assert "job" in world.state.unrecorded
    world.schedule()
    world.do(WorkerDrainedEvent("a-0", "preempted"))
    assert list(world.state.jobs) == ["job", "job/spare-2"]
    new = World(*"abc")
    apply_all(new.state, [JobRestoredEvent(records(world)[0])])  # the spare's own record is lost
    new.do(TimePassedEvent(new.now))
    assert list(new.state.jobs) == ["job", "job/spare-3"]


def test_spares_of_forgotten_job_are_dropped(world: World) -> None:
    world.start(spares=1)
    world.schedule()
    new = World("a", "b")
    (held,) = [record for record in records(world) if record.job.spec.spare_for]
    new.do(JobRestoredEvent(held))
    assert new.state.handle_event(TimePassedEvent(new.now)).dropped == [DropSpare("job/spare-1", "pool-a")]
    assert new.state.jobs == {}
    assert new.busy() == set()


@pytest.mark.parametrize("ran", [True, False])
def test_host_lost_meanwhile_ends_gang_charged_if_it_ran(world: World, ran: bool) -> None:
    job = world.start(max_retries_preemption=5) if ran else world.submit(max_retries_preemption=5)
    world.schedule()
    assert job.gang.groups == ("a",)
    new, stops = successor(world, without=("a-1",))
    job = new.state.jobs["job"]
    assert (job.state, charged(job)) == (JobState.PENDING, (0, int(ran)))
    assert [stop.attempt for stop in stops] == [AttemptId("job", 1)]
    assert new.busy() == {"a-0"}
    new.schedule()
    assert job.gang.groups == ("b",)


def test_holders_are_restored_from_gangs_and_pools(world: World) -> None:
    world.keep_warm("pool-b")
    world.start(owner="pool-b")
    new, _ = successor(world)
    assert new.state.holders == {"a": "pool-b"}
    for owner in ("pool-b", "pool-c"):  # the first report counts
        new.do(SliceHeldEvent("b", owner))
    assert new.state.holders == {"a": "pool-b", "b": "pool-b"}


def test_record_lists_changes_and_forgotten_jobs(world: World) -> None:
    state = world.state
    job = world.submit()
    assert state.unrecorded == {"job": set()}
    state.unrecorded.clear()
    world.plan()
    assert not state.unrecorded
    for change in (world.schedule, lambda: world.report_all(job, S.RUNNING), lambda: world.report(job, S.FAILED)):
        change()
        assert state.unrecorded == {"job": set()}
        state.unrecorded.clear()
    world.confirm(job)
    assert state.unrecorded == {"job": set()}
    assert state.record("nobody") is None


def test_record_of_another_version_is_refused_clearly(world: World) -> None:
    world.submit()
    record = world.state.record("job")
    assert record is not None
    data = record.to_bytes()
    assert data.startswith(HEADER + b"\n")
    for other in (b"iris_ray job record 99", HEADER[:-8] + b"00000000"):  # the latter has another option of a job
        with pytest.raises(UnknownRecordError, match="use the version that wrote them"):
            JobRecord.joined(data.replace(HEADER, other, 1))


@pytest.mark.parametrize("data", [b"", b"{}", b"iris_ray job recor"])
def test_record_without_version_is_damaged(data: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="damaged"):
        JobRecord.joined(data)


def test_record_of_a_large_gang_is_small(world: World) -> None:
    """Values in Ray's store are to stay below 100 KB."""
    for number in range(256):
        world.do(host("large", number, "v4-2048", node_id=f"{number:056x}"))
    job = world.start(tpu_type="v4-2048")
    record = world.state.record("job")
    assert len(job.tasks) == 256
    assert record is not None
    assert len(record.to_bytes()) < 30_000


def test_recorded_fields_change_only_with_a_new_version() -> None:
    """A change of these lists raises RECORD_VERSION in the same commit: pickle finds a class by its module."""
    classes = (
        JobRecord,
        Job,
        Gang,
        Promise,
        Eviction,
        PastAttempt,
        Task,
        JobSpec,
        CoschedulingConfig,
        Constraint,
        AttributeValue,
        SpareFor,
        Notice,
        JobTimes,
        AttemptTimes,
        Marks,
        TimeLost,
        GroupSpec,
    )
    fields = {cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in classes if cls is not JobSpec}
    enums = ConstraintOp, JobState, NoticeKind, PriorityBand, SparePurpose, TaskState, FailureCause
    modules = {cls.__name__: cls.__module__.removeprefix("iris_ray.") for cls in (*classes, *enums)}
    assert (RECORD_VERSION, fields, modules) == (19, FIELDS, MODULES)


FIELDS = {
    "JobRecord": ["job", "allocations"],
    "Job": ["spec", "number", "submitted_at", "requirement", "gangs", "counts", "pending", "attempt", "requeues",
            "failures", "preemptions", "evictions", "spares_made", "promise", "awaits", "ready_at", "started",
            "began_at", "furthest_step", "fruitless", "over", "avoided", "avoided_until", "error", "yields", "times",
            "members", "kind"],
    "JobTimes": ["attempts", "settled", "settled_until", "has_run", "ended_at", "succeeded", "settled_failures",
                 "back_s"],
    "AttemptTimes": ["number", "chips", "assigned_at", "began_at", "ended_at", "marks", "cause"],
    "TimeLost": ["count", "seconds", "chip_seconds", "waited_s", "reinit_s", "worst_s", "latest", "median_s"],
    "Marks": ["steps", "before", "during"],
    "Gang": ["tasks", "succeeded", "attempt", "failures", "preemptions", "evictions", "dispatch_failures", "not_before",
             "waiting_since", "requeued", "groups", "returning_until", "running_since", "quick_ends", "groups_wanted",
             "notice", "end_confirmed", "error", "past", "eviction", "last_ran", "pays_at",
             "growths_undone", "asks_at", "saved_at", "saves_every_s", "heeds_notices", "evicted_at",
             "spared_until"],
    "Promise": ["node_ids", "given_up", "lent", "removed_by"],
    "Eviction": ["job_id", "deadline", "reason"],
    "PastAttempt": ["number", "state", "groups", "started_at", "ended_at", "cause", "exit_code", "error"],
    "Task": ["task_id", "index", "state", "node_id", "error", "started_at", "ended_at", "exit_code"],
    "GroupSpec": ["group_id", "name", "members", "main"],
    "CoschedulingConfig": ["group_by", "num_groups"],
    "Constraint": ["key", "op", "value", "_compare"],
    "AttributeValue": ["value"],
    "SpareFor": ["job_id", "purpose"],
    "Notice": ["kind", "reason", "deadline"],
}  # fmt: skip
MODULES = {
    **dict.fromkeys(("AttributeValue", "Constraint", "ConstraintOp"), "model.constraints"),
    **dict.fromkeys(("AttemptTimes", "JobTimes", "Marks"), "model.goodput"),
    **dict.fromkeys(("CoschedulingConfig", "JobSpec", "SpareFor", "SparePurpose"), "model.job_spec"),
    **dict.fromkeys(("Eviction", "Gang", "Job", "PastAttempt", "Promise", "Task"), "model.jobs"),
    **dict.fromkeys(("JobState", "TaskState"), "model.lifecycle"),
    **dict.fromkeys(("Notice", "NoticeKind"), "model.notices"),
    "PriorityBand": "model.options",
    **dict.fromkeys(("FailureCause", "TimeLost"), "model.time_lost"),
    "GroupSpec": "model.job_group",
    "JobRecord": "state.records",
}


def test_successor_forgets_earliest_ended_jobs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 2)
    world = World()
    for name in ("long", "short", "last"):
        world.submit(name)
    for name in ("short", "long"):
        world.now += 1.0
        world.do(TimePassedEvent(world.now))
        world.do(JobCancelledEvent(name, "enough"))
    new, _ = successor(world)
    new.do(JobCancelledEvent("last", "enough"))
    assert list(new.state.jobs) == ["long", "last"]
