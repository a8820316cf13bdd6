"""`iris_ray.levanter` takes the arguments of ``levanter.infra.ray_tpu``, and means the same by them."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import iris_ray.levanter
from iris_ray.errors import InvalidRequestError
from tests.support.requests import hello

POSITIONAL, KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
NO_DEFAULT = inspect.Parameter.empty
FUNCTION_AND_TYPE = [("remote_fn", POSITIONAL, NO_DEFAULT), ("tpu_type", POSITIONAL, NO_DEFAULT)]
SIGNATURES: dict[str, list[tuple[str, Any, Any]]] = {
    "run_on_pod": [
        *FUNCTION_AND_TYPE,
        ("num_slices", KEYWORD, 1),
        ("max_retries_preemption", KEYWORD, 10_000),
        ("max_retries_failure", KEYWORD, 10),
    ],
    "run_on_pod_ray": [
        *FUNCTION_AND_TYPE,
        ("num_slices", POSITIONAL, 1),
        ("max_retries_preemption", POSITIONAL, 10_000),
        ("max_retries_failure", POSITIONAL, 10),
    ],
    "run_on_pod_multislice": [*FUNCTION_AND_TYPE, ("num_slices", POSITIONAL, NO_DEFAULT)],
    "run_on_pod_resumable": [
        *FUNCTION_AND_TYPE,
        ("max_retries_preemption", POSITIONAL, 1_000_000),
        ("max_retries_failure", POSITIONAL, 10),
    ],
    "run_on_pod_multislice_resumable": [
        *FUNCTION_AND_TYPE,
        ("num_slices", POSITIONAL, NO_DEFAULT),
        ("max_retries_preemption", POSITIONAL, 1_000_000),
        ("max_retries_failure", POSITIONAL, 10),
    ],
    "submit_tpu_job_on_ray": [
        ("config", POSITIONAL, NO_DEFAULT),
        ("ray_address", POSITIONAL, NO_DEFAULT),
        ("run_id", POSITIONAL, None),
    ],
    "get_tpu_config": [("tpu_type", POSITIONAL, NO_DEFAULT)],
}
"""As in levanter 1.2.dev1644."""


def ours(name: str) -> Callable[..., Any]:
    function = getattr(iris_ray.levanter, name)
    return function.remote if name == "run_on_pod_ray" else function


@pytest.mark.parametrize("name", SIGNATURES)
def test_levanters_parameters_come_first_and_ours_by_name(name: str) -> None:
    shown = inspect.signature(ours(name)).parameters
    recorded = SIGNATURES[name]
    assert [(known, shown[known].kind, shown[known].default) for known, _, _ in recorded] == recorded
    by_position = [known for known, parameter in shown.items() if parameter.kind is POSITIONAL]
    assert by_position == [known for known, kind, _ in recorded if kind is POSITIONAL]


def test_recorded_signatures_match_installed_levanter() -> None:
    """Marin's Levanter has no such module any more, so this runs only where the older one is installed by hand."""
    theirs = pytest.importorskip(
        "levanter.infra.ray_tpu", reason="needs a Levanter from before Marin's: pip install levanter==1.2.dev1644"
    )
    for name, recorded in SIGNATURES.items():
        function = getattr(theirs, name)
        shown = inspect.signature(getattr(function, "_function", function)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in shown] == recorded, name


@pytest.mark.parametrize(
    ("name", "arguments", "refused"),
    [
        ("run_on_pod_resumable", [-5], "max_retries_preemption is -5"),
        ("run_on_pod_resumable", [5, -1], "max_retries_failure is -1"),
        ("run_on_pod_multislice_resumable", [2, -5], "max_retries_preemption is -5"),
        ("run_on_pod_multislice_resumable", [2, 5, -1], "max_retries_failure is -1"),
        ("run_on_pod_multislice_resumable", [-2], "-2"),
        ("run_on_pod_multislice", [-2], "-2"),
        ("run_on_pod_ray", [1, -5], "max_retries_preemption is -5"),
    ],
)
def test_positional_number_means_what_levanter_means(name: str, arguments: list[int], refused: str) -> None:
    with pytest.raises(InvalidRequestError, match=refused):
        ours(name)(hello, "v4-16", *arguments)


@pytest.mark.parametrize("name", ["run_on_pod", "run_on_pod_resumable"])
def test_number_with_other_meaning_in_levanter_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="takes remote_fn and tpu_type by position, and the rest by name: num_slices, "):
        getattr(iris_ray, name)(hello, "v4-16", 5)


def test_wrong_option_is_refused_with_nearest() -> None:
    with pytest.raises(InvalidRequestError, match="spares is -1"):
        iris_ray.levanter.run_on_pod_resumable(hello, "v4-16", 5, spares=-1)
    with pytest.raises(TypeError, match="did you mean 'spares'"):
        iris_ray.levanter.run_on_pod_resumable(hello, "v4-16", 5, spare=1)  # type: ignore[call-arg]


def test_names_are_importable_without_levanter_and_jax() -> None:
    names = ", ".join(iris_ray.levanter.__all__)
    script = f"from iris_ray.levanter import {names}\nimport sys\nprint({{'levanter', 'jax'}} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
