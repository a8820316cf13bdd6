"""What is measured of the queue, jobs, hosts and users."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import iris_ray
from iris_ray.actors.calls.service_parts import ServiceHealth
from iris_ray.errors import JobCancelledError
from iris_ray.goodput.controller import MEASURE_S
from iris_ray.goodput.metrics import METRICS, MOST_VALUES, ControllerFacts, Measurements, MetricKind
from iris_ray.model.goodput import Marks
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState as S
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team
from iris_ray.state import job_table
from iris_ray.state.events import AttemptMarkedEvent, JobCancelledEvent, TaintedEvent, TeamsSetEvent, TimePassedEvent
from tests.support.meters import RecordedMeter
from tests.support.virtual_cluster import VirtualCluster, played
from tests.support.worlds import World, add_slices, attempt_id

INTERACTIVE = "band=interactive,tpu_type=v4-16"


class Measured(World):
    """A world that is measured: every plan and, when a test looks, what has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = RecordedMeter()
        self.unusable: set[str] = set()
        self.measurements = Measurements(self.state, self.unusable, self.meter, self.now)

    def place(self, *jobs: Job) -> None:
        """Commit a plan that gives hosts to these jobs."""
        self.schedule()
        for job in jobs:
            self.measurements.placed(job, job.gang, self.now)

    def run(self, job: Job) -> None:
        """Have all tasks run, now."""
        self.do(TimePassedEvent(self.now))
        self.report_all(job, S.RUNNING)

    def look(self, after_s: float = 0.0) -> RecordedMeter:
        self.now += after_s
        self.measurements.look(self.now)
        return self.meter


@pytest.fixture
def world() -> Iterator[Measured]:
    world = Measured()
    add_slices(world, "v4-16-0", "v4-16-1")
    yield world
    world.check()


def test_waits_launches_and_recoveries_are_measured_exactly(world: Measured) -> None:
    job = world.submit("train", user="ann", max_retries_preemption=3, max_retries_failure=3)
    world.now += 30.0
    world.place(job)
    world.look(after_s=2.0)
    world.now += 2.0
    world.run(job)
    seen = world.look(after_s=9.0).seen
    assert seen["iris_admission_wait_seconds", INTERACTIVE] == [30.0]
    assert seen["iris_launch_seconds", "tpu_type=v4-16"] == [4.0]
    world.report(job, S.WORKER_FAILED)
    world.now += 5.0
    world.confirm(job)
    world.place(job)
    world.now += 1.5
    world.run(job)
    meter = world.look()
    assert meter.seen["iris_recovery_seconds", "tpu_type=v4-16,cause=preemption"] == [6.5]
    assert meter.total["iris_attempts_ended_total", f"{INTERACTIVE},cause=preemption"] == 1
    world.finish(job)
    assert world.look().total["iris_jobs_finished_total", f"{INTERACTIVE},state=succeeded"] == 1
    assert world.look().total["iris_jobs_finished_total", f"{INTERACTIVE},state=succeeded"] == 1, "once only"
    spent = {labels: amount for (name, labels), amount in meter.total.items() if "finished_chip" in name}
    assert {labels.partition("kind=")[2]: chips for labels, chips in spent.items() if chips} == {
        "launch": 4.0 * 8,
        "unmeasured": 9.0 * 8,
        "infrastructure_recovery_from_disruption": 1.5 * 8,
    }
    assert len(seen["iris_launch_seconds", "tpu_type=v4-16"]) == 2


def test_attempts_between_two_measurements_are_counted(world: Measured) -> None:
    job = world.submit("train", max_retries_failure=3)
    for wait_s in (1.0, 2.0):
        world.place(job)
        world.now += wait_s
        world.run(job)
        world.long_run()
        world.report(job, S.FAILED)
        world.confirm(job)
    world.place(job)
    world.now += 3.0
    world.run(job)
    world.finish(job)
    seen = world.look().seen
    assert seen["iris_launch_seconds", "tpu_type=v4-16"] == [1.0, 2.0, 3.0]
    assert seen["iris_recovery_seconds", "tpu_type=v4-16,cause=failure"] == [2.0, 3.0]


