"""What a Controller hands over in a file arrives whole, whatever has happened in its cluster."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.actors.controller import journal as journal_module
from iris_ray.actors.controller.journal import Journal
from iris_ray.goodput.calls import UserDay
from iris_ray.goodput.sums import ChipState, Sums
from iris_ray.handover.controller import hand_over, taken_over
from iris_ray.handover.file import END, Line, read, spec_of, written
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.goodput import TimeKind
from iris_ray.model.job_spec import JobSpec
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import SettingSetEvent, TaintedEvent, TimePassedEvent
from tests.proofs.drawn_worlds import WORLDS, RandomWorld
from tests.support.proofs import examples
from tests.support.ray_in_process import Store

SETTINGS = st.dictionaries(
    st.sampled_from(["evictions", "eviction_grace_s"]),
    st.builds(WasSet, st.sampled_from(["on", "off"]), st.sampled_from(["ann", "bob"]), st.floats(1e9, 2e9)),
)
AMOUNTS = st.dictionaries(st.sampled_from([kind.value for kind in TimeKind]), st.integers(0, 10**6).map(float))
DAYS = st.lists(
    st.builds(UserDay, st.integers(0, 30_000), st.sampled_from(["ann", "bob"]), st.integers(0, 9), AMOUNTS, AMOUNTS),
    max_size=4,
    unique_by=lambda day: (day.day, day.user),
)
CHIPS = st.dictionaries(st.sampled_from(ChipState), st.integers(0, 10**6).map(float))


def recorded(state: ControllerState, journal: Journal) -> list[Line]:
    """What the next export of this Controller has."""
    asyncio.run(journal.take_over(state))
    return hand_over(Journal())[0]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ClusterStore", lambda: STORE)


STORE = Store()


@pytest.mark.usefixtures("store")
@settings(max_examples=examples(60))
@given(drawn=WORLDS, was_set=SETTINGS, days=DAYS, chips=CHIPS)
def test_export_of_import_equals_the_export(
    drawn: dict[str, Any], was_set: dict[str, WasSet], days: list[UserDay], chips: dict[ChipState, float]
) -> None:
    world = RandomWorld(drawn["slices"], drawn["cpu_hosts"], drawn["kinds"], drawn["jobs"])
    for name, value in was_set.items():
        world.do(SettingSetEvent(name, WasSet("7", value.user, value.at) if name == "eviction_grace_s" else value))
    world.do(TaintedEvent("a", "closed", "by hand"))
    for happenings in drawn["cycles"]:
        for what, pick in happenings:
            world.happen(what, pick)
        world.schedule()
    before = begun(world.state, world.now)
    sums = Sums()
    for day in days:
        sums.users.include(day)
    sums.fleet.add("2026-11-26", chips, 2.0)
    before.service_records.write("goodput", sums.to_json())
    first = recorded(world.state, before)

    export = read(written({"iris_ray": "0.1.0"}, [*map(as_read, first), END]), "the file")
    assert not export.unknown
    after = begun(new := ControllerState(), world.now)
    lines, sums = lines_but_jobs(first), Sums()
    for line in lines:
        sums.add_line(line)
    after.service_records.write("goodput", sums.to_json())
    events = taken_over(json.dumps(lines).encode(), after.clock, after.clock.wall(after.clock.now()))
    apply_all(new, [TimePassedEvent(world.now), *events])
    new.check()
    assert sorted_lines(recorded(new, after)) == sorted_lines(first)
    assert new.limits.table == world.state.limits.table
    assert new.settings.was_set == world.state.settings.was_set

    specs = {line["job_id"]: spec_of(line["spec"]) for line in export.lines["job"]}
    left = {id_: job for id_, job in world.state.jobs.items() if job.over is None and job.spec.spare_for is None}
    assert specs.keys() == left.keys()
    for job_id, spec in specs.items():
        assert what_it_asks(spec) == what_it_asks(left[job_id].spec)
        used = left[job_id].failures if left[job_id].spec.is_one_gang else 0
        assert spec.max_retries_failure == max(0, left[job_id].spec.max_retries_failure - used)


def begun(state: ControllerState, now: float) -> Journal:
    """The journal of a new Controller, on an empty store, whose clock is near those of the events."""
    STORE.values.clear()
    journal = Journal()
    journal.begin()
    journal.clock._ahead += now - journal.clock.now()
    return journal


def as_read(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(line))
    return found


def lines_but_jobs(found: list[Line]) -> list[dict[str, Any]]:
    return [as_read(line) for line in found if line["kind"] not in ("job", "finished")]


def sorted_lines(found: list[Line]) -> list[str]:
    """Without times that go on: usage decays, and the clock of the next Controller is another one."""
    lines = (line for line in lines_but_jobs(found) if line["kind"] != "usage")
    return sorted(json.dumps(line, sort_keys=True) for line in lines)


def what_it_asks(spec: JobSpec) -> dict[str, Any]:
    charged = ("owner", "max_retries_failure", "max_retries_preemption", "max_task_failures", "_requirement")
    return {name: getattr(spec, name) for name in JobSpec.__slots__ if name not in charged}
