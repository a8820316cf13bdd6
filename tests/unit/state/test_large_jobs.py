"""Jobs of many tasks: what is recorded of them, and what a successor makes of it."""

from dataclasses import dataclass, field

import pytest

from iris_ray.errors import CorruptRecordError
from iris_ray.model.jobs import Job
from iris_ray.state import ControllerState, records
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import JobCancelledEvent, JobRestoredEvent
from iris_ray.state.records import GANGS_PER_CHUNK, JobRecord, require_whole
from tests.support.worlds import S, World, cpu_host

Part = tuple[str, int | None]
"""Job id, and the number of a chunk; None for the head."""


def changed_parts(state: ControllerState) -> dict[Part, bytes | None]:
    """Return what is to be written now; None is to be deleted. The state takes it for written."""
    parts: dict[Part, bytes | None] = {}
    for job_id, chunks in state.unrecorded.items():
        record = state.record(job_id)
        parts[job_id, None] = None if record is None else record.head()
        found = dict.fromkeys(chunks) if record is None else dict(record.chunks(chunks))
        parts |= {(job_id, number): chunk for number, chunk in found.items()}
    state.unrecorded.clear()
    return parts


@dataclass
class Recorded:
    """The values that were written so far."""

    parts: dict[Part, bytes] = field(default_factory=dict)

    def write(self, part: Part, value: bytes | None) -> None:
        if value is None:
            self.parts.pop(part, None)
        else:
            self.parts[part] = value

    def write_all(self, state: ControllerState) -> None:
        """Write what has changed."""
        for part, value in changed_parts(state).items():
            self.write(part, value)

    def records(self) -> list[JobRecord]:
        """Return what a successor reads, the oldest job first."""
        found = []
        for (job_id, number), head in self.parts.items():
            if number is None:
                chunks = {n: value for (of, n), value in self.parts.items() if of == job_id and n is not None}
                found.append(require_whole(JobRecord.joined(head, [chunks[n] for n in sorted(chunks)]), job_id))
        return sorted(found, key=lambda record: record.job.number)


def submit(world: World, replicas: int, **changes: object) -> Job:
    return world.submit_tasks("job", replicas, resources={"CPU": 1.0}, **changes)


@pytest.fixture
def world() -> World:
    """Room for eight tasks."""
    world = World()
    world.do(cpu_host("h"))
    return world


def successor(recorded: Recorded) -> World:
    new = World()
    new.do(cpu_host("h"))
    apply_all(new.state, map(JobRestoredEvent, recorded.records()))
    new.state.check()
    return new


def test_change_of_one_task_rewrites_only_its_chunk(world: World) -> None:
    count = 3 * GANGS_PER_CHUNK
    job = submit(world, count)
    assert world.state.unrecorded == {"job": {0, 1, 2}}
    changed_parts(world.state)
    world.schedule()
    assert changed_parts(world.state).keys() == {("job", None), ("job", 0)}
    world.report(job, S.RUNNING, 5)
    world.report(job, S.SUCCEEDED, 5)
    world.confirm(job, index=5)
    parts = changed_parts(world.state)
    assert parts.keys() == {("job", None), ("job", 0)}
    world.schedule()
    assert sum(len(part or b"") for part in parts.values()) < 10_000


def test_large_job_is_restored_unchanged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks that wait have left the queue and come again: their order is not that of their numbers."""
    monkeypatch.setattr(records, "GANGS_PER_CHUNK", 3)
    recorded = Recorded()
    job = submit(world, 20, max_retries_failure=3)
    world.schedule()
    for index in (6, 2, 4):
        world.report(job, S.RUNNING, index)
        world.report(job, S.FAILED, index)
        recorded.write_all(world.state)
    world.confirm(job, index=2)
    recorded.write_all(world.state)
    assert list(job.pending) == [*range(8, 20), 6, 2, 4]
    again = successor(recorded).state.jobs["job"]
    assert again == job
    assert list(again.pending) == list(job.pending)


def forget_job(world: World) -> None:
    """It ends, and so does the next one."""
    for job_id in ("job", "next"):
        if job_id not in world.state.jobs:
            world.submit_tasks(job_id)
        world.do(JobCancelledEvent(job_id, "enough"))


def test_forgotten_job_takes_its_chunks_along(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "GANGS_PER_CHUNK", 3)
    monkeypatch.setattr("iris_ray.state.job_table.FINISHED_JOBS_KEPT", 1)
    recorded = Recorded()
    submit(world, 10)
    recorded.write_all(world.state)
    assert len(recorded.parts) == 5
    forget_job(world)
    recorded.write_all(world.state)
    assert recorded.parts.keys() == {("next", None)}
    submit(world, 2)
    recorded.write_all(world.state)
    assert recorded.parts.keys() == {("next", None), ("job", None)}
    assert len(successor(recorded).state.jobs["job"].gangs) == 2


def test_finished_jobs_are_forgotten_by_memory_use(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few large ones, or very many small ones; but never the one that finished last."""
    monkeypatch.setattr("iris_ray.state.job_table.FINISHED_BYTES_KEPT", 50_000)

    def ends(job_id: str, tasks: int, reason: str = "enough") -> list[str]:
        world.submit_tasks(job_id, tasks)
        world.do(JobCancelledEvent(job_id, reason))
        world.state.check()
        return list(world.state.jobs)

    assert ends("a", 20) == ["a"]
    assert ends("b", 20) == ["a", "b"]
    assert ends("c", 20) == ["b", "c"]
    assert ends("d", 100) == ["d"]
    assert ends("e", 1) == ["e"]
    assert ends("f", 2, reason="x" * 20_000) == ["f"], "the words count, too"
    assert ends("g", 1) == ["g"]
    changed_parts(world.state)
    new = World()
    for number in range(4):
        job_id = f"later-{number}"
        ends(job_id, 20)
        new.restore(world, job_id)
    assert list(new.state.jobs) == [f"later-{number}" for number in range(4)]
    new.submit_tasks("last", 20)
    new.do(JobCancelledEvent("last", "enough"))
    assert list(new.state.jobs) == ["later-3", "last"]


def test_ended_jobs_record_with_older_chunk_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "GANGS_PER_CHUNK", 3)
    recorded = Recorded()
    submit(world, 10)
    world.schedule()
    recorded.write_all(world.state)
    world.do(JobCancelledEvent("job", "enough"))
    parts = changed_parts(world.state)
    for part in (("job", None), ("job", 1)):
        recorded.write(part, parts[part])
    with pytest.raises(CorruptRecordError, match="it is over, and some of its tasks are not"):
        recorded.records()


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_record_lacking_a_chunk_is_refused(world: World, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    monkeypatch.setattr(records, "GANGS_PER_CHUNK", 3)
    recorded = Recorded()
    submit(world, 10)
    recorded.write_all(world.state)
    del recorded.parts["job", missing]
    with pytest.raises(CorruptRecordError, match="some of its tasks are missing"):
        recorded.records()
