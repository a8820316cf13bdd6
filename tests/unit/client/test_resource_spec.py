"""What is refused before anything is sent: resources that can't be, and endpoints outside a task."""

from typing import Any

import pytest

from iris_ray import ResourceSpec, register_endpoint, tpu_device
from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cpu": -1}, "cpu"),
        ({"cpu": True}, "cpu"),
        ({"memory_gb": float("nan")}, "memory_gb"),
        ({"memory_gb": "3"}, "memory_gb"),
        ({"gpu": -1}, "gpu"),
        ({"gpu": 0.5}, "gpu"),
        ({"gpu": True}, "gpu"),
        ({"gpu": 1, "device": tpu_device("v4-8")}, "a v4-8 slice have no GPUs"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 1.5}, "replicas"),
        ({"device": "v4-8"}, r"tpu_device\("),
    ],
    ids=str,
)
def test_impossible_resources_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        ResourceSpec(**values)


def test_unknown_device_is_refused_with_nearest() -> None:
    with pytest.raises(UnknownTPUTypeError, match="v4-32"):
        tpu_device("v4-31")


def test_endpoint_outside_a_task_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="task"):
        register_endpoint("a", "b")
