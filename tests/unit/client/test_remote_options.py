"""What the options of a Ray remote function become: honoured, or refused with a reason."""

from enum import Enum
from typing import Any

import pytest
from ray import cloudpickle

from iris_ray.errors import InvalidJobError, UnsupportedOptionError
from tests.support.requests import pod_request, remote, task_request


def test_plain_remote_function_has_no_options() -> None:
    made = pod_request(remote())
    assert (made.env, made.spec.resources, made.process.runtime_env) == ({}, {"TPU": 4.0}, {})
    assert cloudpickle.loads(made.pickled_function)() == "hello"


def test_honoured_options_are_read() -> None:
    made = pod_request(
        remote(
            num_cpus=3,
            memory=1000,
            resources={"disk": 2, "TPU": 4},
            name="my job",
            runtime_env={"working_dir": None, "env_vars": {"A": "1", "LD_PRELOAD": "x.so", "PYTHONPATH": "/p"}},
        )
    )
    assert made.spec.name == "my job"
    assert made.spec.resources == {"TPU": 4.0, "CPU": 3.0, "memory": 1000.0, "disk": 2.0}
    assert made.env == {"A": "1"}
    assert made.process.runtime_env["env_vars"] == {"LD_PRELOAD": "x.so", "PYTHONPATH": "/p"}


class Colour(str, Enum):  # noqa: UP042 - its str() is not its value
    RED = "red"


def test_variables_of_str_subclass_become_plain() -> None:
    made = pod_request(remote(runtime_env={"env_vars": {"A": Colour.RED, "TZ": Colour.RED}}), env={"B": Colour.RED})
    values = (made.env["A"], made.env["B"], made.process.runtime_env["env_vars"]["TZ"])
    assert [(type(value), value) for value in values] == 3 * [(str, "red")]


def test_harmless_variables_need_no_own_process() -> None:
    made = pod_request(remote(runtime_env={"env_vars": {"A": "1"}}))
    assert made.process == pod_request().process


def test_request_does_not_change_remote_functions_options() -> None:
    function = remote(runtime_env={"env_vars": {"A": "1", "TZ": "UTC"}}, resources={"TPU": 4})
    made, again = pod_request(function), pod_request(function)
    assert (made.env, made.process, made.spec.resources) == (again.env, again.process, again.spec.resources)


def test_gpus_of_remote_function_belong_to_tasks_without_tpu() -> None:
    assert task_request(remote(num_gpus=2)).spec.resources == {"CPU": 1.0, "GPU": 2.0}
    with pytest.raises(InvalidJobError, match="whole GPUs"):
        task_request(remote(num_gpus=0.5))


@pytest.mark.parametrize(
    "options",
    [{"max_calls": 1}, {"num_returns": 1}, {"num_gpus": 0}, {"max_retries": 0}, {"retry_exceptions": False}],
    ids=str,
)
def test_options_true_of_every_gang_are_accepted(options: dict[str, Any]) -> None:
    assert pod_request(remote(**options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_calls": 2}, "runs one task"),
        ({"num_returns": 2}, "tuple"),
        ({"num_gpus": 1}, "no GPUs"),
        ({"max_retries": 3}, "max_retries_failure"),
        ({"max_retries": -1}, "max_retries_failure"),
        ({"retry_exceptions": True}, "max_retries_failure"),
        ({"retry_exceptions": [ValueError]}, "max_retries_failure"),
        ({"scheduling_strategy": "SPREAD"}, "decides where"),
        ({"label_selector": {"a": "b"}}, "decides where"),
        ({"accelerator_type": "TPU-V4"}, "TPU type"),
        ({"resources": {"TPU": 1}}, "all 4 chips"),
        ({"resources": {"TPU": 8}}, "all 4 chips"),
        ({"enable_task_events": False}, "enable_task_events"),
        ({"_labels": {"a": "b"}}, "_labels"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_with_reason(options: dict[str, Any], reason: str) -> None:
    """Tasks that kept Ray's own retries ran 16 times on a budget of 3 (defect 2); and nothing is silently dropped."""
    with pytest.raises(UnsupportedOptionError, match=reason) as refused:
        pod_request(remote(**options))
    assert next(iter(options)) in str(refused.value)


def test_refused_options_do_not_leak_variable_values() -> None:
    """Secrets from a runtime_env were logged (defect 11)."""
    function = remote(runtime_env={"env_vars": {"TOKEN": "s3cret", "LD_X": "s3cret"}}, max_retries=3)
    with pytest.raises(UnsupportedOptionError) as refused:
        pod_request(function)
    assert "s3cret" not in str(refused.value)
