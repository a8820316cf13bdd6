"""Rounds of slices that train by themselves, over real sockets: each slice is a thread, and a dict is the runtime."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from iris_ray.endpoints import task as endpoints
from iris_ray.errors import InvalidRequestError
from iris_ray.framing import MOST_STRANGERS, ConnectionLost
from iris_ray.model.job_info import JobInfo
from iris_ray.model.membership import Membership
from iris_ray.model.options import EACH_SLICE
from iris_ray.outer import group as outer
from iris_ray.outer.group import Group
from iris_ray.outer.wire import ArrayConnection
from tests.support.waiting import wait_until

Tree = dict[str, Any]


class Killed(Exception):
    """The slice's process is gone."""


@dataclass
class Slice:
    """One attempt of a slice, and what it has seen."""

    who: tuple[int, int]
    group: Group | None = None
    states: dict[int, float] = field(default_factory=dict)  # by round
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)  # by round, seconds in `advance`
    killed: threading.Event = field(default_factory=threading.Event)
    frozen: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    thread: threading.Thread | None = None

    def is_in(self, number: int) -> bool:
        return number in self.states


class Runtime:
    """Starts slices, loses them, and tells the others."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told = Membership(0, token="a secret")
        self.addresses: dict[tuple[str, int, int], str] = {}
        self.slices: list[Slice] = []
        self.rounds = 10**9
        self._here = threading.local()
        patch.setattr(endpoints, "register_endpoint", self._register)
        patch.setattr(endpoints, "endpoint_of_attempt", lambda *key: self.addresses.get(key))
        patch.setattr(outer, "_membership_of", lambda info: lambda: self.told)
        patch.setattr(outer, "get_job_info", lambda: self._here.info)

    def _register(self, name: str, address: str) -> None:
        info = self._here.info
        self.addresses[name, info.task_index, info.attempt] = address

    def tell(self, running: dict[int, int], returned: frozenset[int] | None = None) -> None:
        before = self.told
        self.told = replace(
            before,
            epoch=before.epoch + 1,
            running=running,
            returned=before.returned if returned is None else returned,
        )

    def start(
        self, slice_id: int, attempt: int = 1, step_s: float = 0.01, compile_s: float = 0.0, **join: Any
    ) -> Slice:
        """Start a slice that adds its id plus one in every round, and tell the others."""
        one = Slice((slice_id, attempt))
        others = {i: n for i, n in self.told.running.items() if i != slice_id}
        self.tell({**others, slice_id: attempt})
        one.thread = threading.Thread(target=self._run, args=(one, step_s, compile_s, join), daemon=True)
        one.thread.start()
        self.slices.append(one)
        return one

    def lose(self, one: Slice, told_after_s: float = 0.05) -> None:
        """End a slice's process; the others are told in a moment."""
        one.killed.set()
        if one.group is not None:
            cut(one.group)
        time.sleep(told_after_s)
        self.tell({i: n for i, n in self.told.running.items() if (i, n) != one.who})

    def end_after(self, rounds: int) -> int:
        """Let all slices return after so many more rounds, and wait until they have. Return the last round."""
        self.rounds = rounds + max(max(one.states, default=0) for one in self.slices)
        for one in self.slices:
            assert one.thread is not None
            one.thread.join(60.0)
            assert not one.thread.is_alive() or one.killed.is_set(), f"{one.who} hangs after {max(one.states)}"
            assert one.error is None, f"{one.who}: {one.error!r}"
        return self.rounds

    def _run(self, one: Slice, step_s: float, compile_s: float, join: dict[str, Any]) -> None:
        slice_id, attempt = one.who
        self._here.info = JobInfo(
            "job", f"job/task-{slice_id}", slice_id, 4, attempt, slice_id, 4, "s", 0, "127.0.0.1:9",
            failure_domain=EACH_SLICE,
        )  # fmt: skip
        try:
            time.sleep(compile_s)
            with outer.join(
                {"sum": np.zeros(1000)}, lambda state, mean: {"sum": state["sum"] + mean["up"]}, **join
            ) as g:
                one.group = g
                while g.round < self.rounds and not g.is_over:
                    time.sleep(step_s)
                    while one.frozen.is_set():
                        time.sleep(0.01)
                    before, number = time.monotonic(), g.round
                    g.advance({"up": np.full(1000, slice_id + 1.0)})
                    if one.killed.is_set():
                        raise Killed
                    one.waits[number] = time.monotonic() - before
                    one.states[g.round] = float(g.state["sum"][0])
                    one.members[g.round] = g.members
            self.tell({i: n for i, n in self.told.running.items() if i != slice_id}, self.told.returned | {slice_id})
        except Exception as error:
            if not one.killed.is_set():
                one.error = error


