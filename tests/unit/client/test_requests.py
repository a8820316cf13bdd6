"""What is refused at the door, before anything is acquired, and what a remote function's options become."""

import functools
import inspect
import pickle
import subprocess
import threading
from typing import Any

import pytest
import ray
from ray import cloudpickle

from iris_ray import errors
from iris_ray.actors.wire.messages import RunRequest
from iris_ray.client.run_on_pod import (
    make_request,
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from iris_ray.client.submission import MAX_VARIABLE_BYTES, make_job
from iris_ray.errors import (
    InvalidFunctionError,
    InvalidRequestError,
    InvalidSliceCountError,
    IrisError,
    UnknownTPUTypeError,
    UnsupportedOptionError,
)


def hello() -> str:
    return "hello"


def needs_one(x: int) -> int:
    return x


def with_defaults(x: int = 1, *args: int, y: int = 2, **kwargs: int) -> int:
    return x + y


class Greeter:
    def __call__(self) -> str:
        return "hello"

    def method(self) -> str:
        return "method"

    def needs_one(self, x: int) -> int:
        return x


class NeedsOne:
    def __call__(self, x: int) -> int:
        return x


def request(fn: Any = hello, tpu_type: Any = "v4-32", **changes: Any) -> RunRequest:
    """A request that is fine but for the changes."""
    values = {
        "num_slices": 1,
        "max_retries_preemption": 10_000,
        "max_retries_failure": 10,
        "keep_warm": 60.0,
        "preload": (),
    }
    try:
        return make_request(fn, tpu_type, **(values | changes))
    finally:
        assert not ray.is_initialized()


def remote(**options: Any) -> Any:
    return ray.remote(**options)(hello) if options else ray.remote(hello)


# -- requests as such -----------------------------------------------------------------------------------------------


def test_request_holds_what_the_type_means() -> None:
    made = request(tpu_type="TPU-v5e-16", num_slices=[4, 2])
    spec = made.spec
    assert (spec.device, spec.replicas, spec.resources) == ("v5litepod-16", 4, {"TPU": 4.0})
    assert spec.coscheduling is not None
    assert spec.coscheduling.counts == (2, 4)
    assert (spec.name, made.env) == ("hello", {})
    assert cloudpickle.loads(made.function)() == "hello"


@pytest.mark.parametrize(
    "num_slices", [0, -1, [], (), True, [True], "2", [2, 2], 1.0, [1, 2.0], None, {1, 2}], ids=repr
)
def test_request_with_a_bad_slice_count_is_refused(num_slices: Any) -> None:
    with pytest.raises(InvalidSliceCountError):
        request(num_slices=num_slices)


@pytest.mark.parametrize("tpu_type", ["", "v4", "v4-31", "v99-8", "a100-8", None, 32, ["v4-32"]], ids=repr)
def test_request_of_an_unknown_type_is_refused(tpu_type: Any) -> None:
    with pytest.raises(UnknownTPUTypeError):
        request(tpu_type=tpu_type)


@pytest.mark.parametrize("option", ["max_retries_preemption", "max_retries_failure"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "3", None], ids=repr)
def test_request_with_a_bad_budget_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=option):
        request(**{option: value})


@pytest.mark.parametrize("value", [-1, -0.1, float("nan"), True, "60", None], ids=repr)
def test_request_with_a_bad_keep_warm_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="keep_warm"):
        request(keep_warm=value)


@pytest.mark.parametrize("value", ["jax", [1], [None], b"jax", None, 5], ids=repr)
def test_request_with_a_bad_preload_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="preload"):
        request(preload=value)


def test_request_with_a_generator_of_modules_preloads_them_or_is_refused() -> None:
    try:
        made = request(preload=(name for name in ["json"]))
    except InvalidRequestError:
        return
    assert made.process.preload == ("json",)


def test_request_with_limits_of_what_is_allowed() -> None:
    made = request(max_retries_preemption=0, max_retries_failure=0, keep_warm=0, preload=["json"])
    assert (made.spec.max_retries_preemption, made.spec.max_retries_failure, made.keep_warm) == (0, 0, 0.0)
    assert made.process.preload == ("json",)


# -- functions ------------------------------------------------------------------------------------------------------


