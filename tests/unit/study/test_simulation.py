"""What happens to jobs in virtual time, second by second."""

import math
from typing import Any

import pytest

from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.state.events import WorkerDrainedEvent
from iris_ray.study import Simulation
from iris_ray.study.agenda import Agenda
from tests.support.simulations import HOUR, TIMINGS, attempts, endless, gang, slices, tasks


def course(simulation: Simulation, job_id: str) -> list[tuple[str, float, float | None, float | None, float | None]]:
    """How each attempt of a job ended, and when it was assigned, began, ended, and was gone."""
    return [
        (one.outcome, one.assigned_at, one.began_at, one.ended_at, one.freed_at) for one in attempts(simulation, job_id)
    ]


def states(simulation: Simulation) -> dict[str, JobState]:
    return {job_id: found.state for job_id, found in simulation.state.jobs.items()}


# -- running -----------------------------------------------------------------------------------------------------------


def test_job_is_launched_runs_and_leaves_slice() -> None:
    simulation = slices()
    simulation.submit(gang("one"), at=100.0)
    simulation.run_until(2 * HOUR)
    assert course(simulation, "one") == [("success", 100.0, 110.0, 3710.0, 3712.0)]
    assert states(simulation) == {"one": JobState.SUCCEEDED}
    assert not simulation.state.holders
    record = simulation.history.jobs["one"]
    assert (record.submitted_at, record.assigned_at, record.ended_at) == (100.0, 100.0, 3710.0)
    assert record.state == "SUCCEEDED"


def test_next_job_starts_when_slice_is_free() -> None:
    simulation = slices()
    simulation.submit(gang("one"))
    simulation.submit(gang("two"))
    simulation.run_until(HOUR)
    assert "in use by one" in simulation.why("two")
    simulation.run_until(3 * HOUR)
    assert course(simulation, "two") == [("success", 3612.0, 3622.0, 7222.0, 7224.0)]


def test_gang_on_half_its_slices_takes_twice_as_long() -> None:
    simulation = slices()
    simulation.submit(gang("flexible", [1, 2]))
    simulation.run_until(3 * HOUR)
    assert course(simulation, "flexible") == [("success", 0.0, 10.0, 7210.0, 7212.0)]


def test_tasks_without_tpu_run_one_by_one() -> None:
    simulation = Simulation(TIMINGS, check_every=1)
    simulation.hosts.add_hosts(2, cpus=4.0)
    simulation.submit(tasks("tasks", replicas=3, cpus=3.0))
    simulation.run_until(3 * HOUR)
    assert [one.assigned_at for one in attempts(simulation, "tasks")] == [0.0, 0.0, 3612.0]
    assert states(simulation) == {"tasks": JobState.SUCCEEDED}
    assert simulation.history.jobs["tasks"].ended_at == 7222.0


def test_warm_slices_serve_own_pool_and_others_reclaim_them() -> None:
    simulation = slices()
    simulation.submit(gang("one", owner="ann", keep_warm_s=600.0))
    simulation.submit(gang("two", owner="ann", keep_warm_s=600.0), at=3700.0)
    simulation.submit(gang("three", owner="bob"), at=7500.0)
    simulation.run_until(4 * HOUR)
    assert course(simulation, "two")[0][:3] == ("success", 3700.0, 3701.0)
    assert course(simulation, "three")[0][:3] == ("success", 7500.0, 7513.0)
    assert not simulation.state.holders


def test_cancelled_job_frees_its_slice() -> None:
    simulation = slices()
    simulation.submit(gang("one"))
    simulation.cancel("one", at=1000.0)
    simulation.run_until(HOUR)
    assert course(simulation, "one") == [("stopped", 0.0, 10.0, 1000.0, 1005.0)]
    assert simulation.history.jobs["one"].state == "KILLED"


def test_job_returns_when_told() -> None:
    simulation = slices()
    simulation.submit(gang("one", run_s=1e9))
    simulation.finish("one", at=500.0)
    simulation.run_until(HOUR)
    assert course(simulation, "one") == [("success", 0.0, 10.0, 500.0, 502.0)]


# -- losses ------------------------------------------------------------------------------------------------------------


def test_preempted_gang_continues_from_last_save() -> None:
    simulation = slices(2)
    simulation.submit(gang("one", save_every_s=600.0))
    simulation.agenda.at(2000.0, simulation.hosts.preempt, "v4-16-0")
    simulation.run_until(2 * HOUR)
    # It had worked for 1,990 s, and saved 1,800 of them.
    assert course(simulation, "one") == [
        ("stopped", 0.0, 10.0, 2000.0, 2005.0),
        ("success", 2000.0, 2010.0, 3810.0, 3812.0),
    ]
    assert [one.kept_s for one in attempts(simulation, "one")] == [1800.0, 1800.0]
    assert [one.lost_s for one in attempts(simulation, "one")] == [190.0, 0.0]
    assert simulation.state.jobs["one"].preemptions == 1


