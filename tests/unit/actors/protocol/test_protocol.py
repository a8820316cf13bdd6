"""A client and a Controller of versions that can't talk to each other say so."""

import contextlib
from collections.abc import Sequence

import pytest

import iris_ray
from iris_ray.actors.protocol.version import (
    NO_VERSIONS,
    PROTOCOL_VERSION,
    package_directory,
    require_fit,
    require_fitting_controller,
    versions_here,
)
from iris_ray.errors import VersionMismatchError
from iris_ray.model.job_spec import FIELDS_OF_A_JOB


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        (PROTOCOL_VERSION - 1, "iris-ray cluster controller upgrade"),
        (PROTOCOL_VERSION + 1, "install iris_ray 7.0.0 here"),
    ],
)
def test_only_other_protocol_is_refused_with_versions_and_advice(theirs: int, advice: str) -> None:
    patch = versions_here() | {"version": "7.0.0", "package": "/image/iris_ray", "address": "10.0.0.9"}
    require_fitting_controller(patch)
    with pytest.raises(VersionMismatchError) as refused:
        require_fitting_controller(patch | {"protocol": theirs})
    ours = f"iris_ray {iris_ray.__version__} (protocol {PROTOCOL_VERSION}) from {package_directory()} on "
    for said in (f"iris_ray 7.0.0 (protocol {theirs}) from /image/iris_ray on 10.0.0.9", ours, advice):
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        ([*FIELDS_OF_A_JOB, "colour"], "knows colour of a job: install iris_ray 7.0.0 here"),
        (FIELDS_OF_A_JOB[:-1], "knows may_evict of a job: replace the Controller"),
    ],
)
def test_other_options_of_a_job_are_refused_by_name(theirs: Sequence[str], advice: str) -> None:
    with pytest.raises(VersionMismatchError, match=advice):
        require_fitting_controller(versions_here() | {"version": "7.0.0", "job": theirs})


@pytest.mark.parametrize(
    ("versions", "refused"),
    [
        ({"python": "3.11.2"}, False),
        ({"python": "3.9.1"}, True),
        ({"ray": "2.49.7"}, False),
        ({"ray": "2.55.1"}, True),
        ({"ray": None}, False),
    ],
)
def test_pickles_cross_between_patch_versions_only(versions: dict[str, str], refused: bool) -> None:
    ours = versions_here() | {"python": "3.11.9", "ray": "2.49.2"}
    expectation = pytest.raises(VersionMismatchError, match="use the same") if refused else contextlib.nullcontext()
    with expectation:
        require_fit(ours | versions, ours, "v4-16-0 host 1", "install it there")


def test_versions_of_an_older_process_can_be_read() -> None:
    with pytest.raises(
        VersionMismatchError, match=r"is iris_ray an older version \(protocol 0\), and this is iris_ray"
    ):
        require_fitting_controller(NO_VERSIONS)