def test_time_lost_is_measured_once_gang_makes_progress(world: Measured) -> None:
    """It crashes a second after its second step, is away for 2 s, and makes that step again after 3 s."""
    job = world.submit(user="ann", max_retries_failure=3)
    world.place(job)
    world.run(job)
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(((0, 1.0), (1, 2.0)))))
    world.now += 3.0
    world.report(job, S.FAILED)
    world.confirm(job, 1)
    world.now += 2.0
    world.place(job)
    world.run(job)
    series = "iris_time_lost_seconds", "tpu_type=v4-16,cause=crashed"
    assert series not in world.look(after_s=3.0).seen
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(((1, 3.0), (2, 4.0)))))
    assert world.look(after_s=1.0).seen[series] == [1.0 + 2.0 + 3.0]
    meter = world.look(after_s=1.0)
    assert meter.seen[series] == [6.0], "it is measured once"
    assert meter.total["iris_time_lost_chip_seconds_total", "user=ann,cause=crashed"] == pytest.approx(8 * 4.0)


def test_hosts_that_no_job_gets_are_counted_as_unusable(world: Measured) -> None:
    free = {"tpu_type=v4-16,condition=free": 4}
    world.unusable |= {"without-labels", "v4-16-0-0"}  # that one has got a wrong label, and is counted as it was
    assert world.look().shown("iris_hosts") == free | {"tpu_type=none,condition=unusable": 1}
    world.unusable.clear()
    assert world.look().shown("iris_hosts") == free


def test_gauges_show_current_queue_hosts_and_users(world: Measured) -> None:
    train = world.start("train", user="ann")
    world.submit("waits", user="bob", slices=(2,), priority=PriorityBand.BATCH)
    world.do(TaintedEvent("v4-16-1", "drained", "a fan"))
    meter = world.look()
    assert meter.shown("iris_pending_jobs") == {"band=batch,tpu_type=v4-16": 1}
    assert meter.shown("iris_running_jobs") == {INTERACTIVE: 1}
    conditions = {"tpu_type=v4-16,condition=busy": 2, "tpu_type=v4-16,condition=closed": 2}
    assert meter.shown("iris_hosts") == conditions
    assert meter.shown("iris_user_chips") == {"user=ann": 8.0}
    assert world.look(after_s=10.0).total["iris_user_chip_seconds_total", "user=ann"] == 80.0
    world.finish(train)
    world.do(JobCancelledEvent("waits", "not needed"))
    world.lose("v4-16-1-0")
    meter = world.look()
    assert meter.shown("iris_hosts") == {"tpu_type=v4-16,condition=warm": 2, "tpu_type=v4-16,condition=closed": 1}
    assert not meter.shown("iris_pending_jobs")
    assert not meter.shown("iris_user_chips")
    assert meter.now["iris_pending_jobs", "band=batch,tpu_type=v4-16"] == 0, "not left at what it was"


def test_new_controller_does_not_recount_earlier_jobs(world: Measured) -> None:
    job = world.start("train", max_retries_failure=3)
    world.long_run()
    world.report(job, S.FAILED)
    again = RecordedMeter()
    measurements = Measurements(world.state, (), again, world.now)
    measurements.look(world.now)
    assert not again.total
    world.confirm(job)


def test_forgotten_jobs_among_many_changes_leave_no_measurements(
    world: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 1)
    for job_id in ("looked-at", "never-looked-at", "last"):
        job = world.submit(job_id)
        world.place(job)
        world.run(job)
        if job_id == "looked-at":
            world.look()
        world.finish(job)
    for _ in range(3000):
        world.state.show_anew("last")
    world.look()
    assert world.state.jobs.keys() == world.measurements._ends.keys() == {"last"}
    assert not world.measurements._starting


def test_users_beyond_limit_share_a_label(world: Measured) -> None:
    for number in range(MOST_VALUES + 20):
        job = world.start(f"job-{number}", user=f"user-{number}")
        world.look()
        world.finish(job)
    meter = world.look()
    users = {labels for name, labels in meter.now if name == "iris_user_chips"}
    assert len(users) == MOST_VALUES + 1
    assert "user=other" in users


def test_metric_names_follow_prometheus() -> None:
    for metric in METRICS:
        assert metric.name.startswith("iris_")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert metric.name.endswith("_seconds") or metric.kind is not MetricKind.HISTOGRAM
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)


# -- the Controller ----------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> ControllerFacts:
    return replace(ControllerFacts(7, "0.1.0", 1.7e9, [], 0.0, {"job": [], "record": []}), **changes)