def add_up(state: Tree, mean: Tree) -> Tree:
    return {"sum": state["sum"] + mean["up"]}


def cut(group: Group) -> None:
    """End what a process of that group would have ended with."""
    group._member._closed = True
    for connection in list(group._connections.values()):
        connection.close()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    world = Runtime(monkeypatch)
    yield world
    for one in world.slices:
        one.killed.set()
        one.frozen.clear()
        if one.group is not None:
            cut(one.group)


def all_agree(slices: list[Slice]) -> None:
    """All slices that were in a round have the same state after it, and the same members."""
    seen: dict[int, set[tuple[float, tuple[int, ...]]]] = {}
    for one in slices:
        for number, state in one.states.items():
            seen.setdefault(number, set()).add((state, one.members[number]))
    assert {number: states for number, states in seen.items() if len(states) > 1} == {}


# -- calm -------------------------------------------------------------------------------------------------------------


def test_slices_average_what_they_contribute(runtime: Runtime) -> None:
    slices = [runtime.start(i) for i in range(3)]
    wait_until(lambda: all(one.is_in(10) for one in slices))
    last = runtime.end_after(10)
    all_agree(slices)
    assert slices[0].members[last] == (0, 1, 2)
    assert slices[0].states[last] - slices[0].states[last - 1] == pytest.approx(2.0)


def test_slice_alone_goes_on_by_itself(runtime: Runtime) -> None:
    runtime.rounds = 3
    one = runtime.start(2)
    wait_until(lambda: one.is_in(3))
    assert one.states == {1: 3.0, 2: 6.0, 3: 9.0}


def test_outside_a_task_a_process_is_a_group_of_its_own() -> None:
    with outer.join([np.float32(0)], lambda state, mean: [state[0] + mean]) as group:
        group.advance(np.float32(2))
        assert (group.round, group.state, group.members) == (1, [2.0], (0,))


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_lost_slice_stops_nobody_and_joins_again(runtime: Runtime, lost: int) -> None:
    """The slice that leads is among them."""
    slices = [runtime.start(i) for i in range(3)]
    wait_until(lambda: all(one.is_in(20) for one in slices))
    runtime.lose(slices[lost])
    back = runtime.start(lost, attempt=2, compile_s=0.3)
    wait_until(lambda: len(back.states) > 10)
    last = runtime.end_after(20)
    others = [one for one in slices if one.who[0] != lost]
    all_agree([*others, back])
    assert min(back.states) > 20, "it has the state of the others"
    assert back.members[last] == (0, 1, 2)
    for one in others:
        assert sorted(one.states) == list(range(min(one.states), last + 1)), "no round twice, none left out"
        assert max(wait for number, wait in one.waits.items() if number > 5) < 0.05 + 0.2, "told after 0.05 s"


def test_leader_lost_at_any_moment_leaves_one_state(runtime: Runtime) -> None:
    """Many times, each at another moment of the round: slices with and without its result agree."""
    slices = {i: runtime.start(i, step_s=0.004) for i in range(3)}
    everyone = list(slices.values())
    for turn in range(12):
        wait_until(lambda: all(len(one.states) > 3 for one in slices.values()))
        lead = slices[0].group._member.leader()[0]  # type: ignore[union-attr]
        time.sleep(turn * 0.0007)
        runtime.lose(slices[lead], told_after_s=0.01)
        slices[lead] = runtime.start(lead, attempt=turn + 2, step_s=0.004)
        everyone.append(slices[lead])
    wait_until(lambda: all(len(one.states) > 3 for one in slices.values()))
    runtime.end_after(10)
    all_agree(everyone)


def test_all_slices_lost_at_once_begin_anew(runtime: Runtime) -> None:
    slices = [runtime.start(i) for i in range(2)]
    wait_until(lambda: all(one.is_in(5) for one in slices))
    for one in slices:
        runtime.lose(one)
    again = [runtime.start(i, attempt=2) for i in range(2)]
    wait_until(lambda: all(one.is_in(5) for one in again))
    runtime.end_after(5)
    all_agree(again)


def test_slice_that_comes_back_after_the_end_has_nothing_to_do(runtime: Runtime) -> None:
    slices = [runtime.start(i) for i in range(2)]
    wait_until(lambda: all(one.is_in(5) for one in slices))
    runtime.end_after(5)
    late = runtime.start(1, attempt=2)
    runtime.end_after(5)
    assert (late.states, late.group is not None and late.group.is_over) == ({}, True)
    all_agree(slices)


