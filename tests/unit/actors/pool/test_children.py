"""Which requests are the same, though they were made by different processes, and what differs between others."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ray import cloudpickle

from iris_ray import Constraint, ConstraintOp, PriorityBand, ResourceSpec
from iris_ray.actors.pool.children import differences, may_adopt, same_object
from iris_ray.actors.protocol.messages import ChildOf, RunRequest
from iris_ray.client.job_request import make_request
from iris_ray.client.placement import placement_of
from iris_ray.model.secret import SecretValue

PICKLED_ELSEWHERE = """
import sys
from ray import cloudpickle

def make(step):
    words = {"one", "two", "three", "four", "five"}
    def work(at=step):
        return words if at in {"six", "seven", "eight", "nine"} else [words, "one", len]
    return lambda: work() if words else cloudpickle.dumps(work)

made = make(int(sys.argv[1]))
sys.stdout.buffer.write(cloudpickle.dumps([made, cloudpickle.dumps(made)]))
"""


def pickled_elsewhere(step: int, seed: int) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", PICKLED_ELSEWHERE, str(step)]
    return subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def work() -> None: ...


def request(**options: Any) -> RunRequest:
    made = make_request(work, placement_of(options.pop("resources", ResourceSpec()), None), "step", **options)
    return replace(made, child_of=ChildOf("parent-1", 0, 1))


def differing(old: RunRequest, new: RunRequest) -> tuple[str, ...]:
    return differences(old, new, b"N.", b"N.")


def test_functions_pickled_by_different_processes_are_the_same() -> None:
    one, other = pickled_elsewhere(1, seed=1), pickled_elsewhere(1, seed=2)
    assert one != other
    assert same_object(one, other)
    assert not same_object(one, pickled_elsewhere(2, seed=1))


def test_functions_with_other_closures_are_not_the_same() -> None:
    def made(at: int) -> Callable[[], int]:
        return lambda: at

    assert same_object(cloudpickle.dumps(made(1)), cloudpickle.dumps(made(1)))
    assert not same_object(cloudpickle.dumps(made(1)), cloudpickle.dumps(made(2)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        ({1, 2}, frozenset({1, 2})),
        ("ab", b"ab"),
        ([[1], [2]], [[1, 2]]),
        (1, 1.0),
        (b"\x80\x05N.", b"\x80\x05K\x01."),
    ],
)
def test_different_objects_are_not_the_same(one: object, other: object) -> None:
    assert not same_object(cloudpickle.dumps(one), cloudpickle.dumps(other))


def test_objects_that_occur_twice_or_grow_later_are_told_apart() -> None:
    first, second = [1], [2]
    assert not same_object(cloudpickle.dumps([first, second, first]), cloudpickle.dumps([first, second, second]))
    names = [f"name {i}" for i in range(3_000)]  # more than a pickler adds to a set at a time
    backwards = names[::-1]
    assert same_object(cloudpickle.dumps(set(names)), cloudpickle.dumps(set(backwards)))


def test_requests_made_twice_have_nothing_that_differs() -> None:
    assert request().spec.job_id != request().spec.job_id
    assert differing(request(), request()) == ()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: request(priority=PriorityBand.BATCH), "priority was INTERACTIVE and is BATCH"),
        (lambda: request(team="vision"), "team was '' and is 'vision'"),
        (lambda: request(resources=ResourceSpec(replicas=2)), "replicas was 1 and is 2"),
        (lambda: request(env={"A": "hidden"}), "the variable 'A'"),
        (lambda: request(env={"LD_A": "hidden"}), "the variable 'LD_A'"),
        (lambda: request(stall_timeout=600), "stall_timeout was None and is 600.0"),
        (lambda: replace(request(), secrets={"KEY": SecretValue("hidden")}), "the secret 'KEY'"),
        (lambda: request(constraints=[Constraint("zone", ConstraintOp.EQ, "b")]), "constraints was"),
    ],
    ids=range(8),
)
def test_what_differs_is_named_without_values_of_variables(made: Callable[[], RunRequest], said: str) -> None:
    (differs,) = differing(request(), made())
    assert differs.startswith(said)
    assert "hidden" not in differs


def test_user_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = request()
    monkeypatch.setenv("IRIS_USER", "somebody-else")
    (differs,) = differing(old, request())
    assert differs.startswith("user was ")


def test_function_that_differs_is_named() -> None:
    assert differences(request(), request(), cloudpickle.dumps(1), cloudpickle.dumps(2)) == ("the function",)


def test_constraint_from_the_place_of_the_attempt_does_not_count() -> None:
    def made(attempt: int, region: str) -> RunRequest:
        place = Constraint("region", ConstraintOp.IN, [region])
        return replace(request(constraints=[place]), child_of=ChildOf("parent-1", 0, attempt, (place,)))

    assert differing(made(1, "west"), made(2, "east")) == ()
    asked = request(constraints=[Constraint("region", ConstraintOp.IN, ["east"])])
    assert len(differing(made(1, "west"), asked)) == 1


@pytest.mark.parametrize(
    ("by", "may"),
    [
        (ChildOf("parent-1", 0, 2), True),
        (ChildOf("parent-1", 0, 7), True),
        (ChildOf("parent-1", 0, 1), False),
        (ChildOf("parent-1", 1, 2), False),
        (ChildOf("parent-2", 0, 2), False),
    ],
)
def test_only_a_later_attempt_of_the_task_may_adopt(by: ChildOf, may: bool) -> None:
    assert may_adopt(by, ChildOf("parent-1", 0, 1)) is may