def test_controller_measures_its_number_journal_and_set_aside_jobs(world: Measured) -> None:
    meter = world.meter
    told = facts(writings=[0.01, 2.0], writing_for=31.0, set_aside={"job": [1.6e9, 1.7e9], "record": []})
    world.measurements.look_at_controller(told)
    assert meter.shown("iris_controller_epoch") == {"version=0.1.0": 7}
    assert meter.shown("iris_controller_alive_timestamp_seconds") == {"version=0.1.0": 1.7e9}
    assert meter.seen["iris_journal_seconds", ""] == [0.01, 2.0]
    assert meter.shown("iris_journal_waiting_seconds") == {"": 31.0}
    assert meter.shown("iris_set_aside") == {"kind=job": 2}
    assert meter.shown("iris_set_aside_newest_timestamp_seconds") == {"kind=job": 1.7e9}
    world.measurements.look_at_controller(facts())
    assert meter.shown("iris_set_aside") == meter.shown("iris_journal_waiting_seconds") == {}


def test_failing_services_are_named_and_their_failures_counted(world: Measured) -> None:
    meter = world.meter
    for health in ([("logs", None, 1)], [("logs", "ValueError: broken", 3)], [("logs", None, 3)]):
        world.measurements.look_at_services([ServiceHealth(*one) for one in health], [])
        trouble = health[0][1]
        assert meter.shown("iris_service_failing") == ({"service=logs": 1.0} if trouble else {})
    assert meter.total["iris_service_failures_total", "service=logs"] == 3


def test_gauges_of_services_are_set_until_they_are_published_no_more(world: Measured) -> None:
    meter = world.meter
    waits = "iris_provisioning_oldest_request"
    published = [
        *((waits, (f"v6e-{number}", "us-east5-a"), float(number)) for number in range(MOST_VALUES + 2)),
        ("iris_missing_slices", ("v6e-0",), 2.0),
        ("iris_missing_slices", ("too", "many labels"), 2.0),
        ("unknown", (), 1.0),
    ]
    world.measurements.look_at_services([], published)
    assert meter.shown("iris_missing_slices") == {"tpu_type=v6e-0": 2.0}
    assert meter.shown(waits)["tpu_type=v6e-7,source=us-east5-a"] == 7.0
    assert meter.shown(waits)["tpu_type=other,source=us-east5-a"] == MOST_VALUES + 1, (
        "the largest of those that share it"
    )
    world.measurements.look_at_services([], [])
    assert meter.shown("iris_missing_slices") == meter.shown(waits) == {}


@played()
async def test_running_controller_measures_itself_every_few_seconds(cluster: VirtualCluster) -> None:
    waits = cluster.run("waits", (4,))
    await asyncio.sleep(3 * MEASURE_S)
    meter = cluster.part_of_controller("goodput")._measurements._meter
    assert isinstance(meter, RecordedMeter)
    assert meter.shown("iris_controller_epoch") == {f"version={iris_ray.__version__}": 1}
    assert meter.shown("iris_controller_alive_timestamp_seconds")
    assert meter.seen["iris_journal_seconds", ""]
    assert meter.shown("iris_missing_slices") == {"tpu_type=v4-16": 1}
    assert meter.shown("iris_missing_slices_seconds")
    await cluster.ask("cancel", "waits", "enough", "")
    with pytest.raises(JobCancelledError):
        await waits


def test_quotas_and_use_of_teams_are_measured(world: Measured) -> None:
    teams = Team("ads", {"v4-16": Quota(8)}), Team("ads/eu"), Team("sales", {"v5p": Quota(4)})
    world.do(TeamsSetEvent(teams))
    world.submit("train", user="ann", team="ads/eu")
    world.schedule()
    meter = world.look()
    assert meter.now["iris_team_quota_chips", "team=ads,tpu_type=v4-16"] == 8
    assert meter.now["iris_team_chips", "team=ads,tpu_type=v4-16"] == 8
    assert meter.now["iris_team_quota_chips", "team=sales,tpu_type=v5p"] == 4
    assert meter.now["iris_team_chips", "team=ads/eu,tpu_type=v4-16"] == 8
    assert ("iris_team_quota_chips", "team=sales,tpu_type=v4-16") not in meter.now
    world.do(TeamsSetEvent(()))
    assert world.look().now["iris_team_quota_chips", "team=ads,tpu_type=v4-16"] == 0
