"""A connection to the Controller that has nobody to ask, or that asks for a long list."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from iris_ray.actors.calls import controller_connection
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.errors import NoClusterError, VersionMismatchError


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
        controller.ask(ControllerInterface.job_status, "train-1")


def test_older_controller_without_the_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ControllerConnection.__new__(ControllerConnection)
    controller._patience_s = 0.0
    controller._handle = SimpleNamespace(ping=None)
    monkeypatch.setattr(controller_connection, "_require_connected", lambda: None)
    with pytest.raises(VersionMismatchError, match=r"can't answer this \(require_operator\).* controller upgrade`"):
        controller.ask(ControllerInterface.require_operator, "ann", "give notice to hosts")


def test_long_absence_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answers = iter([False, False, False, True, True, False, False, True])

    class Away(ControllerConnection):
        def _look_up(self) -> bool:
            return True

        def _ask_once(self, *_: Any) -> Any:
            if not next(answers):
                raise self._gone()

    monkeypatch.setattr(controller_connection, "RESTART_S", 0.0)
    controller = Away()
    with controller.waiting(60.0, said.append):
        for absences in (1, 1, 2):
            controller.ask(ControllerInterface.ping)
            assert said == [controller_connection.WAITING] * absences


def test_long_list_is_read_until_page_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Tasks(ControllerConnection):
        def __init__(self) -> None: ...

        def ask(self, question: Any, /, *args: Any, **kwargs: Any) -> Any:
            asked.append((question, *args))
            after = args[1] if len(args) > 1 else -1
            return [SimpleNamespace(task_index=index) for index in range(5)[after + 1 :][:2]]

    monkeypatch.setattr(controller_connection, "PAGE", 2)
    tasks = Tasks().ask_all(ControllerInterface.list_tasks, "job")
    assert [task.task_index for task in tasks] == list(range(5))
    assert asked == [(ControllerInterface.list_tasks, "job", *after) for after in ((), (1,), (3,))]
