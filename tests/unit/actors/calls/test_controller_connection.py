"""`ControllerConnection` has the Controller's own methods, with their parameters and results."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import ray

from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.controller.controller import Controller
from iris_ray.errors import NoClusterError

OF_THE_CONNECTION = {"versions", "first_tasks", "end"}
"""Those that do more, or less, than ask."""
OF_PAGES = "after"
"""The connection puts the pages of a list together."""
ASKED = sorted(
    name for name in vars(ControllerConnection) if not name.startswith("_") and name not in OF_THE_CONNECTION
)


@pytest.mark.parametrize("name", ASKED)
def test_connection_method_has_signature_of_controllers_method(name: str) -> None:
    ours, theirs = getattr(ControllerConnection, name), getattr(Controller, name)
    assert defaults(ours) == {name: value for name, value in defaults(theirs).items() if name != OF_PAGES}
    assert get_type_hints(ours) == {name: kind for name, kind in get_type_hints(theirs).items() if name != OF_PAGES}


def test_process_that_left_cluster_is_told_and_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "get_actor", lambda *_: pytest.fail("Ray would start a cluster here"))
    with pytest.raises(NoClusterError, match="has left it"):
        find_controller()


def test_connection_used_after_leaving_cluster_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ControllerConnection.__new__(ControllerConnection)
    controller._patience_s = 0.0
    handle: Any = None
    controller._handle = handle  # a call of it would have Ray start a cluster here
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(NoClusterError, match="has left it"):
        controller.job_status("train-1")


def defaults(method: Callable[..., Any]) -> dict[str, Any]:
    """By name of the parameter, without those that Ray adds to a class that it makes actors of."""
    return {p.name: p.default for p in inspect.signature(method).parameters.values() if p.name != "_ray_trace_ctx"}
