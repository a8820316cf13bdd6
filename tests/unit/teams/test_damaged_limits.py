"""Limits that can't be read are put aside."""

from tests.support.controller_in_process import ControllerInProcess
from tests.unit.actors.controller.test_corrupt_records import aside, damage, restart, world

__all__ = ["world"]  # the fixture


def test_damaged_limits_are_left_out(world: ControllerInProcess) -> None:
    world.iris("cluster", "limits", "ann", "--chips", "8")
    for data in (b"{", b'[["ann", "BATCH"]]', b'[["ann", "NONE", {}]]', b'[["ann", "BATCH", {"chips": -1}]]'):
        damage(world, "limits/", data)
        restart(world)
        assert world.jobs() == ["good"]
        assert list(aside(world)) == ["the limits"]
        world.iris("cluster", "limits", "ann", "--chips", "8")
