"""Slices and hosts as the command line shows them, and the names that people call them by."""

from typing import Any

import pytest

from iris_ray.actors.protocol.status import HostCondition, WorkerStatus
from iris_ray.dashboard.slices import SliceState, find_target, natural, slices_of
from iris_ray.errors import InvalidRequestError


def host(slice_name: str, number: int, **changes: Any) -> WorkerStatus:
    values: dict[str, Any] = {
        "node_id": f"{number:02x}{slice_name.encode().hex():0<40}",
        "address": f"10.0.{slice_name[-1]}.{number}",
        "slice_name": slice_name,
        "host_index": number,
        "device": "v4-16",
        "resources": {"TPU": 4.0},
        "free": {"TPU": 4.0},
        "attributes": {"tpu-name": slice_name, "tpu-worker-id": number, "tpu-vm-count": 2},
        "tasks": (),
        "unavailable": None,
        "holder": None,
        "condition": HostCondition.FREE,
    }
    return WorkerStatus(**(values | changes))


@pytest.mark.parametrize(
    ("hosts", "state", "reason"),
    [
        ([host("s-0", 0), host("s-0", 1)], SliceState.FREE, None),
        ([host("s-0", 0, holder="pool"), host("s-0", 1)], SliceState.WARM, None),
        ([host("s-0", 0), host("s-0", 1, tasks=("a/b/task-0",))], SliceState.BUSY, None),
        ([host("s-0", 0)], SliceState.INCOMPLETE, "host 1 of 2 is missing"),
        ([host("s-0", n, unavailable="taint:drained (disk)") for n in (0, 1)], SliceState.CLOSED, "drained (disk)"),
        ([host("s-0", 0), host("s-0", 1, unavailable="hot")], SliceState.CLOSED, "host 1: hot"),
        ([host("s-0", 0), host("s-0", 1, unavailable="host 1 is hot")], SliceState.CLOSED, "host 1 is hot"),
    ],
)
def test_slice_state_follows_its_hosts(hosts: list[WorkerStatus], state: SliceState, reason: str | None) -> None:
    (view,) = slices_of(hosts)
    assert (view.state, view.reason) == (state, reason)
    assert view.jobs == (("a/b",) if state is SliceState.BUSY else ())


def test_slices_are_sorted_naturally() -> None:
    assert sorted(["s-10", "s-9", "t"], key=natural) == ["s-9", "s-10", "t"]


def test_host_is_found_by_any_of_its_names() -> None:
    hosts = [host("s-0", 0), host("s-0", 1), host("s-1", 0)]
    second = hosts[1].node_id
    for name in ("s-0/1", "10.0.0.1", second, second[:6]):
        assert find_target(name, hosts) == second
    assert find_target("s-0", hosts) == "s-0"
    assert find_target("nothing", hosts) == "nothing"
    with pytest.raises(InvalidRequestError, match=r"s-0/0, s-1/0"):
        find_target(hosts[0].node_id[:7], hosts)
