"""The jobs that wait for hosts, by kind."""

from iris_ray.state.waiting_jobs import WaitingJobs
from tests.support.worlds import World


def in_runs(jobs: WaitingJobs) -> list[list[str]]:
    return [[job.spec.job_id for job in run] for run in jobs.runs()]


def test_jobs_of_a_kind_are_together_by_age() -> None:
    world = World()
    for name, user in (("one", "ann"), ("other", "bob"), ("two", "ann"), ("three", "ann")):
        world.submit(name, user=user)
    assert in_runs(world.state.pending()) == [["one", "two", "three"], ["other"]]
    assert [job.spec.job_id for job in world.state.pending()] == ["one", "other", "two", "three"]


def test_job_that_has_run_is_apart() -> None:
    world = World("a")
    one = world.start("one", max_retries_preemption=1)
    world.submit("two")
    assert in_runs(world.state.pending()) == [["two"]]
    world.lose("a-1")
    assert one in world.state.pending()
    assert in_runs(world.state.pending()) == [["two"], ["one"]]


def test_younger_job_that_has_waited_longer_begins_a_run() -> None:
    world = World()
    for name, now in (("one", 100.0), ("two", 200.0), ("back", 50.0), ("late", 60.0)):
        world.now = now
        world.submit(name)
    assert in_runs(world.state.pending()) == [["one", "two"], ["back", "late"]]


def test_any_order_will_do() -> None:
    world = World()
    jobs = [world.submit(f"job-{number}") for number in range(4)]
    waiting = WaitingJobs(jobs[1:3])
    for job in (jobs[3], jobs[0]):
        waiting.sort_in(job)
    assert in_runs(waiting) == [[f"job-{number}" for number in range(4)]]
    waiting.check()
