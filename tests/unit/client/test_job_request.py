"""A request is checked before anything is acquired: options, names, sizes, environment; and holds all of it."""

import subprocess
from typing import Any

import pytest
from ray import cloudpickle

from iris_ray import IrisClient
from iris_ray.actors.protocol.messages import HOST_SILENCE_S, NO_OWNER_YET, TaskLaunch
from iris_ray.cli.conventions import USAGE
from iris_ray.client.job_request import make_request
from iris_ray.client.placement import placement_of
from iris_ray.client.remote_options import MAX_VARIABLE_BYTES
from iris_ray.errors import (
    InvalidJobError,
    InvalidRequestError,
    InvalidSliceCountError,
    InvalidTopologyError,
    UnknownTPUTypeError,
)
from iris_ray.model.job_info import JobInfo
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.options import PriorityBand
from iris_ray.model.requirement import ResourceSpec, tpu_device
from iris_ray.model.topology import get_tpu_config
from iris_ray.settings import TEST_HOST_SILENCE_S
from tests.support.command_line import address_of_nobody, invoke
from tests.support.requests import hello, pod_request, remote, task_request


def test_request_expands_tpu_type() -> None:
    made = pod_request(tpu_type="TPU-v5e-16", num_slices=[4, 2])
    spec = made.spec
    assert (spec.device, spec.replicas, spec.resources) == ("v5litepod-16", 4, {"TPU": 4.0})
    assert spec.coscheduling is not None
    assert spec.coscheduling.num_groups == (2, 4)
    assert (spec.name, made.env) == ("hello", {})
    assert cloudpickle.loads(made.pickled_function)() == "hello"


def test_request_is_complete_except_owner() -> None:
    made, again = pod_request(name="train/it"), pod_request(name="train/it")
    assert (made.spec.name, made.spec.owner) == ("train/it", NO_OWNER_YET)
    assert made.spec.job_id.startswith("train-it-")
    assert made.spec.job_id != again.spec.job_id


@pytest.mark.parametrize(
    "num_slices", [0, -1, [], (), True, [True], "2", [2, 2], 1.0, [1, 2.0], None, {1, 2}], ids=repr
)
def test_invalid_number_of_slices_is_refused(num_slices: Any) -> None:
    with pytest.raises(InvalidSliceCountError):
        pod_request(num_slices=num_slices)


@pytest.mark.parametrize("tpu_type", ["", "v4", "v4-31", "v99-8", "a100-8", None, 32, ["v4-32"]], ids=repr)
def test_unknown_tpu_type_is_refused(tpu_type: Any) -> None:
    with pytest.raises(UnknownTPUTypeError):
        pod_request(tpu_type=tpu_type)


@pytest.mark.parametrize("option", ["max_retries_preemption", "max_retries_failure"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "3", None], ids=repr)
def test_invalid_budget_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=option):
        pod_request(**{option: value})


@pytest.mark.parametrize("value", [-1, -0.1, float("nan"), True, "60", None], ids=repr)
def test_invalid_keep_warm_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="keep_warm"):
        pod_request(keep_warm=value)


@pytest.mark.parametrize("value", ["jax", [1], [None], b"jax", None, 5], ids=repr)
def test_invalid_preload_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="preload"):
        pod_request(preload=value)


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "a\x1b[2J"])
def test_name_unfit_for_an_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="characters that can't be printed"):
        pod_request(name=name)


def test_refusal_names_the_job_by_its_name() -> None:
    with pytest.raises(InvalidJobError, match="job 'hello': 1001 spares, and the limit is 1,000"):
        pod_request(spares=1001)


def test_generator_of_preload_modules_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="preload"):
        pod_request(preload=(name for name in ["json"]))


def test_options_at_their_limits_are_accepted() -> None:
    made = pod_request(max_retries_preemption=0, max_retries_failure=0, keep_warm=0, preload=["json"])
    assert (made.spec.max_retries_preemption, made.spec.max_retries_failure, made.keep_warm) == (0, 0, 0.0)
    assert made.process.preload == ("json",)


def test_request_without_tpu_preloads_nothing() -> None:
    """JAX that is imported ahead would no longer hear that it is to keep off the host's chips."""
    assert task_request(preload=["jax"]).process.preload == ()


def test_gpu_request_implies_nothing_else() -> None:
    assert make_request(hello, placement_of(ResourceSpec(gpu=2), None)).spec.resources == {"GPU": 2.0}


# -- gangs without TPU ----------------------------------------------------------------------------------------------


def test_rack_gang_request_counts_tasks_and_racks() -> None:
    placement = placement_of(ResourceSpec(cpu=2, replicas=3), CoschedulingConfig("rack", [1, 2]))
    spec = make_request(hello, placement).spec
    assert (spec.device, spec.replicas, spec.resources) == (None, 3, {"CPU": 2.0})
    assert spec.coscheduling == CoschedulingConfig("rack", (1, 2))


