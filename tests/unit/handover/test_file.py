"""The file of an export: what is in it, what is refused, and that later versions read what this one has written."""

import json
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.protocol.messages import NO_OWNER_YET, ProcessSpec, RunRequest
from iris_ray.errors import InvalidRequestError
from iris_ray.handover.controller import LEAST_RUNTIME_S, taken_over, with_remaining_budgets
from iris_ray.handover.file import (
    END,
    FORMAT,
    HEADER,
    NOT_IN_FILE,
    RUN,
    SPEC,
    Export,
    fill_in_variables,
    leave_out_variables,
    read,
    run_line,
    run_of,
    spec_line,
    spec_of,
    startable,
    written,
)
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.job_spec import OPTIONS_OF_A_JOB, CoschedulingConfig, JobSpec
from iris_ray.model.options import PriorityBand
from iris_ray.model.secret import SecretValue
from tests.support.worlds import S, World, gang_spec, in_group

OF_FORMAT_1 = Path(__file__).parents[2] / "data" / "export-format-1.jsonl"
ASKS_FOR_ALL = JobSpec(
    job_id="train-1",
    owner=NO_OWNER_YET,
    name="train",
    user="ann",
    priority=PriorityBand.PRODUCTION,
    device="v4-16",
    replicas=2,
    coscheduling=CoschedulingConfig(num_groups=[2, 4]),
    constraints=(
        Constraint("zone", ConstraintOp.IN, ("us-a", 3, 1.5, True)),
        Constraint("spot", ConstraintOp.NOT_EXISTS),
        Constraint("gen", ConstraintOp.GE, 4),
    ),
    preferences=(Constraint("rack", ConstraintOp.EQ, "r1"),),
    tolerations=("hot",),
    resources={"TPU": 4.0, "CPU": 1.0},
    max_retries_failure=7,
    max_task_failures=3,
    scheduling_timeout=60.0,
    spares=1,
    grow_after=None,
    may_evict=False,
)


def request(spec: JobSpec, **more: Any) -> RunRequest:
    process = ProcessSpec({"env_vars": {"LD_PRELOAD": "x.so"}, "pip": ["chex"]}, ("jax",))
    return RunRequest(spec, b"\x80pickled", {"WANDB_API_KEY": "secret"}, process, keep_warm=7.0, **more)


def test_every_field_of_job_travels_or_is_excluded() -> None:
    assert {field.name for field in fields(JobSpec)} == SPEC.keys() | NOT_IN_FILE
    apart = {"spec", "pickled_function", "env", "secrets", "process"}
    apart |= {"files_token", "child_of"}  # the job gets a new token, and is nobody's child
    assert {field.name for field in fields(RunRequest)} == {*RUN} | apart


OF_GROUP = GroupSpec("rl-1", "rl", (("trainer", "train-1"), ("sampler", "sample-1")), ("trainer",))
LATER = replace(ASKS_FOR_ALL, after={"prepare-1": "ended"}, group=OF_GROUP)
"""With what later versions know."""


SINGLE_TASKS = JobSpec(job_id="eval-1", owner=NO_OWNER_YET, team="research", task_placement="pack", max_runtime=60.0)
TWO_PROCESSES = replace(gang_spec(), processes_per_host=2, stop_without_progress=3, priority_reason="a test")
EACH_SLICE_ALONE = replace(gang_spec(), failure_domain="slice", notify=("slack:TEAM_HOOK",), children="adopt")
SPECS = ASKS_FOR_ALL, LATER, SINGLE_TASKS, TWO_PROCESSES, EACH_SLICE_ALONE, gang_spec(), JobSpec(job_id="1", owner="x")


def test_every_option_of_job_is_tried_with_another_value() -> None:
    plain = JobSpec(job_id="1", owner="x")
    tried = {name for spec in SPECS for name in OPTIONS_OF_A_JOB if getattr(spec, name) != getattr(plain, name)}
    assert tried == set(OPTIONS_OF_A_JOB)


@pytest.mark.parametrize("spec", SPECS)
def test_request_survives_the_way_through_json(spec: JobSpec) -> None:
    made = request(replace(spec, owner=NO_OWNER_YET), stall_timeout=60.0, host_silence=9.0, exit_grace=1.0)
    line = json.loads(json.dumps({"spec": spec_line(made.spec), "run": run_line(made, b"\x80pickled")}))
    assert run_of(spec_of(line["spec"]), line["run"]) == made


def test_values_of_variables_are_left_out_and_filled_in() -> None:
    line: dict[str, Any] = {"run": run_line(request(gang_spec()), b""), "ray_job": {"env_vars": {"HF_TOKEN": "secret"}}}
    leave_out_variables(line)
    assert "secret" not in json.dumps(line)
    assert fill_in_variables(line, {"HF_TOKEN": "mine", "OTHER": "x"}) == ["LD_PRELOAD", "WANDB_API_KEY"]
    assert line["ray_job"]["env_vars"] == {"HF_TOKEN": "mine"}
    assert fill_in_variables(line, {"LD_PRELOAD": "y.so", "WANDB_API_KEY": "mine"}) == []
    assert line["run"]["runtime_env"]["env_vars"] == {"LD_PRELOAD": "y.so"}


