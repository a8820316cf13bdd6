"""Operators set limits, and anybody may see them."""

from iris_ray.cli.conventions import FAILED
from tests.support.controller_in_process import ControllerInProcess
from tests.unit.actors.controller.test_permissions import world

__all__ = ["world"]  # the fixture


def test_only_operators_may_set_limits(world: ControllerInProcess) -> None:
    before = world.json("cluster", "limits")
    command = ("cluster", "limits", "ann", "--chips", "8")
    assert "only operators may" in world.iris(*command, user="ann", code=FAILED).stderr
    assert world.json("cluster", "limits") == before
    world.iris(*command, user="olga")
    assert world.json("cluster", "limits") != before


def test_anybody_may_see_limits(world: ControllerInProcess) -> None:
    assert "everybody" in world.iris("cluster", "limits", user="bob").stdout
