"""The options of a run at every public function that takes them: defaults, refusals, and what `help` shows."""

import inspect
import math
from typing import Any

import pytest
import ray

from iris_ray import CoschedulingConfig, IrisClient, ResourceSpec, tpu_device
from iris_ray.client.run_on_pod import (
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from iris_ray.errors import InvalidRequestError, UnknownNameError
from iris_ray.model.checks import Seconds, shown
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_spec import OPTIONS_OF_A_JOB
from iris_ray.model.options import OPTIONS, JobOptions, PodGangOptions, PodOptions, PriorityBand, options_of
from tests.support.requests import hello, pod_request, task_request


def submit(remote_fn: Any, tpu_type: str, num_slices: int, **options: Any) -> None:
    client = IrisClient.__new__(IrisClient)  # what is refused at the door needs no cluster
    need = ResourceSpec(device=tpu_device(tpu_type))
    client.submit(remote_fn, resources=need, coscheduling=CoschedulingConfig(num_groups=num_slices), **options)


FAMILY = {
    "run_on_pod": run_on_pod,
    "run_on_pod_ray": run_on_pod_ray.remote,
    "run_on_pod_resumable": run_on_pod_resumable,
    "run_on_pod_multislice": run_on_pod_multislice,
    "run_on_pod_multislice_resumable": run_on_pod_multislice_resumable,
    "IrisClient.submit": submit,
}
ZONE = Constraint("zone", ConstraintOp.EQ, "us-a")
NO_NUMBERS = [-1, -0.5, math.nan, math.inf, True, "60", [60]]
BAD = [
    *(("stall_timeout", value, "stall_timeout.*give seconds, 0 or more, or None") for value in (*NO_NUMBERS, 10**400)),
    *(("exit_grace", value, "exit_grace.*give seconds, 0 or more") for value in (*NO_NUMBERS, None, 10**400)),
    *(("keep_warm", value, "keep_warm.*give seconds, 0 or more") for value in (10**400, -1, math.nan, True)),
    *(("grow_after", value, "grow_after.*give .*, 'auto', or None") for value in (*NO_NUMBERS, 10**400, "12h")),
    *(
        ("host_silence", value, "host_silence.*give seconds, 2 or more, or infinity, or None")
        for value in (1.9, 0, -5, math.nan, "5")
    ),
    *(("start", value, "start.*give one of 'fork', 'actor'") for value in ("spawn", None, 1, True)),
    *(("spares", value, "spares.*give an int of 0 or more") for value in (-1, True, 1.0, "1", None)),
    *(("constraints", value, "constraints.*give a list of .*, such as") for value in (ZONE, "zone=us-a", None, 7)),
    *(("preferences", value, "preferences.*give a list of .*, such as") for value in (ZONE, "zone=us-a", None)),
    *(("constraints", value, "constraints.*Constraint objects") for value in (["zone=us-a"], [None])),
    *(("tolerations", value, "tolerations.*give a list of .*, such as") for value in ("spot", b"spot", None, {"spot"})),
    *(("tolerations", value, "tolerations.*") for value in ([7], ["taint:spot"], [""])),
    *(("priority", value, "priority.*PriorityBand.PRODUCTION") for value in (0, "batch")),
    *(("scheduling_timeout", value, "scheduling_timeout.*give seconds") for value in (math.nan, math.inf, True, "60")),
]


@pytest.fixture(autouse=True)
def _no_cluster() -> Any:
    yield
    assert not ray.is_initialized()


@pytest.mark.parametrize("launch", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize(("option", "value", "said"), BAD, ids=[f"{option}={value!r}" for option, value, _ in BAD])
def test_senseless_option_is_refused_with_value_and_advice(launch: Any, option: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        launch(hello, "v4-16", num_slices=1, **{option: value})
    assert shown(value).strip("[]") in str(refused.value)


@pytest.mark.parametrize("launch", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("spare", "did you mean 'spares'"),
        ("stall_time_out", "did you mean 'stall_timeout'"),
        ("grow", "it takes .*grow_after"),
    ],
)
def test_unknown_option_is_refused_with_nearest_or_all(launch: Any, option: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'; {advice}"):
        launch(hello, "v4-16", num_slices=1, **{option: 1})


def test_refusal_names_call_as_written() -> None:
    with pytest.raises(TypeError, match=r"^run_on_pod_ray\.remote\(\) got .* 'num_slice'; did you mean 'num_slices'"):
        run_on_pod_ray.remote(hello, "v4-16", num_slice=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(("option", "of_ray"), [("env", "runtime_env="), ("resources", "resources=")])
def test_rays_function_option_is_refused_with_where_to_set_it(option: str, of_ray: str) -> None:
    with pytest.raises(TypeError, match=rf"'{option}'; the function carries it: @ray\.remote\({of_ray}"):
        run_on_pod(hello, "v4-16", **dict[str, Any]({option: {}}))


def test_retries_are_refused_in_run_without_retries() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_retries_failure'"):
        run_on_pod_multislice(hello, "v4-16", 2, max_retries_failure=1)  # type: ignore[call-arg]


DEFAULTS = {
    "constraints": (),
    "preferences": (),
    "tolerations": (),
    "priority": None,
    "team": None,
    "after": (),
    "scheduling_timeout": None,
    "max_runtime": None,
    "keep_warm": 60,
    "spares": 0,
    "grow_after": "auto",
    "stall_timeout": None,
    "host_silence": None,
    "start": "fork",
    "preload": (),
    "exit_grace": 300,
    "secrets": None,
    "notify": None,
    "topology": None,
    "processes_per_host": 1,
    "stop_without_progress": None,
    "failure_domain": "job",
    "children": None,
    "priority_reason": None,
    "max_retries_preemption": 10_000,
    "max_retries_failure": 10,
    "mode": None,
    "simulate": None,
}
NO_RETRIES = {name: value for name, value in DEFAULTS.items() if "retries" not in name}
RESUMABLE = DEFAULTS | {"max_retries_preemption": 1_000_000}
OF_A_JOB = {name: value for name, value in DEFAULTS.items() if name not in ("mode", "simulate")} | {
    "max_retries_preemption": 100,
    "max_retries_failure": 0,
    "max_task_failures": None,
    "task_placement": "spread",
    "env": None,
}


@pytest.mark.parametrize(
    ("launch", "group", "defaults"),
    [
        (run_on_pod, PodOptions, DEFAULTS),
        (run_on_pod_ray.remote, PodGangOptions, DEFAULTS),
        (run_on_pod_resumable, PodOptions, RESUMABLE),
        (run_on_pod_multislice, PodGangOptions, NO_RETRIES),
        (run_on_pod_multislice_resumable, PodOptions, RESUMABLE),
        (IrisClient.submit, JobOptions, OF_A_JOB),
    ],
    ids=FAMILY,
)
def test_signature_and_help_show_every_option_with_default(launch: Any, group: type, defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(launch).parameters
    assert inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}
    assert {name: parameters[name].default for name in OPTIONS if name in parameters} == defaults
    explained = inspect.getdoc(launch) or ""
    if launch in (run_on_pod, IrisClient.submit):
        assert [name for name in options_of(group) if f"\n    {name}: " not in explained] == []


def test_every_request_option_reaches_controller_or_pool() -> None:
    made = pod_request()
    elsewhere = {"preload", "start", "env", "topology"}  # in `ProcessSpec`, the tasks' variables, and `coscheduling`
    lost = [n for n in options_of(JobOptions) if n not in (*OPTIONS_OF_A_JOB, *elsewhere) and not hasattr(made, n)]
    assert lost == []


def test_time_options_have_no_suffix_and_state_seconds() -> None:
    times = [name for name, option in OPTIONS.items() if isinstance(option.check, Seconds)]
    assert [name for name in times if name.endswith("_s") or "seconds" not in OPTIONS[name].check.wanted] == []


def test_only_run_on_pod_ray_takes_positional_retries() -> None:
    with pytest.raises(InvalidRequestError, match="max_retries_failure is -1"):
        run_on_pod_ray.remote(hello, "v4-16", 1, 0, -1)
    with pytest.raises(TypeError, match="remote_fn and tpu_type and num_slices by position"):
        run_on_pod_multislice_resumable(hello, "v4-16", 1, 0)  # type: ignore[call-arg, arg-type]


def needs_one(x: int) -> int:
    return x


@pytest.mark.parametrize("launch", [launch for name, launch in FAMILY.items() if "." not in name])
@pytest.mark.parametrize(
    ("function", "tpu_type", "num_slices"),
    [(needs_one, "v4-32", 1), (hello, "v4-31", 1), (hello, "v4-32", True)],
    ids=["function", "type", "num_slices"],
)
def test_bad_input_is_refused_before_looking_for_cluster(
    launch: Any, function: Any, tpu_type: str, num_slices: Any
) -> None:
    """``run_on_pod_multislice`` raised TypeError always (defect 6)."""
    with pytest.raises(InvalidRequestError):
        launch(function, tpu_type, num_slices=num_slices)


def test_calling_run_on_pod_ray_directly_explains_remote_call() -> None:
    with pytest.raises(TypeError, match=r"run_on_pod_ray\.remote"):
        run_on_pod_ray(hello, "v4-32")


def test_valid_options_arrive_in_request() -> None:
    made = pod_request(stall_timeout=0.5, spares=2, grow_after=0)
    assert (made.stall_timeout, made.spec.spares, made.spec.grow_after) == (0.5, 2, 0)
    zone = Constraint("zone", ConstraintOp.EQ, "us-a")
    made = pod_request(
        constraints=[zone], preferences=[zone], tolerations=["spot"], priority=PriorityBand.BATCH, scheduling_timeout=60
    )
    assert zone in made.spec.constraints
    assert (made.spec.preferences, made.spec.tolerations) == ((zone,), ("spot",))
    assert (made.spec.priority, made.spec.scheduling_timeout) == (PriorityBand.BATCH, 60)
    made = pod_request(stall_timeout=None, spares=0, grow_after=None)
    assert (made.stall_timeout, made.spec.spares, made.spec.grow_after) == (None, 0, None)
    made = pod_request()
    assert (made.stall_timeout, made.spec.spares, made.spec.grow_after) == (None, 0, "auto")


def test_spares_for_single_tasks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="spares=1 is for gangs on slices, and this job has none"):
        task_request(spares=1)


def test_recent_references_have_job_ids_without_holding_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.client.run_on_pod.JOB_IDS_KEPT", 2)
    references = [ray.ObjectRef(bytes([number]) * 28) for number in range(3)]
    for number, reference in enumerate(references):
        run_on_pod_ray._note(reference, f"train-{number}")
    assert [run_on_pod_ray.job_id(reference) for reference in references[1:]] == ["train-1", "train-2"]
    with pytest.raises(UnknownNameError, match=r"newest 2 jobs; give that reference itself"):
        run_on_pod_ray.job_id(references[0])


@pytest.mark.parametrize("other", [None, "train-1", 7])
def test_job_id_of_no_reference_is_refused(other: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"is not what run_on_pod_ray\.remote returned"):
        run_on_pod_ray.job_id(other)
