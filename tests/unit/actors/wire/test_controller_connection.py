"""A connection to the Controller of a process that has left its cluster."""

from typing import Any

import pytest
import ray

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection, find_controller
from iris_ray.errors import NoClusterError


def test_a_process_that_has_left_its_cluster_is_told_so_and_starts_no_cluster_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "get_actor", lambda *_: pytest.fail("Ray would start a cluster here"))
    with pytest.raises(NoClusterError, match="has left it"):
        find_controller()


def test_a_connection_that_is_asked_after_its_process_has_left_the_cluster_starts_none_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = ControllerConnection.__new__(ControllerConnection)
    controller._patience_s = 0.0
    handle: Any = None
    controller._handle = handle  # a call of it would have Ray start a cluster here
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(NoClusterError, match="has left it"):
        controller.ask(ControllerInterface.job_status, "train-1")
