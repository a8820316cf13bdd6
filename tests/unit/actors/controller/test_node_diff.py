"""Which hosts are lost, by comparing readings of Ray's node table."""

from typing import Any

import pytest

from iris_ray.actors.controller import node_table
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_table import NodeDiff, NodeTable
from iris_ray.model.notices import NoticeKind
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import WorkerDrainedEvent, WorkerFailedEvent


def node(node_id: str, alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": node_id,
        "Alive": alive,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"CPU": 4.0},
    }


class Looks:
    """What the Controller sees in Ray's node table, look by look."""

    def __init__(self) -> None:
        self.state = ControllerState()
        self.nodes = NodeDiff(self.state, Clock())

    def look(self, *nodes: dict[str, Any]) -> list[str]:
        """Return the reasons of the losses that it finds."""
        events = self.nodes.events_of(NodeTable(nodes, {}, {}))
        apply_all(self.state, events)
        self.state.check()
        return [event.reason for event in events if isinstance(event, WorkerFailedEvent)]

    @property
    def hosts(self) -> list[str]:
        return sorted(self.state.workers)


@pytest.fixture
def looks() -> Looks:
    looks = Looks()
    looks.look(node("a"), node("b"))
    assert looks.hosts == ["a", "b"]
    return looks


def test_host_missing_in_two_readings_is_lost(looks: Looks) -> None:
    """Ray forgets dead nodes when there are too many of them."""
    assert looks.look(node("a")) == []
    assert looks.hosts == ["a", "b"]
    (reason,) = looks.look(node("a"))
    assert "missing in Ray's node table" in reason
    assert looks.hosts == ["a"]
    assert looks.look(node("a")) == []
    assert looks.nodes.evidence(["b"])["b"].lost == reason


def test_host_missing_in_one_reading_is_kept(looks: Looks) -> None:
    for _ in range(3):
        assert looks.look(node("a")) == []
        assert looks.look(node("a"), node("b")) == []
    assert looks.hosts == ["a", "b"]


@pytest.mark.parametrize("empty", [(), (node("a", alive=False),)], ids=["no node", "no live node"])
def test_reading_without_live_nodes_is_ignored(looks: Looks, empty: tuple[dict[str, Any], ...]) -> None:
    for _ in range(3):
        looks.look(*empty)
    assert "b" in looks.hosts
    assert looks.look(node("c")) == []
    assert looks.hosts[-2:] == ["b", "c"]


def test_missing_drained_host_was_preempted(looks: Looks) -> None:
    looks.state.handle_event(WorkerDrainedEvent("b", "spot"))
    looks.look(node("a"))
    (reason,) = looks.look(node("a"))
    assert reason.endswith("; spot")
    assert looks.nodes.evidence(["b"])["b"].draining == "spot"


def test_missing_host_that_returns_is_registered_again(looks: Looks) -> None:
    for _ in range(2):
        looks.look(node("a"))
    assert looks.hosts == ["a"]
    looks.look(node("a"), node("b"))
    assert looks.hosts == ["a", "b"]
    assert looks.nodes.evidence(["b"])["b"].lost is None


def test_notices_of_hosts_that_never_join_are_forgotten(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_table, "GONE_HOSTS_KEPT", 10)
    for number in range(100):
        looks.nodes.note_drains([WorkerDrainedEvent(f"odd-{number}", "it goes", NoticeKind.PREEMPTION, 1.0)])
    known = looks.nodes.evidence(f"odd-{number}" for number in range(100))
    assert [node_id for node_id, evidence in known.items() if evidence.draining] == [f"odd-{n}" for n in range(90, 100)]
