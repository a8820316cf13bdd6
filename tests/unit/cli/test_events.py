"""``iris-ray job events``: what it tells about the real Controller's jobs."""

from iris_ray.cli.conventions import USAGE
from tests.support.controller_in_process import ControllerInProcess


def test_story_of_a_job_that_fails_twice_and_succeeds_survives_a_restart(world: ControllerInProcess) -> None:
    job = world.start("train", max_retries_failure=3)
    world.fail(job, 1)
    world.wait_for_attempt(job, 2)
    world.fail(job, 0)
    world.wait_for_attempt(job, 3)
    world.succeed(job)
    found = world.json("job", "events", job)
    assert [(event["attempt"], event["what"].split(":")[0]) for event in found] == [
        (None, "submitted by ann, interactive"),
        (1, "runs on v4-16-0"),
        (1, "ended (charged as a failure)"),
        (2, "runs on v4-16-0"),
        (2, "ended (charged as a failure)"),
        (3, "got v4-16-0"),
        (3, "runs on v4-16-0"),
        (None, "the job ended"),
    ]
    assert "worker 1" in found[2]["what"]
    assert found == sorted(found, key=lambda event: event["at"])
    world.restart_controller()
    assert world.json("job", "events", job) == found
    assert "charged as a failure" in world.iris("job", "events", job).stdout
    assert "did you mean train" in world.iris("job", "events", "trian", code=USAGE).stderr
