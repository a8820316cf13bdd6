"""`stall_timeout`, ``spares`` and ``grow_after``, at every door; and how long a host may be silent."""

import math
from typing import Any

import pytest
import ray

from iris_ray import CoschedulingConfig, IrisClient, ResourceSpec, tpu_device
from iris_ray.actors.wire.messages import HOST_SILENCE_S, TaskLaunch
from iris_ray.cli.exits import USAGE
from iris_ray.client.run_on_pod import (
    make_request,
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from iris_ray.client.submission import host_silence_s, make_job
from iris_ray.errors import InvalidRequestError
from iris_ray.model.job_info import JobInfo
from iris_ray.model.jobs import GROW_AFTER_S
from iris_ray.model.multislice import MultisliceInfo
from tests.support.command_line import address_of_nobody, invoke


def hello() -> str:
    return "hello"


def submit(fn: Any, tpu_type: str, num_slices: int, **options: Any) -> None:
    client = IrisClient.__new__(IrisClient)  # what is refused at the door needs no cluster
    need = ResourceSpec(device=tpu_device(tpu_type))
    client.submit(fn, resources=need, coscheduling=CoschedulingConfig(num_groups=num_slices), **options)


FAMILY = {
    "run_on_pod": run_on_pod,
    "run_on_pod_ray": run_on_pod_ray.remote,
    "run_on_pod_resumable": run_on_pod_resumable,
    "run_on_pod_multislice": run_on_pod_multislice,
    "run_on_pod_multislice_resumable": run_on_pod_multislice_resumable,
    "IrisClient.submit": submit,
}
NO_NUMBERS = [-1, -0.5, math.nan, math.inf, True, "60", [60]]
BAD = [
    *(("stall_timeout", value, "stall_timeout.*give seconds, more than 0, or None") for value in (*NO_NUMBERS, 0)),
    *(("grow_after", value, "grow_after.*give seconds, or None") for value in NO_NUMBERS),
    *(("spares", value, "spares.*give an int of 0 or more") for value in (-1, True, 1.0, "1", None)),
]


@pytest.fixture(autouse=True)
def _no_cluster() -> Any:
    yield
    assert not ray.is_initialized()


@pytest.mark.parametrize("launch", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize(("option", "value", "said"), BAD, ids=[f"{option}={value!r}" for option, value, _ in BAD])
def test_option_that_makes_no_sense_is_refused_with_its_value_and_what_to_give(
    launch: Any, option: str, value: Any, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        launch(hello, "v4-16", num_slices=1, **{option: value})
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("launch", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize("option", ["spare", "stall_time_out", "retries"])
def test_option_that_there_is_not_is_refused(launch: Any, option: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        launch(hello, "v4-16", num_slices=1, **{option: 1})


def request(**options: Any) -> Any:
    return make_request(hello, "v4-16", 1, 10, 10, 60.0, (), **options)


def test_options_that_are_good_arrive() -> None:
    made = request(stall_timeout=0.5, spares=2, grow_after=0)
    assert (made.stall_timeout, made.spec.spares, made.spec.grow_after) == (0.5, 2, 0)
    made = request(stall_timeout=None, spares=0, grow_after=None)
    assert (made.stall_timeout, made.spec.spares, made.spec.grow_after) == (None, 0, None)
    made = request()
    assert (made.stall_timeout, made.spec.spares, made.spec.grow_after) == (None, 0, GROW_AFTER_S)


def test_spares_for_tasks_that_are_no_gang_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="spares=1 without coscheduling"):
        make_job(hello, None, None, {}, 60.0, (), resources={"CPU": 1.0}, spares=1)


# -- which part of which log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["3", -1, True, 1.0, [1]])
@pytest.mark.parametrize("name", ["task_index", "attempt", "offset", "max_bytes", "tail_lines"])
def test_what_is_no_number_of_a_task_attempt_or_byte_is_refused_by_name(name: str, value: Any) -> None:
    client = IrisClient.__new__(IrisClient)  # what is refused at the door needs no cluster
    with pytest.raises(InvalidRequestError, match=rf"{name} is .*; give an int of 0 or more"):
        client.fetch_task_logs("job-1", **{"task_index": 0, name: value})
    if name == "task_index":
        with pytest.raises(InvalidRequestError, match="task_index is"):
            client.task_status("job-1", value)


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_no_repr_of_what_travels_has_a_value_of_the_users_variables() -> None:
    env = {"MY_KEY": "hunter2", "LD_PRELOAD": "hunter2"}  # one for the running process, one from its start
    made = make_job(hello, None, "hello", env, 60.0, (), resources={"CPU": 1.0})
    assert (made.env, made.process.runtime_env["env_vars"]) == (
        {"MY_KEY": "hunter2"},
        {"LD_PRELOAD": "hunter2"},
    )
    me = JobInfo("hello-1", "hello-1/task-0", 0, 1, 1, 0, 1, "", 0, "10.0.0.1:1234")
    launch = TaskLaunch(made.function, made.env, me, MultisliceInfo("10.0.0.1", 0, 1), None, "hello")
    for message in (made, made.process, launch):
        assert "hello" in repr(message) or "preload" in repr(message)
        assert "hunter2" not in repr(message)


# -- jobs of a job --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    me = JobInfo("parent-1", "parent-1/task-3", 3, 4, 1, 0, 1, "v4-32-0", 3, "10.0.0.1:1234")
    for name, value in me.to_env().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_a_task")
def test_job_of_a_task_ends_with_it_so_it_can_not_be_detached() -> None:
    with pytest.raises(InvalidRequestError, match=r"detached=True in parent-1/task-3: .* Leave detached out"):
        submit(hello, "v4-16", 1, detached=True)
    refused = invoke("submit", __file__, RAY_ADDRESS=address_of_nobody())
    assert refused.exit_code == USAGE
    assert "parent-1/task-3" in refused.output
    assert "iris-ray run" in refused.output


# -- how long a host may be silent ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [({}, HOST_SILENCE_S), *(({"IRIS_RAY_HOST_SILENCE_S": text}, float(text)) for text in ("2", "2.5", " 30 ", "1e3"))],
    ids=repr,
)
def test_host_silence_is_what_the_environment_says(environ: dict[str, str], seconds: float) -> None:
    assert host_silence_s(environ) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 s", "1.9", "0", "-5", "nan", "2,5", "None"])
def test_host_silence_that_makes_no_sense_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"IRIS_RAY_HOST_SILENCE_S.*give seconds, 2 or more") as refused:
        host_silence_s({"IRIS_RAY_HOST_SILENCE_S": text})
    assert repr(text) in str(refused.value)


def test_host_silence_travels_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_RAY_HOST_SILENCE_S", "7")
    assert request().silence_s == 7.0
    monkeypatch.setenv("IRIS_RAY_HOST_SILENCE_S", "1")
    with pytest.raises(InvalidRequestError, match="IRIS_RAY_HOST_SILENCE_S"):
        run_on_pod(hello, "v4-16")
