"""Calls of an actor: answers, deadlines, and what a missing answer says about the actor and its host."""

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Actor, answer
from iris_ray.actors.protocol.answers import Gone, KilledForMemory, Unreachable
from iris_ray.actors.protocol.marks import within
from tests.support.virtual_time import now, run


class Clerk:
    """Answers after a while."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    async def add(self, one: int, other: int = 1) -> int:
        await asyncio.sleep(self._takes_s)
        return one + other

    @within(60.0)
    async def search(self, word: str) -> str:
        await asyncio.sleep(self._takes_s)
        raise LookupError(word)


def asked(takes_s: float, *how: Any) -> tuple[Any, float]:
    """Return the answer of a clerk, or what it raises, and how long that took."""

    async def ask() -> tuple[Any, float]:
        began, clerk = now(), Actor.here(Clerk(takes_s), "the clerk")
        ask_it = clerk.ask_within if isinstance(how[0], float) else clerk.ask_once
        try:
            return await ask_it(*how), now() - began
        except LookupError as error:
            return repr(error), now() - began

    return run(ask())


def test_answer_in_time_is_returned_and_error_raised() -> None:
    assert asked(4.0, Clerk.add, 1, 2) == (3, 4.0)
    assert asked(4.0, Clerk.search, "cat") == ("LookupError('cat')", 4.0)


def test_missing_answer_after_deadline_is_unreachable() -> None:
    late = Unreachable("the clerk did not answer within 5 s")
    assert asked(100.0, Clerk.add, 1) == (late, ANSWER_TIMEOUT_S)
    assert asked(100.0, Clerk.search, "cat") == (Unreachable("the clerk did not answer within 60 s"), 60.0)


def test_object_of_this_process_goes_on_without_its_caller() -> None:
    """As an actor does: what it has begun for a caller that no longer waits, it can also undo."""

    async def interrupted() -> tuple[list[int], bool]:
        added: list[int] = []

        class Counter:
            async def add(self, one: int) -> None:
                await asyncio.sleep(1.0)
                added.append(one)

        counter = Actor[Counter].here(Counter(), "the counter")
        waiting = asyncio.ensure_future(counter.ask_once(Counter.add, 1))
        await asyncio.sleep(0.5)
        waiting.cancel()
        counter.call(Counter.add, 2)
        await asyncio.sleep(2.0)
        return added, waiting.cancelled()

    assert run(interrupted()) == ([1, 2], True)


def test_deadline_of_the_caller_wins_over_that_of_the_interface() -> None:
    assert asked(100.0, 2.0, Clerk.search, "cat") == (Unreachable("the clerk did not answer within 2 s"), 2.0)


def test_ray_options_go_with_call_and_leave_actor_unchanged() -> None:
    calls: list[Any] = []

    def method(**options: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *args: calls.append((options, args)), options=method)

    actor = Actor[Clerk](SimpleNamespace(add=method()))
    actor.with_options(name="sum").with_options(max_task_retries=-1).call(Clerk.add, 1, 2)
    actor.call(Clerk.add, 3)
    assert calls == [({"name": "sum", "max_task_retries": -1}, (1, 2)), ({}, (3,))]


def test_actor_survives_pickling_with_name_and_options() -> None:
    sent = pickle.loads(pickle.dumps(Actor[Clerk]("a handle", "the clerk", {"num_returns": 1})))
    assert (sent.handle, sent.name, sent._options) == ("a handle", "the clerk", {"num_returns": 1})


def test_unknown_method_is_an_error_at_once() -> None:
    with pytest.raises(AttributeError):
        Actor[Any](SimpleNamespace()).call(Clerk.add, 1)


# -- answers that do not come -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "found"), [(ActorDiedError(), Gone), (OutOfMemoryError("killed"), KilledForMemory)])
def test_answer_of_actor_killed_for_memory_says_so(error: RayError, found: type[Gone]) -> None:
    async def call() -> None:
        raise error

    reply = asyncio.run(answer(call(), "host 1", None))
    assert type(reply) is found
    assert reply.reason.startswith("host 1")
