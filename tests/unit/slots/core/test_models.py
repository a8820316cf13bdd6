"""A model or policy with a value that can't work is refused where it is made, before anybody looks for room."""

from collections.abc import Callable
from typing import Any

import pytest

from iris_ray.errors import InvalidSlotError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.slots.actors.messages import ModelOrder
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import PlacementPolicy, ServingPolicy

HERE = Constraint("zone", ConstraintOp.EQ, "z")


def a_model(**parts: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "memory": {1: 10**9}, **parts})


def an_order(replicas: Any) -> ModelOrder:
    return ModelOrder(a_model(), b"", replicas)


@pytest.mark.parametrize(
    ("make", "wrong", "said"),
    [
        (a_model, {"name": ""}, "name is ''"),
        (a_model, {"memory": {}}, "has no memory"),
        (a_model, {"memory": 10**9}, "memory is 1000000000; give bytes by number of devices"),
        (a_model, {"memory": {1: 0}}, "memory has 0; give ints of 1 or more"),
        (a_model, {"memory": {1: 1.5}}, "memory has 1.5"),
        *((a_model, {"memory": {2: sizes}}, "model m") for sizes in ((6,), (6, 4, 2), (6, 0), (6, "4"), ())),
        (a_model, {"memory": {2: (6, 4, 2)}}, r"memory\[2\] has 3 sizes; give one for each device"),
        (a_model, {"memory": {16 * 10**9: 1}}, "memory is for 16,000,000,000 devices, and a slot has 16,384 at most"),
        *((a_model, {"concurrency": no}, "concurrency is .*; give an int from 1 to 2000") for no in (0, 50_000, 1.5)),
        (a_model, {"kind": "gpu"}, "kind is 'gpu'; give a DeviceKind"),
        (a_model, {"runtime": None}, "runtime is None; give a str"),
        (a_model, {"lora": ["a"]}, "lora is"),
        (a_model, {"constraints": "zone=z"}, "constraints has 'zone=z'"),
        (a_model, {"constraints": ["zone=z"]}, "give a list of Constraint"),
        *((an_order, {"replicas": no}, "replicas is .*; give an int of 0 or more") for no in (None, -1, 1.5, "2")),
        (ServingPolicy, {"drain_s": "60"}, "drain_s is '60'; give seconds, 0 or more, or infinity"),
        (ServingPolicy, {"ageing_s": -1.0}, r"ageing_s is -1\.0"),
        (ServingPolicy, {"idle_s": float("nan")}, "idle_s is nan"),
        (ServingPolicy, {"silence_s": 9.0}, r"silence_s is 9\.0; give seconds, 10 or more, or infinity"),
        (ServingPolicy, {"late_factor": None}, "late_factor is None; give a number, 0 or more"),
        (ServingPolicy, {"most_attempts": 0}, "most_attempts is 0; give an int of 1 or more"),
        (ServingPolicy, {"most_waiting": 1.5}, r"most_waiting is 1\.5"),
        (ServingPolicy, {"placement": None}, "placement is None; give a PlacementPolicy"),
        (PlacementPolicy, {"stale_at": 10.0}, r"stale_at is 10\.0; give a function"),
        (PlacementPolicy, {"spread_before_evicting": "no"}, "True or False"),
    ],
)
def test_impossible_value_is_refused(make: Callable[..., object], wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSlotError, match=said):
        make(**wrong)


def test_policy_may_wait_forever_or_not_at_all() -> None:
    assert ServingPolicy(idle_s=float("inf"), drain_s=0).idle_s == float("inf")


@pytest.mark.parametrize("constraints", [[HERE], (HERE,), HERE])
def test_constraints_may_be_a_list(constraints: Any) -> None:
    assert ModelSpec("m", {1: 1}, constraints=constraints).constraints == (HERE,)


def test_sizes_that_differ_are_kept_beside_the_largest() -> None:
    spec = ModelSpec("m", {1: 9, 2: (6, 4)})
    assert (spec.memory, spec.sizes_on(1), spec.sizes_on(2)) == ({1: 9, 2: 6}, (9,), (6, 4))
    assert spec != ModelSpec("m", {1: 9, 2: 6})
    assert spec.needs == {1: ((1, 9),), 2: ((1, 6), (2, 4))}
    assert ModelSpec("m", {3: (4, 6, 4)}).needs == {3: ((1, 6), (3, 4))}
    assert ModelSpec("m", {3: (4, 6, 4)}).shape == ModelSpec("n", {3: (6, 4, 4)}).shape != spec.shape
    assert hash(spec) == hash(ModelSpec("m", {1: 9, 2: [6, 4]}))
