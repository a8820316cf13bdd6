"""``iris-ray stacks`` and ``profile`` of what does not run; tests/cluster/test_insight.py has what does."""

from iris_ray.cli.exits import USAGE
from tests.support.controller_in_process import ControllerInProcess


def test_only_what_runs_has_stacks_and_a_profile(world: ControllerInProcess) -> None:
    world.start("train", slices=(3,))
    waits = world.submit("eval")
    assert "no task runs: pending" in world.iris("stacks", waits).stderr
    assert world.json("stacks", waits) == []
    assert "task 1 is pending: only what runs has a profile" in world.iris("profile", waits, "1", code=USAGE).stderr
    assert "did you mean train" in world.iris("stacks", "trian", code=USAGE).stderr
    assert "7" in world.iris("profile", waits, "7", code=USAGE).stderr
