"""The hosts of a slot that has several: they make each call together, and the slot ends if they are out of step."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from iris_ray.actors.slots import followers as module
from iris_ray.actors.slots.followers import Followers
from iris_ray.errors import RemoteUserError
from iris_ray.model.job_info import JobInfo, job_info_of


class Hosts:
    """Other hosts, whose calls run in threads of this process."""

    def __init__(self, *calls: Callable[[Any], str | None]) -> None:
        self._pool = ThreadPoolExecutor()
        self.actors: list[Any] = [
            SimpleNamespace(follow=SimpleNamespace(remote=self._in_thread(call))) for call in calls
        ]

    def _in_thread(self, call: Callable[[Any], str | None]) -> Callable[[Any], "Future[str | None]"]:
        return lambda payload: self._pool.submit(call, payload)


class Exited(BaseException):
    pass


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set once the process would have exited."""
    exited = threading.Event()

    def leave(code: int) -> None:
        exited.set()
        if threading.current_thread() is threading.main_thread():
            raise Exited

    monkeypatch.setattr(ray, "wait", lambda calls: _one(calls))
    monkeypatch.setattr(ray, "get", lambda call: call.result())
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(module, "OUT_OF_STEP_S", 0.05)
    place = JobInfo("j", "j/task-0", 0, 2, 1, 0, 1, "s", 0, "127.0.0.1:1234")
    for name, value in place.to_env().items():
        monkeypatch.setenv(name, value)
    yield exited
    for thread in threading.enumerate():
        if thread.name == "followers":
            thread.join(20)


def _one(calls: list[Any]) -> tuple[list[Any], list[Any]]:
    done = next(iter(wait(calls, return_when=FIRST_COMPLETED).done))
    return [done], [call for call in calls if call is not done]


def leading(*calls: Callable[[Any], str | None]) -> Followers:
    followers = Followers()
    followers.lead(Hosts(*calls).actors)
    return followers


def test_the_others_make_each_call_and_one_call_comes_after_another() -> None:
    heard: list[Any] = []

    def follow(payload: Any) -> None:
        time.sleep(0.01)
        heard.append(payload)

    followers = leading(follow, follow)

    def call(payload: int) -> None:
        with followers.calling(payload):
            heard.append(payload)

    with ThreadPoolExecutor() as pool:
        list(pool.map(call, range(5)))
    by_call = [heard[n : n + 3] for n in range(0, 15, 3)]
    assert sorted(by_call) == [[n] * 3 for n in range(5)]


def test_what_fails_on_another_host_only_is_an_error_of_the_call() -> None:
    followers = leading(lambda _: None, lambda _: "ValueError: no such token")
    with (
        pytest.raises(RemoteUserError, match="another host of its slot: ValueError: no such token"),
        followers.calling(1),
    ):
        pass


def test_what_fails_on_all_hosts_is_the_models_own_error() -> None:
    followers = leading(lambda _: "ZeroDivisionError")
    with pytest.raises(ZeroDivisionError), followers.calling(1):
        raise ZeroDivisionError


def test_a_slot_ends_if_a_host_goes_on_with_a_call_that_the_leader_has_ended(exits: threading.Event) -> None:
    may_end = threading.Event()
    followers = leading(lambda _: None if may_end.wait(20) else "")
    with pytest.raises(Exited), followers.calling(1):
        pass
    assert exits.is_set()
    may_end.set()


def test_a_slot_ends_if_the_leader_goes_on_with_a_call_that_has_failed_elsewhere(exits: threading.Event) -> None:
    followers = leading(lambda _: "OSError: the disk is full", lambda _: None)
    with pytest.raises(RemoteUserError), followers.calling(1):
        assert exits.wait(20)


def test_pieces_that_nobody_wants_are_made_all_the_same_if_others_make_them_too() -> None:
    made: list[int] = []

    def pieces() -> Iterator[int]:
        for number in range(4):
            made.append(number)
            yield number

    for followers, expected in ((Followers(), [0]), (leading(lambda _: None), [0, 1, 2, 3])):
        made.clear()
        read = followers.in_full(pieces())
        next(read)
        read.close()
        assert made == expected
    assert list(leading(lambda _: None).in_full(pieces())) == [0, 1, 2, 3]


def test_the_hosts_meet_at_a_free_port_of_the_leader() -> None:
    address = Followers().lead([object()])
    assert address.startswith("127.0.0.1:")
    assert address != "127.0.0.1:1234"
    module.meet_at(address)
    me = job_info_of(os.environ)
    assert me is not None
    assert me.coordinator_address == address
