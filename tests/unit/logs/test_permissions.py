"""Pools report last lines of their own tasks only."""

import pytest

from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.actors.protocol.services import addressed
from iris_ray.errors import NotPermittedError
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import LastLines
from tests.support.controller_in_process import ControllerInProcess


def test_last_lines_of_another_pools_task_are_refused(world: ControllerInProcess) -> None:
    world.start("mine")
    world.start("theirs")
    forged = LastLines("theirs", 0, 1, "node", 5, b"forged")
    name, args, _ = addressed(LogCalls.note_last_lines, ([forged], PoolProcess(world.spec("mine").owner, 1)), {})
    with pytest.raises(NotPermittedError, match="theirs is not a job"):
        getattr(world.controller(), name).remote(*args).future().result(60)