def test_gang_heeding_its_notice_loses_nothing() -> None:
    simulation = slices(2)
    simulation.submit(gang("one", save_s=20.0))
    simulation.agenda.at(2000.0, simulation.hosts.preempt, "v4-16-0", 60.0)
    simulation.run_until(2 * HOUR)
    # It saves until 2,020 and goes on elsewhere once its processes are gone.
    assert course(simulation, "one") == [
        ("moved", 0.0, 10.0, 2020.0, 2025.0),
        ("success", 2025.0, 2026.0, 3616.0, 3618.0),  # on the replacement, which was ready
    ]
    assert sum(one.lost_s for one in attempts(simulation, "one")) == 0.0


@pytest.mark.parametrize("behaviour", [{"heeds_notices": False}, {"save_s": 90.0}], ids=["does not", "too slow"])
def test_gang_ignoring_its_notice_loses_unsaved_work(behaviour: dict[str, Any]) -> None:
    simulation = slices(2)
    simulation.submit(gang("one", **behaviour))
    simulation.agenda.at(2000.0, simulation.hosts.preempt, "v4-16-0", 60.0)
    simulation.run_until(2 * HOUR)
    assert [one.outcome for one in attempts(simulation, "one")] == ["stopped", "success"]
    assert attempts(simulation, "one")[0].lost_s == 2050.0


def test_slice_is_reused_once_its_lost_host_is_back() -> None:
    simulation = slices()
    simulation.submit(gang("one"))
    simulation.agenda.at(1000.0, simulation.hosts.lose, ["v4-16-0-host-1"], "it died", 500.0)
    simulation.run_until(1200.0)
    assert "host 1 of 2 is missing" in simulation.why("one")
    simulation.run_until(2 * HOUR)
    assert course(simulation, "one") == [
        ("stopped", 0.0, 10.0, 1000.0, 1005.0),
        ("success", 1500.0, 1510.0, 5110.0, 5112.0),
    ]
    assert [(at, totals.get("TPU", 0.0)) for at, totals in simulation.history.capacity] == [
        (0.0, 8.0), (1000.0, 4.0), (1500.0, 8.0),
    ]  # fmt: skip


def test_spare_takes_over_at_once() -> None:
    simulation = slices(2)
    simulation.submit(gang("one", spares=1))
    simulation.agenda.at(2000.0, simulation.hosts.preempt, "v4-16-0")
    simulation.run_until(2 * HOUR)
    assert course(simulation, "one")[1][:3] == ("success", 2000.0, 2001.0)
    assert {one.outcome for one in simulation.history.attempts if one.spare} == {"dropped"}


def test_spare_placed_and_dropped_by_one_plan_holds_nothing() -> None:
    simulation = slices()
    simulation.submit(gang("one", spares=1, heeds_notices=False))
    simulation.run_until(100.0)
    hosts = simulation.hosts.slices["v4-16-0"]
    simulation.apply([WorkerDrainedEvent(host, "maintenance", NoticeKind.MAINTENANCE, HOUR) for host in hosts])
    simulation.hosts.add_slices("v4-16", 2)  # one for the replacement and one for the spare, which does as well
    simulation.run_until(200.0)
    assert [one.id.job_id for one in simulation.history.attempts if one.freed_at is None] == ["one", "one/spare-1"]
    assert [one.freed_at for one in attempts(simulation, "one/replacement-2")] == [100.0]


def test_gang_on_few_slices_moves_to_more() -> None:
    simulation = slices(2)
    simulation.submit(gang("first", run_s=1000.0))
    simulation.submit(gang("grows", [1, 2], grow_after=100.0), at=1.0)
    simulation.run_until(3 * HOUR)
    assert [(one.outcome, len(one.groups)) for one in attempts(simulation, "grows")] == [("moved", 1), ("success", 2)]
    assert sum(one.lost_s for one in attempts(simulation, "grows")) == 0.0


# -- failures ----------------------------------------------------------------------------------------------------------


def test_failing_job_is_retried_within_its_budget() -> None:
    simulation = slices()
    simulation.submit(gang("fails", fails_after_s=100.0, max_retries_failure=2))
    simulation.run_until(HOUR)
    assert [one.outcome for one in attempts(simulation, "fails")] == ["failure"] * 3
    assert simulation.history.jobs["fails"].state == "FAILED"


