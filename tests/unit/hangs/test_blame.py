"""Which process holds up its gang."""

import re
import time

import pytest

from iris_ray.hangs.blame import find_culprit
from iris_ray.hangs.calls import TaskLook
from iris_ray.model.outcomes import TaskKey

JAX = "_value (jax/_src/array.py:664)"
FETCHES = (JAX, "train (train.py:30)")
DISPATCHES = ("__call__ (jax/_src/interpreters/pxla.py:1297)", "train (train.py:28)")
LOOPS = ("spin (train.py:12)", "train (train.py:25)")


def look(stack: tuple[str, ...] = FETCHES, state: str = "", cpu: float = 0.0, late_s: float = 0.0) -> TaskLook:
    return TaskLook(state, cpu, stack, 0.6, late_s)


def finding(*looks: TaskLook | None, steps: tuple[int, ...] = (), per_host: int = 1) -> tuple[int | None, str]:
    """The number of the process that is named, and why. Each process is on the next host, or several share one."""
    keys = [TaskKey(0, number // per_host, number % per_host) for number in range(len(looks))]
    named = dict(zip(keys, looks, strict=True))
    found = find_culprit(named, dict(zip(keys, steps, strict=False)), lambda key: str(key.host_index))
    return None if found.culprit is None else keys.index(found.culprit), found.why


W = look()


@pytest.mark.parametrize(
    ("looks", "steps", "culprit", "why"),
    [
        ((W, look(state="T"), W, W), (), 1, "state T"),
        ((W, W, look(state="D"), W), (), 2, "disk or a device"),
        ((W, None, W, W), (), 1, "host did not answer in time"),
        ((W, None), (), 1, "host did not answer in time"),
        ((W, W, look(LOOPS, cpu=1.0), W), (5, 5, 5, 5), 2, "it is in spin .* 3 others wait in JAX; it uses 1.0 cores"),
        ((W, look(LOOPS)), (5, 5), 1, "1 others wait in JAX"),
        ((look(DISPATCHES), W, look(LOOPS), W), (6, 5, 5, 5), 2, "others wait in JAX"),
        ((W, W, W, W), (7, 7, 6, 7), 2, "it is at step 6, and the furthest at step 7"),
        ((W, W), (6, 7), 0, "it is at step 6"),
        ((W, W, W, look(DISPATCHES)), (7, 7, 7, 7), 3, "it is in __call__ .*, and 3 of 4 are in _value"),
        ((look(()), look(()), look((), state="T")), (7, 7, 7), 2, "state T"),
        ((look(state="T"),), (3,), 0, "state T"),
        ((look(LOOPS, cpu=1.0), look(DISPATCHES), W, W), (6, 7, 6, 7), 0, "it is in spin"),
        ((look(LOOPS), W, W, W), (7, 6, 6, 7), 0, "3 others wait in JAX"),
    ],
)
def test_process_that_differs_is_named(
    looks: tuple[TaskLook | None, ...], steps: tuple[int, ...], culprit: int, why: str
) -> None:
    named, told = finding(*looks, steps=steps)
    assert named == culprit
    assert re.search(why, told), told


@pytest.mark.parametrize(
    ("looks", "steps", "why"),
    [
        ((W, W, W, W), (7, 7, 7, 7), r"no process differs clearly from the others \(at _value"),
        ((W, W, look(DISPATCHES), look(DISPATCHES)), (7, 7, 7, 7), "no process differs clearly"),
        ((look(LOOPS), look(LOOPS), W, W), (7, 7, 7, 7), "2 of 4 processes are equally suspect: 2 × it is in spin"),
        ((None, None, None), (), "no process differs clearly"),
        ((look(()), look(())), (7, 7), "no process differs clearly"),
        ((W, W, W, look(late_s=3.0)), (7, 7, 7, 7), "no process differs clearly"),
        ((look(LOOPS, cpu=1.0),), (7,), "no process differs clearly"),
        ((look(state="T"), look(state="T"), look(state="T"), W), (), "no process differs clearly"),
    ],
)
def test_nobody_is_named_if_it_is_not_clear(
    looks: tuple[TaskLook | None, ...], steps: tuple[int, ...], why: str
) -> None:
    named, told = finding(*looks, steps=steps)
    assert named is None
    assert re.search(why, told), told


def test_ways_to_tell_a_stack_do_not_differ() -> None:
    told = ("_value (/usr/lib/python3/site-packages/jax/_src/array.py:664)", "train (/home/ann/train.py:30)")
    assert finding(W, W, W, look(told))[0] is None


def test_odd_frames_are_compared_at_once() -> None:
    began = time.process_time()
    finding(W, W, W, look(("(" * 100_000, "f ((" + "/(" * 50_000)))
    assert time.process_time() - began < 1.0


def test_late_answer_decides_between_two() -> None:
    odd = look(LOOPS)
    assert finding(odd, look(LOOPS, late_s=3.0), W, W)[0] == 1


def test_processes_of_one_host_are_no_contradiction() -> None:
    stopped = look(state="T")
    assert finding(W, W, stopped, stopped, W, W, W, W, per_host=2)[0] == 2
    assert finding(W, stopped, stopped, W, W, W, W, W, per_host=2)[0] is None, "two hosts"
