"""A model with a value that can't work is refused where it is made, before anybody looks for room for it."""

from typing import Any

import pytest

from iris_ray.errors import InvalidSlotError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.slots.actors.messages import ModelOrder
from iris_ray.slots.core.models import ModelSpec

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
        ({"constraints": "zone=z"}, "constraints is 'zone=z'"),
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