def test_slice_whose_question_is_not_answered_joins_later(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another slice has returned; a slice in the rounds, such as one that compiles, gives no answer for a while."""
    monkeypatch.setattr(outer, "ANSWER_S", 0.2)
    slices = [runtime.start(i) for i in range(2)]
    wait_until(lambda: all(one.is_in(5) for one in slices))
    runtime.lose(slices[1])
    runtime.tell(dict(runtime.told.running), returned=frozenset({2}))
    assert slices[0].group is not None
    with slices[0].group._member.changed:
        back = runtime.start(1, attempt=2)
        wait_until(lambda: any(attempt == 2 for _, _, attempt in runtime.addresses))  # it listens, and begins to ask
        assert back.thread is not None
        back.thread.join(1.0)
    wait_until(lambda: len(back.states) > 5 or (back.group is not None and back.group.is_over))
    assert back.group is not None
    assert not back.group.is_over
    runtime.end_after(5)
    all_agree([slices[0], back])
    assert min(back.states) > 5, "it has the state of the other"


# -- slices that hang -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [0, 1])
def test_hanging_slice_is_left_out_after_deadline_and_catches_up(runtime: Runtime, frozen: int) -> None:
    slices = [runtime.start(i, deadline=0.3) for i in range(3)]
    wait_until(lambda: all(one.is_in(10) for one in slices))
    slices[frozen].frozen.set()
    wait_until(lambda: any(frozen not in one.members[max(one.states)] for one in slices))
    seen = len(slices[frozen].states)
    slices[frozen].frozen.clear()
    wait_until(lambda: len(slices[frozen].states) > seen + 5)
    last = runtime.end_after(30)
    all_agree(slices)
    assert slices[0].members[last] == (0, 1, 2)
    assert not set(range(1, last)) <= slices[frozen].states.keys()


def test_leader_that_was_late_makes_no_round_without_who_has_left_it(runtime: Runtime) -> None:
    """It goes on just as the next one takes over, which has not made the round yet."""
    slices = [runtime.start(i, deadline=0.2) for i in range(2)]
    wait_until(lambda: all(one.is_in(10) for one in slices))
    slices[1].frozen.set()
    assert slices[1].group is not None
    slices[1].group._member.late.add(slices[0].who)
    wait_until(lambda: slices[0].group is not None and slices[0].who in slices[0].group._member.contributions)
    time.sleep(1.0)  # five deadlines
    slices[1].frozen.clear()
    wait_until(lambda: slices[0].members[max(slices[0].states)] == (0, 1), 10.0)
    runtime.end_after(10)
    all_agree(slices)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_stranger_without_the_token_is_not_answered(runtime: Runtime) -> None:
    one = runtime.start(0)
    wait_until(lambda: one.is_in(2))
    (address,) = runtime.addresses.values()
    with pytest.raises(ConnectionLost):
        ArrayConnection.to(address, "another secret")
    wait_until(lambda: one.is_in(10))


def test_strangers_keep_nobody_out_however_many_they_are(runtime: Runtime) -> None:
    one = runtime.start(0)
    wait_until(lambda: one.is_in(2))
    (address,) = runtime.addresses.values()
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(4 * MOST_STRANGERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))))
        ArrayConnection.to(address, "a secret").close()
        assert threading.active_count() <= before + 10
    other = runtime.start(1)
    wait_until(lambda: len(other.states) > 3)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\xff" * 1000])
def test_noise_on_the_port_harms_nobody(runtime: Runtime, noise: bytes) -> None:
    one = runtime.start(0)
    wait_until(lambda: one.is_in(2))
    host, port = next(iter(runtime.addresses.values())).split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
        now = max(one.states)
        wait_until(lambda: one.is_in(now + 5))


@pytest.mark.parametrize(
    ("contribution", "update", "wrong"),
    [
        ({"up": np.arange(3)}, lambda state, mean: state, "array of type int64"),
        ({"up": np.zeros(3)}, lambda state, mean: [state], "the same structure"),
        ({"up": np.zeros(3)}, lambda state, mean: np.zeros(4), "the same structure"),
    ],
)
def test_what_has_no_average_or_changes_its_shape_is_refused(
    contribution: Tree, update: Callable[[Any, Any], Any], wrong: str
) -> None:
    with outer.join(np.zeros(3), update) as group, pytest.raises(InvalidRequestError, match=wrong):
        group.advance(contribution)


def test_job_whose_slices_are_one_gang_is_refused(runtime: Runtime) -> None:
    runtime._here.info = JobInfo("job", "job/task-0", 0, 2, 1, 0, 2, "a", 0, "10.0.0.1:9")
    with pytest.raises(InvalidRequestError, match="failure_domain='slice'"):
        outer.join(np.zeros(1), lambda state, mean: state)