def test_secrets_are_named_without_values_and_filled_in() -> None:
    stored = {"STORED": SecretValue("", as_file=True, stored="A")}
    given = {"KEY": SecretValue("s3cr3t"), "FILE": SecretValue("s3cr3t", as_file=True)}
    made = request(gang_spec(), secrets=given | stored)
    assert "s3cr3t" not in repr(made)
    line: dict[str, Any] = {"run": run_line(made, b"")}
    assert "s3cr3t" not in json.dumps(line)
    assert fill_in_variables(line, {"KEY": "a"}) == ["FILE"]
    assert fill_in_variables(line, {"FILE": "b"}) == []
    again = run_of(made.spec, line["run"])
    assert again.secrets == {"KEY": SecretValue("a"), "FILE": SecretValue("b", as_file=True), **stored}
    assert again.env == made.env


def test_job_keeps_what_is_left_of_its_time() -> None:
    world = World("a")
    job = world.submit("train", max_runtime=600.0)
    world.now += 50.0
    assert with_remaining_budgets(job, world.now).max_runtime == 600.0, "waiting does not count"
    world.schedule()
    world.report_all(job, S.RUNNING)
    assert with_remaining_budgets(job, world.now + 200.0).max_runtime == 400.0
    assert with_remaining_budgets(job, world.now + 700.0).max_runtime == LEAST_RUNTIME_S


@pytest.mark.parametrize("amount", ["NaN", "1e400", "1" + 400 * "0", '"x"', "null"])
def test_usage_that_is_not_a_number_is_refused(amount: str) -> None:
    line = f'{{"kind": "usage", "at": 1.0, "hours": {{"ann": {{"TPU": {amount}}}}}}}'
    with pytest.raises(InvalidRequestError, match="can't be read"):
        taken_over(f"[{line}]".encode(), Clock(), 2.0)


def test_lines_that_are_not_a_list_of_json_are_refused() -> None:
    for data in (b"[" * 100_000, b"\xff", b"7", b'["x"]', b"[{}]"):
        with pytest.raises(InvalidRequestError):
            taken_over(data, Clock(), 2.0)


def lines(*kinds: str) -> list[str]:
    return list(written({"iris_ray": "0.1.0"}, [*({"kind": kind} for kind in kinds), END]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([], "is empty"),
        (lines()[:-1], "cut off"),
        (["{}\n"], "line 1 is not an export"),
        (["PK\x03\x04"], "line 1 is not an export"),
        (['{"kind": "job"}\n'], "line 1 is not the header"),
        ([lines()[0], '{"kind": "job"}'], "line 2 is not a line of an export"),
        ([lines()[0], '{"kind": "jo'], "line 2 is not a line of an export; it may be cut off"),
        ([lines()[0], "[" * 50_000], "line 2 is not a line of an export; it may be cut off"),
        (
            [json.dumps({"kind": HEADER, "format": FORMAT + 1, "iris_ray": "9.9"})],
            "with iris_ray 9.9 or newer",
        ),
    ],
)
def test_other_file_is_refused_with_line_and_advice(text: list[str], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read(text, "queue.jsonl")


def test_kind_of_later_version_is_counted_and_skipped() -> None:
    assert read(lines("song", "setting", "song"), "f").unknown == {"song": 2}


def test_job_that_makes_no_sense_is_left_out() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"job_id": "x", "priority": "HIGHEST"},
        {"job_id": "x", "replicas": -1},
        {},
        {"job_id": "x", "group": 7},
    )
    for spec in wrong:
        found = startable(export_of({"job_id": "x", "spec": spec, "run": run_line(request(gang_spec()), b"")}), {})
        assert not found.jobs
        assert [left.startswith("x: ") for left in found.left_out] == [True]
    odd = {"job_id": "x", "spec": spec_line(gang_spec()), "run": {"env": ["A"]}}
    assert "x: it can't be read: AttributeError" in startable(export_of(odd), {}).left_out[0]


def export_of(*jobs: dict[str, Any]) -> Export:
    return Export({}, {"job": list(jobs)}, {})


def test_group_is_left_out_as_a_whole_until_all_its_variables_are_given() -> None:
    specs = in_group(gang_spec("trainer"), gang_spec("sampler"), main=("trainer",))
    runs = [
        run_line(replace(request(spec), env=env), b"f") for spec, env in zip(specs, ({}, {"KEY": "s"}), strict=True)
    ]
    lines = [
        {"job_id": spec.job_id, "spec": spec_line(spec), "run": run} for spec, run in zip(specs, runs, strict=True)
    ]
    for line in lines:
        leave_out_variables(line)
    given = {"LD_PRELOAD": "x.so"}
    first = startable(export_of(*lines), given)
    assert not first.jobs
    assert [left.partition(": ")[2] for left in first.left_out] == [
        "the values of KEY were not exported; import again with --jobs-only --env-file FILE",
        "its group rl starts together or not at all, and sampler is left out",
    ]
    assert [*startable(export_of(*lines), given | {"KEY": "mine"}).jobs] == ["trainer", "sampler"]


def test_file_of_format_1_is_read_for_ever() -> None:
    """It was written by the first version. Never change it."""
    export = read(OF_FORMAT_1.read_text().splitlines(), "the first")
    assert {kind: len(found) for kind, found in export.lines.items() if found} == Counter(
        setting=1, limits=1, taint=1, usage=1, user_day=1, fleet_day=1, package=1, job=1, finished=1
    )
    (line,) = export.lines["job"]
    made = run_of(spec_of(line["spec"]), line["run"])
    assert (made.spec, made.pickled_function) == (ASKS_FOR_ALL, b"\x80pickled")
