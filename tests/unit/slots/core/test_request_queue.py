"""The queue of requests, and which slot serves one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.errors import SlotQueueFullError
from iris_ray.slots.core.fleet import ModelSlots
from iris_ray.slots.core.models import Request
from iris_ray.slots.core.request_queue import RequestQueue, slots_wanted
from iris_ray.slots.core.slot import Allocation, Slot, SlotState
from tests.support.proofs import examples
from tests.support.slots import model

M, N = "m", "n"


def queue_of(*requests: Request, most: int = 10, most_bytes: int = 10_000) -> RequestQueue:
    queue = RequestQueue(most, most_bytes)
    for request in requests:
        queue.add(request)
    return queue


def request(name: str, model: str = M, at: float = 0.0, **kw) -> Request:
    return Request(name, model, at, **kw)


def order(queue: RequestQueue) -> list[str]:
    return [each.request_id for each in queue]


def test_waiting_bytes_are_limited_except_for_one_request() -> None:
    queue = queue_of(request("large", size=1000), most_bytes=100)
    with pytest.raises(SlotQueueFullError, match=r"1,000 bytes of requests wait already.*has 1; the limit is 100"):
        queue.add(request("small", size=1))
    queue.remove("large")
    queue.add(request("a", size=60))
    queue.add(request("b", size=40))
    taken, turn = queue.take(M)
    queue.add(request("c", size=60))
    queue.put_back(taken, turn)
    assert order(queue) == ["a", "b", "c"]
    with pytest.raises(SlotQueueFullError, match="160 bytes"):
        queue.add(request("d", size=1))


def test_models_are_ordered_by_first_request() -> None:
    queue = queue_of(request("a"), request("b", N), request("c"), request("d", N, priority=True))
    assert queue.in_turn([M, N]) == [N, M]
    assert queue.waiting(M) == queue.waiting(N) == 2


def test_full_queue_refuses_without_a_trace() -> None:
    queue = queue_of(request("a"), request("b"), most=2)
    with pytest.raises(SlotQueueFullError, match="2 requests wait"):
        queue.add(request("c", N))
    assert order(queue) == ["a", "b"]
    assert queue.in_turn([N, M]) == [M, N]


def test_reused_id_has_no_old_deadline() -> None:
    queue = queue_of(request("a", deadline=5.0))
    queue.remove("a")
    queue.add(request("a", deadline=50.0))
    assert queue.expired(6.0) == []


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from(["add", "front", "take", "back", "remove", "expire"]), st.integers(0, 9))))
def test_queue_agrees_with_sorted_list(steps: list[tuple[str, int]]) -> None:
    queue, plain, taken = queue_of(most=6), {}, []  # type: ignore[var-annotated]
    for number, (step, n) in enumerate(steps):
        name = (M, N)[n % 2]
        if step in ("add", "front") and len(plain) < 6:
            made = request(f"r{number}", name, priority=step == "front", deadline=float(number + n))
            queue.add(made)
            plain[made.request_id] = (step == "add", number, made)
        elif step == "take" and queue.waiting(name):
            first, turn = queue.take(name)
            assert plain[first.request_id] == min(each for each in plain.values() if each[2].model == name)
            taken.append((first, turn, plain.pop(first.request_id)))
        elif step == "back" and taken:
            first, turn, place = taken.pop()
            queue.put_back(first, turn)
            plain[first.request_id] = place
        elif step == "remove" and plain:
            queue.remove(plain.pop(next(iter(plain)))[2].request_id)
        elif step == "expire":
            gone = {each.request_id for each in queue.expired(float(number))}
            assert gone == {name for name, (_, _, each) in plain.items() if (each.deadline or 0.0) <= number}
            plain = {name: each for name, each in plain.items() if name not in gone}
        assert order(queue) == [each[2].request_id for each in sorted(plain.values(), key=lambda each: each[:2])]
        assert queue.waiting(M) + queue.waiting(N) == len(queue) == len(plain)


# -- warm slots ------------------------------------------------------------------------------------------------------


def slot(name: str, runner: str = "a", active: int = 0, used: float = 0.0, **kw) -> Slot:
    place = Allocation(runner, (0,), (1,))
    asked = {f"{name}{number}": 0.0 for number in range(active)}
    kw = {"state": SlotState.READY, "ready_at": 0.0, **kw}
    return Slot(name, model(concurrency=4), place, 0.0, last_activity=used, active=asked, **kw)


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        ([slot("s", active=2), slot("t", active=1)], "t"),
        ([slot("s", "busy", active=1), slot("t", "idle", active=1)], "t"),
        ([slot("s", used=1.0), slot("t", used=2.0)], "t"),
        ([slot("s", active=4), slot("t", state=SlotState.STARTING)], None),
        ([slot("s", state=SlotState.DRAINING)], None),
    ],
    ids=["fewest own requests", "the less busy runner", "used most recently", "none has a seat", "one that drains"],
)
def test_request_goes_to_serving_slot(slots: list[Slot], chosen: str | None) -> None:
    here = ModelSlots()
    for each in slots:
        here.add(each)
    found = here.best_seat(4, {"a": 0, "busy": 5, "idle": 1})
    assert (found and found.slot_id) == chosen


@pytest.mark.parametrize(
    ("waiting", "free", "wanted"), [(0, 0, 0), (1, 0, 1), (4, 0, 1), (5, 0, 2), (5, 4, 1), (3, 4, 0)]
)
def test_wanted_slots_are_those_waiting_requests_fill(waiting: int, free: int, wanted: int) -> None:
    assert slots_wanted(waiting, free, model(concurrency=4)) == wanted