def with_env(env: dict[str, str]) -> RunRequest:
    return make_job(hello, None, None, env, 60.0, (), resources={"CPU": 1.0})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"SMALL": "x", "LARGE": "secret" * 30_000}, ["LARGE takes 180,006 bytes", "131,071"]),
        ({f"V{i}": "secret" * 20_000 for i in range(9)}, ["9 environment variables take 1,080,027 bytes", "1,048,576"]),
        ({"LD_PRELOAD": "secret" * 30_000}, ["LD_PRELOAD takes"]),
        ({"WITH_NUL": "secret\0"}, ["WITH_NUL", "NUL"]),
        ({"A=B": "secret"}, ["A=B"]),
        ({"": "secret"}, ["empty"]),
    ],
)
def test_request_with_an_environment_that_can_not_travel_is_refused_with_the_limit(
    env: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        with_env(env)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "secret" not in str(refused.value)
    remote_fn = remote(runtime_env={"env_vars": env})
    with pytest.raises(InvalidRequestError):
        request(remote_fn, "v4-16")


def test_request_with_the_largest_environment_that_may_travel_is_taken() -> None:
    """And Linux starts processes with it."""
    env = {f"V{i}": "x" * (MAX_VARIABLE_BYTES - 3) for i in range(8)}
    assert with_env(env).env == env
    assert len(subprocess.run(["/usr/bin/env"], env=env, capture_output=True, check=True).stdout) == 8 * 128 * 1024
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/usr/bin/env"], env={"V0": "x" * (MAX_VARIABLE_BYTES - 2)}, check=True)


def test_request_that_asks_too_much_for_the_journal_is_refused_with_the_limit() -> None:
    with pytest.raises(InvalidRequestError, match="has 101 characters, and the limit is 100"):
        make_job(hello, None, "n" * 101, {}, 60.0, (), resources={"CPU": 1.0})
    tolerations = tuple(f"taint-{i}" for i in range(20_000))
    with pytest.raises(InvalidRequestError, match="and the limit is 100,000; name fewer or shorter"):
        make_job(hello, None, "n" * 100, {}, 60.0, (), resources={"CPU": 1.0}, tolerations=tolerations)


@pytest.mark.parametrize(
    ("fn", "name", "result"),
    [
        (hello, "hello", "hello"),
        (lambda: 3, "lambda", 3),
        (with_defaults, "with_defaults", 3),
        (functools.partial(needs_one, 4), "needs_one", 4),
        (functools.partial(functools.partial(needs_one), x=5), "needs_one", 5),
        (Greeter(), "Greeter", "hello"),
        (Greeter().method, "method", "method"),
        (dict, None, {}),
    ],
    ids=["function", "lambda", "defaults", "partial", "partial of partial", "instance", "method", "class"],
)
def test_request_callable_of_every_kind_is_named_and_taken(fn: Any, name: str | None, result: Any) -> None:
    if isinstance(fn, type):
        with pytest.raises(InvalidFunctionError, match="class"):
            request(fn)
        return
    made = request(fn)
    assert made.spec.name == name
    assert cloudpickle.loads(made.function)() == result


@pytest.mark.parametrize(
    "fn",
    [
        needs_one,
        functools.partial(with_defaults, 1, z=2),
        Greeter().needs_one,
        NeedsOne(),
        lambda x: x,
        ray.remote(needs_one),
    ],
    ids=["function", "partial that is complete", "method", "instance", "lambda", "remote function"],
)
def test_request_function_that_needs_arguments_is_refused_and_told_how_to_bind_them(fn: Any) -> None:
    if isinstance(fn, functools.partial):
        assert request(fn)
        return
    with pytest.raises(InvalidFunctionError, match=r"functools\.partial"):
        request(fn)


def test_request_bound_dag_node_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidFunctionError, match="bound DAG node"):
        request(ray.remote(hello).bind())


@pytest.mark.parametrize("fn", [None, 3, "hello", [hello], object()], ids=lambda fn: type(fn).__name__)
def test_request_what_is_no_function_is_refused(fn: Any) -> None:
    with pytest.raises(InvalidFunctionError, match=type(fn).__name__):
        request(fn)


@pytest.mark.parametrize("fn", [Greeter, ray.remote(Greeter)], ids=["class", "actor class"])
def test_request_class_is_refused(fn: Any) -> None:
    with pytest.raises(InvalidFunctionError, match="class"):
        request(fn)