@pytest.mark.parametrize(
    ("need", "group_by", "said"),
    [
        (ResourceSpec(replicas=2), "tpu-name", "needs a TPU type"),
        (ResourceSpec(device=get_tpu_config("v4-16")), "rack", "gangs on TPU hosts run on slices"),
        (ResourceSpec(device=get_tpu_config("v5litepod-8")), "rack", "gangs on TPU hosts run on slices"),
    ],
    ids=str,
)
def test_gang_by_unknown_grouping_is_refused(need: ResourceSpec, group_by: str, said: str) -> None:
    with pytest.raises(InvalidJobError, match=said):
        placement_of(need, CoschedulingConfig(group_by))


def test_rack_gang_with_spares_is_refused() -> None:
    placement = placement_of(ResourceSpec(replicas=2), CoschedulingConfig("rack"))
    with pytest.raises(InvalidJobError, match="spares"):
        make_request(hello, placement, spares=1)


# -- sizes ------------------------------------------------------------------------------------------------------------


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
def test_oversized_environment_is_refused_with_limit(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        task_request(env=env)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidRequestError):
        pod_request(remote(runtime_env={"env_vars": env}), "v4-16")


def test_largest_allowed_environment_is_accepted() -> None:
    """And Linux starts processes with it."""
    env = {f"V{i}": "x" * (MAX_VARIABLE_BYTES - 3) for i in range(8)}
    assert task_request(env=env).env == env
    assert len(subprocess.run(["/usr/bin/env"], env=env, capture_output=True, check=True).stdout) == 8 * 128 * 1024
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/usr/bin/env"], env={"V0": "x" * (MAX_VARIABLE_BYTES - 2)}, check=True)


def test_oversized_name_or_spec_is_refused_with_limit() -> None:
    with pytest.raises(InvalidRequestError, match="has 101 characters, and the limit is 100"):
        task_request(name="n" * 101)
    tolerations = tuple(f"taint-{i:01100}" for i in range(100))
    with pytest.raises(InvalidRequestError, match="and the limit is 100,000; give fewer or shorter"):
        task_request(name="n" * 100, tolerations=tolerations)


# -- values of variables ----------------------------------------------------------------------------------------------


def test_variable_values_appear_in_no_repr() -> None:
    env = {"MY_KEY": "hunter2", "LD_PRELOAD": "hunter2"}  # one for the running process, one from its start
    made = task_request(name="hello", env=env)
    assert (made.env, made.process.runtime_env["env_vars"]) == ({"MY_KEY": "hunter2"}, {"LD_PRELOAD": "hunter2"})
    me = JobInfo("hello-1", "hello-1/task-0", 0, 1, 1, 0, 1, "", 0, "10.0.0.1:1234")
    launch = TaskLaunch(made.pickled_function, made.env, me, MultisliceInfo("10.0.0.1", 0, 1), None, "hello")
    for message in (made, made.process, launch):
        assert "hello" in repr(message) or "preload" in repr(message)
        assert "hunter2" not in repr(message)


# -- jobs of a task ---------------------------------------------------------------------------------------------------


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    me = JobInfo("parent-1", "parent-1/task-3", 3, 4, 1, 0, 1, "v4-32-0", 3, "10.0.0.1:1234")
    for name, value in me.to_env().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_a_task")
def test_job_submitted_by_task_is_named_under_its_job() -> None:
    assert pod_request().spec.job_id.startswith("parent-1/hello-")


@pytest.mark.usefixtures("in_a_task")
def test_job_submitted_by_task_cannot_be_detached() -> None:
    client = IrisClient.__new__(IrisClient)  # what is refused at the door needs no cluster
    with pytest.raises(InvalidRequestError, match=r"detached=True in parent-1/task-3: .* Leave detached out"):
        client.submit(hello, detached=True)
    refused = invoke("submit", __file__, RAY_ADDRESS=address_of_nobody())
    assert refused.exit_code == USAGE
    assert "parent-1/task-3" in refused.output
    assert "iris-ray run" in refused.output


# -- how long a host may be silent, and how its processes start -------------------------------------------------------


def test_host_silence_and_start_travel_with_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEST_HOST_SILENCE_S)
    assert (pod_request().host_silence, pod_request().process.as_actor) == (HOST_SILENCE_S, False)
    made = pod_request(host_silence=7, start="actor")
    assert (made.host_silence, made.process.as_actor) == (7.0, True)


@pytest.mark.parametrize(
    ("options", "as_actor"),
    [
        ({"runtime_env": {"env_vars": {"A": "1"}, "pip": ["a"], "working_dir": "s3://b/c.zip"}}, False),
        ({"runtime_env": {"worker_process_setup_hook": "a.b"}}, True),
        ({"runtime_env": {"image_uri": "a/b"}}, True),
        ({"num_gpus": 1}, True),
    ],
)
def test_process_that_a_fork_cannot_be_is_an_actor(options: dict[str, Any], as_actor: bool) -> None:
    assert task_request(remote(**options)).process.as_actor == as_actor