def test_failed_launches_pause_and_retry() -> None:
    simulation = slices(look_again_s=1.0)
    simulation.submit(gang("hopeless", launch_fails=True))
    simulation.run_until(100.0)
    found = attempts(simulation, "hopeless")
    assert [one.outcome for one in found[:2]] == ["no launch"] * 2
    assert found[1].assigned_at > found[0].assigned_at + TIMINGS.failed_launch


def test_unlaunchable_job_ends_at_little_cost_to_others() -> None:
    """On two slices, with another user whose queue is endless. It pauses longer and longer."""
    simulation = slices(2, look_again_s=1.0)
    simulation.submit(gang("hopeless", 2, launch_fails=True, user="bob"))
    simulation.keep_waiting(endless("ann", minutes=(10, 10)), waiting=3)
    simulation.run_until(8 * HOUR)
    assert len(attempts(simulation, "hopeless")) == 19
    used_s = sum(one.ended_at - one.began_at for one in simulation.history.attempts if one.began_at and one.ended_at)
    assert used_s > 0.75 * 2 * 8 * HOUR
    assert "hopeless" in {job_id for job_id, state in states(simulation).items() if state is JobState.UNSCHEDULABLE}


def test_one_users_crashes_leave_only_slice_to_others() -> None:
    simulation = slices(1)
    for number in range(4):
        crashing = gang(f"ann-{number}", user="ann", fails_after_s=60.0, crashes=True, max_retries_failure=0)
        simulation.submit(crashing, at=number * 100.0)
    simulation.submit(gang("bob", user="bob"), at=500.0)
    simulation.run_until(3 * HOUR)
    assert states(simulation) == {"bob": JobState.SUCCEEDED} | {f"ann-{n}": JobState.FAILED for n in range(4)}
    assert attempts(simulation, "bob")[0].assigned_at == 500.0


def test_job_leaves_unlaunchable_host_at_second_try() -> None:
    simulation = slices(3)
    simulation.pools.bad_hosts.update(worker.node_id for worker in simulation.state.fleet.slice_workers("v4-16-0"))
    for number in range(3):
        simulation.submit(gang(f"job-{number}", run_s=60.0))
    simulation.run_until(HOUR)
    assert set(states(simulation).values()) == {JobState.SUCCEEDED}
    assert max(len(attempts(simulation, f"job-{number}")) for number in range(3)) == 2


# -- many jobs ---------------------------------------------------------------------------------------------------------


def test_user_with_endless_queue_always_has_waiting_jobs() -> None:
    simulation = slices(2)
    simulation.keep_waiting(endless("ann", minutes=(10, 10)), waiting=3)
    simulation.run_until(HOUR)
    assert len(simulation.state.pending()) == 3
    assert len(simulation.history.attempts) == 2 * 6


def test_traced_jobs_come_at_their_times() -> None:
    simulation = slices(3)
    simulation.submit_all((100.0 * number, one) for number, one in zip(range(3), endless("ann"), strict=False))
    simulation.run_until(HOUR)
    assert [one.assigned_at for one in simulation.history.attempts] == [0.0, 100.0, 200.0]


def test_planning_at_intervals_only_delays_starts() -> None:
    simulation = slices(plan_every_s=60.0)
    simulation.submit(gang("one"), at=61.0)
    simulation.run_until(2 * HOUR)
    assert course(simulation, "one") == [("success", 120.0, 130.0, 3730.0, 3732.0)]


def test_time_advances_despite_rounded_interval() -> None:
    simulation = slices(plan_every_s=0.1)
    simulation.submit(gang("one"), at=0.9000000000000001)  # by 0.1 it is 9, and 9 * 0.1 is less
    simulation.run_until(2 * HOUR)
    assert states(simulation) == {"one": JobState.SUCCEEDED}


# -- the virtual clock ------------------------------------------------------------------------------------------------


def test_due_work_runs_by_time_then_planning_order() -> None:
    agenda, done = Agenda(), list[tuple[float, str]]()

    def note(what: str) -> None:
        done.append((agenda.now, what))

    agenda.at(5.0, note, "third")
    agenda.at(2.0, note, "first")
    agenda.after(2.0, note, "second")
    agenda.at(9.0, note, "too late")
    agenda.at(math.inf, note, "never")
    agenda.run_until(8.0)
    assert done == [(2.0, "first"), (2.0, "second"), (5.0, "third")]
    assert (agenda.now, agenda.next_at) == (8.0, 9.0)


def test_work_planned_meanwhile_runs_and_never_in_the_past() -> None:
    agenda, done = Agenda(), list[float]()

    def plan_more() -> None:
        agenda.after(1.0, lambda: done.append(agenda.now))
        agenda.at(0.0, lambda: done.append(agenda.now))

    agenda.at(3.0, plan_more)
    agenda.run_until(10.0)
    assert done == [3.0, 4.0]
    assert agenda.next_at == math.inf