def test_request_remote_function_with_options_of_a_call_says_where_they_belong() -> None:
    """``fn.options(...)`` is neither a function nor a remote function."""
    with pytest.raises(InvalidFunctionError, match="options"):
        request(ray.remote(hello).options(num_cpus=2))


def test_request_function_that_can_not_be_pickled_is_refused_with_the_cause() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidFunctionError, match="can't be pickled") as refused:
        request(lambda: lock)
    assert isinstance(refused.value.__cause__, TypeError)


# -- options of remote functions ------------------------------------------------------------------------------------


def test_options_of_a_plain_remote_function_are_none() -> None:
    made = request(remote())
    assert (made.env, made.spec.resources, made.process.runtime_env) == ({}, {"TPU": 4.0}, {})
    assert cloudpickle.loads(made.function)() == "hello"


def test_options_that_are_honoured() -> None:
    made = request(
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


def test_options_without_variables_that_act_at_start_need_no_process_of_their_own() -> None:
    made = request(remote(runtime_env={"env_vars": {"A": "1"}}))
    assert made.process == request().process


def test_options_request_does_not_change_the_remote_function() -> None:
    fn = remote(runtime_env={"env_vars": {"A": "1", "TZ": "UTC"}}, resources={"TPU": 4})
    assert request(fn) == request(fn)


@pytest.mark.parametrize(
    "options",
    [{"max_calls": 1}, {"num_returns": 1}, {"num_gpus": 0}, {"max_retries": 0}, {"retry_exceptions": False}],
    ids=str,
)
def test_options_that_hold_for_every_gang_are_taken(options: dict[str, Any]) -> None:
    assert request(remote(**options))


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
def test_options_that_a_gang_can_not_honour_are_refused_with_a_reason(options: dict[str, Any], reason: str) -> None:
    """Tasks that kept Ray's own retries ran 16 times on a budget of 3 (defect 2); and nothing is silently dropped."""
    with pytest.raises(UnsupportedOptionError, match=reason) as refused:
        request(remote(**options))
    assert next(iter(options)) in str(refused.value)


def test_options_refusal_does_not_tell_the_values_of_variables() -> None:
    """Secrets from a runtime_env were logged (defect 11)."""
    fn = remote(runtime_env={"env_vars": {"TOKEN": "s3cret", "LD_X": "s3cret"}}, max_retries=3)
    with pytest.raises(UnsupportedOptionError) as refused:
        request(fn)
    assert "s3cret" not in str(refused.value)


# -- the family -----------------------------------------------------------------------------------------------------

FAMILY = [
    run_on_pod,
    run_on_pod_ray.remote,
    run_on_pod_resumable,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
]


@pytest.mark.parametrize("launch", FAMILY, ids=lambda launch: getattr(launch, "__qualname__", ""))
@pytest.mark.parametrize(
    ("fn", "tpu_type", "num_slices"),
    [(needs_one, "v4-32", 1), (hello, "v4-31", 1), (hello, "v4-32", True)],
    ids=["function", "type", "count"],
)
def test_family_refuses_bad_input_before_it_looks_for_a_cluster(
    launch: Any, fn: Any, tpu_type: str, num_slices: Any
) -> None:
    """``run_on_pod_multislice`` raised TypeError always (defect 6)."""
    with pytest.raises(InvalidRequestError):
        launch(fn, tpu_type, num_slices=num_slices)
    assert not ray.is_initialized()


def test_run_on_pod_ray_called_directly_says_how_to_call_it() -> None:
    with pytest.raises(TypeError, match=r"run_on_pod_ray\.remote"):
        run_on_pod_ray(hello, "v4-32")


# -- errors ---------------------------------------------------------------------------------------------------------

ERRORS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, IrisError)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_errors_cross_processes_intact(error: type[IrisError]) -> None:
    copy = pickle.loads(pickle.dumps(error("what happened")))
    assert type(copy) is error
    assert str(copy) == "what happened"


def test_errors_tree_is_drawn_with_every_one_of_them() -> None:
    drawn = errors.__doc__ or ""
    assert [e.__name__ for e in ERRORS if e.__name__ not in drawn] == []