# -- teams ---------------------------------------------------------------------------------------------------------


def test_request_has_the_team_of_the_option_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pod_request().spec.team == ""
    monkeypatch.setenv("IRIS_TEAM", "research/vision")
    assert pod_request().spec.team == task_request().spec.team == "research/vision"
    assert pod_request(team="ads").spec.team == "ads"
    monkeypatch.setenv("IRIS_TEAM", "a b")
    with pytest.raises(
        InvalidRequestError, match=r"^IRIS_TEAM is 'a b'; give the name of a team, such as 'research/vision'$"
    ):
        pod_request()


def test_request_has_the_band_of_the_option_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pod_request().spec.priority is PriorityBand.INTERACTIVE
    monkeypatch.setenv("IRIS_PRIORITY", "Batch")
    assert pod_request().spec.priority is task_request().spec.priority is PriorityBand.BATCH
    assert pod_request(priority=PriorityBand.PRODUCTION).spec.priority is PriorityBand.PRODUCTION
    monkeypatch.setenv("IRIS_PRIORITY", "urgent")
    with pytest.raises(InvalidRequestError, match="IRIS_PRIORITY is 'urgent'; give one of 'system', 'production'"):
        pod_request()


def test_system_band_needs_a_reason_and_no_other_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    system, why = {"priority": PriorityBand.SYSTEM}, "tests new hosts"
    with pytest.raises(InvalidRequestError, match="a job in the band system needs a reason"):
        pod_request(**system)
    assert pod_request(**system, priority_reason=why).spec.priority_reason == why
    with pytest.raises(InvalidRequestError, match="priority_reason is given, and the job is in the band interactive"):
        pod_request(priority_reason=why)
    monkeypatch.setenv("IRIS_PRIORITY", "system")
    monkeypatch.setenv("IRIS_PRIORITY_REASON", why)
    assert pod_request().spec.priority_reason == why
    assert pod_request(priority=PriorityBand.BATCH).spec.priority_reason is None
    monkeypatch.setenv("IRIS_PRIORITY_REASON", "x" * 201)
    with pytest.raises(InvalidRequestError, match=r"IRIS_PRIORITY_REASON is .*; give up to 200 printable characters"):
        pod_request()


@pytest.mark.parametrize("reason", ["", "  ", "a\x1b[2J", "a\nb", "x" * 201, 7], ids=repr)
def test_odd_reason_for_the_system_band_is_refused(reason: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority_reason"):
        pod_request(priority=PriorityBand.SYSTEM, priority_reason=reason)


@pytest.mark.parametrize("team", ["a b", "/a", "a/", "a//b", "a\x1b[2J", "*", 7, ["ads"]], ids=repr)
def test_odd_name_of_a_team_is_refused(team: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give the name of a team"):
        pod_request(team=team)


# -- parts of slices ---------------------------------------------------------------------------------------------------


def test_gang_on_a_part_has_a_task_on_each_of_its_hosts() -> None:
    spec = pod_request(tpu_type="v6e-16", topology=" 2X4").spec
    assert (spec.device, spec.part, spec.replicas, spec.whole_groups) == ("v6e-16", "2x4", 2, False)
    assert spec.requirement.chips
    several = pod_request(tpu_type="v6e-16", topology="2x2", num_slices=3, failure_domain="slice").spec
    assert (several.num_gangs, several.most_tasks) == (3, 3)
    assert pod_request(tpu_type="v6e-16").spec.part is None


def test_client_takes_parts_by_its_resources() -> None:
    device = ResourceSpec(cpu=2, device=tpu_device("v6e-16"))
    spec = make_request(hello, placement_of(device, None), topology="2x4").spec
    assert (spec.part, spec.replicas, spec.resources) == ("2x4", 2, {"TPU": 4.0, "CPU": 2.0})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topology": "8x8"}, "in these shapes: 2x2, 2x4"),
        ({"topology": "4x4"}, "which is a whole v6e-16 slice"),
        ({"topology": "2x4", "num_slices": 2}, "MEGASCALE"),
        ({"topology": "2x4", "num_slices": [1, 2]}, "MEGASCALE"),
        ({"topology": "2x2", "tpu_type": "v6e-8"}, "has no parts"),
    ],
    ids=str,
)
def test_parts_that_can_not_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidTopologyError, match=says):
        pod_request(**{"tpu_type": "v6e-16"} | options)


@pytest.mark.parametrize("resources", [ResourceSpec(cpu=1), ResourceSpec(cpu=1, replicas=2)], ids=str)
def test_parts_without_a_type_are_refused(resources: ResourceSpec) -> None:
    with pytest.raises(InvalidTopologyError, match="names no TPU type"):
        make_request(hello, placement_of(resources, None), topology="2x4")
