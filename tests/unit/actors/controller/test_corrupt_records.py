"""A record that can't be read keeps nobody from starting: it is kept apart and named, and the other jobs come back."""

import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from iris_ray.actors.controller import containment
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.containment import Containment
from iris_ray.errors import ControllerUnavailableError, CorruptRecordError, UnknownNameError, UnknownRecordError
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.teams import Team
from iris_ray.state import ControllerState, records
from iris_ray.state.events import JobRestoredEvent
from iris_ray.state.instructions import Instructions
from iris_ray.state.records import JobRecord, require_whole
from tests.support.controller_in_process import ControllerInProcess
from tests.support.ray_in_process import Store
from tests.support.waiting import wait_until
from tests.support.worlds import World

HEADER = records.HEADER + b"\n"


def record_of_a_job() -> JobRecord:
    world = World("a")
    world.start("bad")
    record = world.state.record("bad")
    assert record is not None
    return record


def packed(values: object) -> bytes:
    return HEADER + zlib.compress(pickle.dumps(values))


def unpacked(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data.removeprefix(HEADER)))


def holding(attempt: AttemptId, allocation: Any) -> bytes:
    return JobRecord(record_of_a_job().job, {attempt: allocation}).to_bytes()


WHOLE = record_of_a_job().to_bytes()
JOB, GANGS, ALLOCATIONS = unpacked(WHOLE)
DAMAGED: dict[str, bytes] = {
    "nothing": b"",
    "something else": b"{}",
    "half of it": WHOLE[: len(WHOLE) // 2],
    "what zlib refuses": HEADER + b"not compressed",
    "what pickle refuses": HEADER + zlib.compress(b"not pickled"),
    "another object": packed({"job": 1}),
    "an unknown class": HEADER + zlib.compress(b"cno_such_module\nThing\n."),
    "a job without some fields": packed((JOB[1:], GANGS, ALLOCATIONS)),
    "a job without a spec": packed(((None, *JOB[1:]), GANGS, ALLOCATIONS)),
    "gangs that are none": packed((JOB, [1], ALLOCATIONS)),
    "tasks that are none": packed((JOB, [([None], *GANGS[0][1:])], ALLOCATIONS)),
    "without some tasks": packed((JOB, [(GANGS[0][0][1:], *GANGS[0][1:])], ALLOCATIONS)),
    "with an attempt of no gang": holding(AttemptId("bad", 1, 7), ()),
    "with hosts that are none": holding(AttemptId("bad", 1), ((1, 2, 3),)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_incomplete_record_is_refused(data: bytes) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011 — what is damaged raises anything
        require_whole(JobRecord.joined(data), "bad")
    assert not isinstance(refused.value, UnknownRecordError)


def test_complete_record_is_accepted() -> None:
    for make in (lambda w: w.submit("bad"), lambda w: w.start("bad"), lambda w: w.submit_tasks("bad")):
        world = World("a")
        make(world)
        record = world.state.record("bad")
        assert record is not None
        assert require_whole(JobRecord.joined(record.to_bytes()), "bad").job == record.job
        with pytest.raises(CorruptRecordError, match="it is that of bad"):
            require_whole(record, "other")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Two slices of two hosts each, their Controller, and a job that runs."""
    (tmp_path / "hosts").mkdir()
    with ControllerInProcess(tmp_path / "hosts", {"v4-16": 2}).installed(monkeypatch) as world:
        world.start_controller()
        world.start("good")
        yield world


def damage(world: ControllerInProcess, where: str, data: bytes) -> None:
    """Put something in place of a job's record, or of the taints, wherever the Controller has written it."""
    values = world.store.values
    entries = {key: pickle.loads(value) for key, value in values.items() if key.startswith("log/") and value}
    places: list[dict[str, Any]] = [values, *entries.values()]
    found = [(place, key) for place in places for key in place if key.startswith(where)]
    assert found
    for place, key in found:
        place[key] = data
    values.update({key: pickle.dumps(entry) for key, entry in entries.items()})


def restart(world: ControllerInProcess) -> None:
    before = world.controller()
    world.restart_controller()
    assert world.controller() is not before


def aside(world: ControllerInProcess) -> dict[str, str]:
    about = world.controller().about.remote().future().result(60)
    return {one.name: one.why for one in about["set_aside"]}


@pytest.mark.parametrize("what", ["nothing", "what zlib refuses", "a job without some fields"])
def test_damaged_record_is_named_and_others_restored(world: ControllerInProcess, what: str) -> None:
    world.submit("bad", slices=(2,))
    damage(world, "job/1/bad", DAMAGED[what])
    restart(world)
    assert world.jobs() == ["good"]
    assert list(aside(world)) == ["bad"]
    assert "Submit it again" in aside(world)["bad"]
    assert "bad" in world.iris("ls").stdout
    with pytest.raises(UnknownNameError, match="its record was damaged"):
        world.controller().job_status.remote("bad").future().result(60)
    copy = pickle.loads(world.store.values["corrupt/bad"])
    assert copy[2] == {"job/1/bad": DAMAGED[what]}
    world.succeed("good")
    world.succeed(world.start("later"))


def test_damaged_record_is_named_by_every_later_controller(world: ControllerInProcess) -> None:
    world.submit("bad", slices=(2,))
    damage(world, "job/1/bad", b"")
    for _ in range(2):
        restart(world)
        assert list(aside(world)) == ["bad"]
    assert "job/1/bad" not in world.store.values


def test_damaged_taints_are_left_out(world: ControllerInProcess) -> None:
    world.iris("host", "drain", "v4-16-1", "spot")
    for data in (b"{", b"[]", b'{"v4-16-1": {"spot": [7, null]}}'):
        damage(world, "taints/", data)
        restart(world)
        assert world.jobs() == ["good"]
        assert list(aside(world)) == ["the taints"]
        world.iris("host", "drain", "v4-16-1", "spot")


def test_damaged_teams_are_left_out_and_their_jobs_go_on(world: ControllerInProcess) -> None:
    for data in (b"{", b"[]", b"7", b'{"ads": 3}', b'{"ads/eu": {}}', b'{"ads": {"quota": {"v4-16": -1}}}'):
        world.set_teams(Team("ads", users=("ann",)))
        damage(world, "teams/", data)
        restart(world)
        assert world.jobs() == ["good"]
        assert list(aside(world)) == ["the teams"]
        assert not world._controllers[-1]._state.teams.teams


def test_damaged_settings_are_left_out_and_unknown_kept(world: ControllerInProcess) -> None:
    world.iris("cluster", "settings", "set", "evictions=off")
    for data in (b"{", b'[["evictions"]]', b'[["evictions", "no", "ann", 1]]', b'[["evictions", "off", 7, 1]]'):
        damage(world, "settings/", data)
        restart(world)
        assert world.jobs() == ["good"]
        assert list(aside(world)) == ["the settings"]
        world.iris("cluster", "settings", "set", "evictions=off")
    damage(world, "settings/", b'[["of_a_missing_service", "x", "ann", 1], ["evictions", "off", "ann", 1]]')
    for _ in range(2):  # the second time from what the first one has written
        restart(world)
        shown = world.json("cluster", "settings")
        assert shown["evictions"]["set_by"] == "ann"
        assert "of_a_missing_service" not in shown
    assert world._controllers[-1]._state.settings.was_set["of_a_missing_service"].text == "x", "the service may return"


def test_odd_keys_in_store_are_ignored(world: ControllerInProcess) -> None:
    log = "log/x", "log/1/x", "checkpoint/x", "checkpoint/1"
    for key in (*log, "epoch/x", "complete/", "taints/²", "job/", "aside/", "corrupt/odd"):
        world.store.values[key] = b"\xff"
    restart(world)
    assert "good" in world.jobs()
    assert "odd" in aside(world)


@pytest.mark.parametrize("entry", [b"\xff", pickle.dumps([1]), pickle.dumps({"job/1/good": 7})])
def test_damaged_log_entry_is_left_out_and_named(world: ControllerInProcess, entry: bytes) -> None:
    restart(world)
    assert world.jobs() == ["good"]
    last = max(key for key in world.store.keys("log/2/"))
    world.store.values[last] = entry
    restart(world)
    assert world.jobs() == ["good"]
    assert list(aside(world)) == [f"entry {last} of the log"]


def test_record_of_another_version_is_still_refused(world: ControllerInProcess) -> None:
    damage(world, "job/1/good", b"iris_ray job record 99\nfrom the future")
    world.restart_controller()
    with pytest.raises(UnknownRecordError, match="use the version"):
        world.jobs()


def test_unrestorable_record_is_left_out_by_next_process(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit("bad", slices=(2,))
    as_it_was: Callable[..., Any] = ControllerState.handle_event

    def failing(state: ControllerState, event: Any) -> Any:
        if isinstance(event, JobRestoredEvent) and event.record.job.spec.job_id == "bad":
            failed.append(world.ray.current_actor())
            raise TypeError("a defect")
        return as_it_was(state, event)

    failed: list[Any] = []
    monkeypatch.setattr(ControllerState, "handle_event", failing)
    restart(world)
    wait_until(lambda: failed and world.controller() is not failed[0])
    assert world.jobs() == ["good"]
    assert "TypeError: a defect" in aside(world)["bad"]
    third = world.controller()
    world.succeed("good")
    assert world.controller() is third
    assert not [key for key in world.store.values if key.startswith("unrestorable/")]


def test_record_refused_by_state_is_left_out_by_next_process(world: ControllerInProcess) -> None:
    world.start("bad", max_retries_preemption=5)
    record = world._controllers[-1]._state.record("bad")
    assert record is not None
    record = JobRecord.joined(record.to_bytes())
    first, second = record.job.gang.tasks
    first.node_id, second.state = "gone", TaskState.COSCHED_FAILED  # no move leads from there
    damage(world, "job/1/bad", record.to_bytes())
    restart(world)
    refuses = world.controller()
    with pytest.raises((ControllerUnavailableError, ActorDiedError)):  # whoever asks asks again
        refuses.list_jobs.remote().future().result(60)
    wait_until(lambda: world.controller() is not refuses)
    assert world.jobs() == ["good"]
    assert "bad" in aside(world)


def test_note_keeps_storable_part_of_error() -> None:
    """An error may name a file whose name is no Unicode."""
    store: Any = Store()
    for job_id in ("first", "second"):
        Containment(store, Clock()).note_unrestorable(job_id, ValueError("no file \udc80"))
    found = Containment(store, Clock()).unrestorable()
    assert found == dict.fromkeys(("first", "second"), "ValueError: no file \\udc80")


class SetClock(Clock):
    """A clock that a test sets."""

    at = 0.0

    def now(self) -> float:
        return self.at


def keep(store: Any, at: float, *names: str, size: int = 1) -> Containment:
    """Have a new Controller find records that can't be read."""
    contained = Containment(store, clock := SetClock())
    clock.at = at
    for name in names:
        contained.leave_out(name, {"job/1": b"x" * size}, "it is damaged")
    contained.keep_records()
    assert set(names) <= contained.records.keys()
    return contained


def kept(store: Any) -> list[str]:
    return [key.removeprefix("corrupt/") for key in sorted(store.keys("corrupt/"))]


def test_oldest_damaged_records_give_way_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    monkeypatch.setattr(containment, "MOST_RECORDS", 3)
    keep(store, 10.0, "a", "b")
    contained = keep(store, 20.0, "c", "d")
    assert kept(store) == ["a", "c", "d"]
    assert contained.records.keys() == {"a", "c", "d"}
    assert contained.records["a"].since == 10.0
    contained = keep(store, 30.0, "e", "f", "g", "h")
    assert kept(store) == ["e", "f", "g"]
    assert "was too large to be kept" in contained.records["h"].why


def test_oldest_damaged_records_give_way_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    monkeypatch.setattr(containment, "MOST_BYTES", 100)
    keep(store, 10.0, "a", size=60)
    keep(store, 20.0, "b", size=30)
    assert kept(store) == ["a", "b"]
    keep(store, 30.0, "c", size=50)
    assert kept(store) == ["b", "c"]
    keep(store, 40.0, "d", size=500)
    assert kept(store) == ["b", "c"]


async def test_old_damaged_records_are_forgotten() -> None:
    store: Any = Store()
    keep(store, 10.0, "a")
    contained = keep(store, 20.0, "b")
    assert await contained.forget_records(10.0) == 0
    assert await contained.forget_records(9.0) == 1
    assert kept(store) == list(contained.records) == ["b"]


def test_record_that_is_found_again_unchanged_is_not_new() -> None:
    store: Any = Store()
    keep(store, 10.0, "the sums")
    assert keep(store, 20.0, "the sums").records["the sums"].since == 10.0
    assert keep(store, 30.0, "the sums", size=2).records["the sums"].since == 30.0


def test_copy_that_cant_be_read_grows_old_as_well() -> None:
    store: Any = Store()
    store.put("corrupt/odd", b"\xff")
    for at in (10.0, 20.0):
        odd = keep(store, at).records["odd"]
        assert "can't be read either" in odd.why
        assert odd.since == 10.0


def test_note_of_a_job_that_is_forgotten_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store()
    monkeypatch.setattr(containment, "MOST_JOBS", 2)
    contained = Containment(store, Clock())
    for name in ("first", "second", "third"):
        contained.end(name, "recorded", TypeError("a defect"), ControllerState(), Instructions())
    contained.note_jobs(["first", "second", "third"])
    assert sorted(store.keys("aside/")) == ["aside/second", "aside/third"]
