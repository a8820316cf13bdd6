"""A model or policy with a value that can't work is refused where it is made, before anybody looks for room."""

from typing import Any

import pytest

from iris_ray.errors import InvalidSlotError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.slots.actors.messages import ModelOrder
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import PlacementPolicy, ServingPolicy

HERE = Constraint("zone", ConstraintOp.EQ, "z")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "name is ''"),
        ({"memory": {}}, "has no memory"),
        ({"memory": 10**9}, "memory is 1000000000; give bytes by number of devices"),
        ({"memory": {1: 0}}, "0 is no int of 1 or more"),
        ({"memory": {1: 1.5}}, "1.5 is no int"),
        ({"concurrency": 0}, "0 is no int"),
        ({"kind": "gpu"}, "kind is 'gpu'; give a DeviceKind"),
        ({"runtime": None}, "runtime is None; give a str"),
        ({"lora": ["a"]}, "lora is"),
        ({"constraints": "zone=z"}, "constraints has 'zone=z'"),
        ({"constraints": ["zone=z"]}, "give a list of Constraint"),
    ],
)
def test_impossible_value_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSlotError, match=said):
        ModelSpec(**{"name": "m", "memory": {1: 10**9}, **wrong})


@pytest.mark.parametrize("constraints", [[HERE], (HERE,), HERE])
def test_constraints_may_be_a_list(constraints: Any) -> None:
    assert ModelSpec("m", {1: 1}, constraints=constraints).constraints == (HERE,)


@pytest.mark.parametrize("replicas", [None, -1, 1.5, "2"])
def test_invalid_replicas_are_refused(replicas: Any) -> None:
    with pytest.raises(InvalidSlotError, match=r"replicas is .*; give an int of 0 or more"):
        ModelOrder(ModelSpec("m", {1: 1}), b"", replicas)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"drain_s": "60"}, "drain_s is '60'; give seconds, 0 or more, or infinity"),
        ({"ageing_s": -1.0}, r"ageing_s is -1\.0"),
        ({"idle_s": float("nan")}, "idle_s is nan"),
        ({"late_factor": None}, "late_factor is None; give a number, 0 or more"),
        ({"most_attempts": 0}, "most_attempts is 0; give an int of 1 or more"),
        ({"most_waiting": 1.5}, r"most_waiting is 1\.5"),
        ({"placement": None}, "placement is None; give a PlacementPolicy"),
    ],
)
def test_impossible_policy_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSlotError, match=said):
        ServingPolicy(**wrong)
    assert ServingPolicy(idle_s=float("inf"), drain_s=0).idle_s == float("inf")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"stale_at": 10.0}, r"stale_at is 10\.0; give a function"), ({"spread_before_evicting": "no"}, "True or False")],
)
def test_impossible_placement_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSlotError, match=said):
        PlacementPolicy(**wrong)


def test_sizes_that_differ_are_kept_beside_the_largest() -> None:
    spec = ModelSpec("m", {1: 9, 2: (6, 4)})
    assert (spec.memory, spec.sizes_on(1), spec.sizes_on(2)) == ({1: 9, 2: 6}, (9,), (6, 4))
    assert spec != ModelSpec("m", {1: 9, 2: 6})
    assert hash(spec) == hash(ModelSpec("m", {1: 9, 2: [6, 4]}))


@pytest.mark.parametrize("sizes", [(6,), (6, 4, 2), (6, 0), (6, "4"), ()])
def test_wrong_sizes_of_devices_are_refused(sizes: Any) -> None:
    with pytest.raises(InvalidSlotError, match="model m"):
        ModelSpec("m", {2: sizes})
