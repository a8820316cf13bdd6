"""What a user may ask of a container, and what its container is called."""

from dataclasses import replace
from typing import Any

import pytest

from iris_ray.docker.core import ContainerSpec, container_name
from iris_ray.errors import InvalidRequestError
from tests.unit.model.test_job_info import INFO


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": ""}, "image_id is ''; give an image"),
        ({"image": None}, "image_id is None"),
        ({"image": "--privileged"}, "image_id is '--privileged'"),
        ({"image": "my image"}, "image_id is 'my image'"),
        ({"command": "python train.py"}, r"command is 'python train.py'; give a list of str, such as \["),
        ({"command": ["python", 7]}, r"command is \['python', 7\]"),
        ({"command": ["a\0b"]}, "command holds a NUL"),
        ({"options": "--volume=/a:/a"}, "container_options is '--volume=/a:/a'; give a list"),
        ({"options": ["--name=mine"]}, "'--name=mine', which is iris_ray's to choose"),
        ({"options": ["-d"]}, "'-d', which is iris_ray's"),
        ({"options": ["-Pit"]}, "'-Pit', which is iris_ray's"),
        ({"options": ["--label=iris-ray.container=x"]}, "'--label=iris-ray.container=x', which is iris_ray's"),
        ({"options": ["-l", "iris-ray.container="]}, "'iris-ray.container=', which is iris_ray's"),
        ({"options": ["--label-file=labels"]}, "'--label-file=labels', which is iris_ray's"),
        ({"env": [("A", "b")]}, "env must be a mapping"),
        ({"env": {"A": 7}}, "env must be a mapping of names to values, all str"),
        ({"env": {"A B": "secret"}}, "env holds the name 'A B'"),
        ({"env": {"A*": "secret"}}, r"env holds the name 'A\*'"),
        ({"env": {"": "secret"}}, "env holds the name ''"),
    ],
)
def test_impossible_container_is_refused_without_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        ContainerSpec(**{"image": "busybox", "command": ["true"], **given})
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("image", ["busybox", "gcr.io/p/train:v7", "localhost:5000/a/b@sha256:0a1b"])
def test_image_names_of_every_form_are_accepted(image: str) -> None:
    assert ContainerSpec(image, ()).image == image


def test_spec_shows_no_values() -> None:
    assert "s3cret" not in repr(ContainerSpec("busybox", ["true"], {"TOKEN": "s3cret"}))


def test_container_names_are_unique_and_valid_for_engines() -> None:
    task = replace(INFO, job_id="parent-1f/tr ain-2e", task_index=5, attempt=3)
    assert container_name(task) == "iris-parent-1f-tr-ain-2e-task-5-attempt-3"
    others = [replace(task, task_index=6), replace(task, attempt=4), replace(task, job_id="parent-1f/tr ain-2d")]
    assert len({container_name(other) for other in (task, *others)}) == 4
