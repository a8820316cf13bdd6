"""Requests for tests of what is refused at once, and of what arrives."""

from typing import Any

import ray

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.job_request import make_pod_request, make_request
from iris_ray.client.placement import placement_of
from iris_ray.model.requirement import ResourceSpec


def hello() -> str:
    return "hello"


def pod_request(remote_fn: Any = hello, tpu_type: Any = "v4-32", num_slices: Any = 1, **options: Any) -> RunRequest:
    """The request of a gang on slices, with default options unless told. Needs no cluster."""
    try:
        return make_pod_request(remote_fn, tpu_type, num_slices, **options)
    finally:
        assert not ray.is_initialized()


def task_request(remote_fn: Any = hello, name: str | None = None, **options: Any) -> RunRequest:
    """The request of one task without chips. Needs no cluster."""
    try:
        return make_request(remote_fn, placement_of(ResourceSpec(), None), name, **options)
    finally:
        assert not ray.is_initialized()


def remote(**options: Any) -> Any:
    """`hello` as a Ray remote function."""
    return ray.remote(**options)(hello) if options else ray.remote(hello)
