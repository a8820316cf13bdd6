"""Which events of a job are news."""

from iris_ray.notify.core import facts_of, waits_since
from iris_ray.notify.destination import What, parse_destination
from iris_ray.state.events import TaskDispatchFailedEvent
from tests.support.worlds import World


def test_launches_that_fail_after_a_run_are_one_long_wait() -> None:
    world = World(*"abcdefghij")
    job = world.start(max_retries_preemption=5)
    world.now += 100.0
    world.lose("a-0")
    world.confirm(job)
    lost_at = world.now
    destination = parse_destination("slack:TEAM,on=waiting,wait=1h")
    assert waits_since(job) == lost_at
    told = set()
    while world.now < lost_at + 4 * 3600.0:
        world.now = max(world.now, job.gang.not_before, job.avoided_until)
        world.schedule()
        attempt = job.current_attempt(job.gang)
        world.do(TaskDispatchFailedEvent(attempt, "the interpreter ended", world.now))
        world.confirm(job, attempt.number)
        assert lost_at <= (waits_since(job) or 0.0) <= lost_at + 3600.0
        told |= {fact.number for fact in facts_of(job, destination, world.now) if fact.what is What.WAITING}
    assert len(told) == 1
