"""Descriptions in TOML, and what is refused in them."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.protocol import services
from iris_ray.errors import InvalidStudyError
from iris_ray.model.options import PriorityBand
from iris_ray.study import SimulatedJob, slice_spec
from iris_ray.study.description import read_study
from iris_ray.study.study import Study

EXAMPLE = Path(__file__).parents[3] / "examples" / "fleet.toml"
LEAST = """
days = 1
[[slices]]
type = "v4-16"
count = 2
"""
JOBS = (
    LEAST
    + """
[[jobs]]
per_day = 10
type = "v4-16"
run_h = 1
"""
)
HELIOS = "user,gpu_num,submit_time,duration\nann,16,0,60\nbob,8,30,60\n"


def study_of(text: str, **files: str) -> Study:
    return read_study(tomllib.loads(text), lambda name: files[name].splitlines())


def test_example_description_is_read() -> None:
    study = study_of(EXAMPLE.read_text())
    assert study.seconds == 7 * 86_400.0
    assert [(kind.tpu_type, kind.count, kind.notice_s, kind.away_s) for kind in study.slices] == [
        ("v4-32", 60, 30.0, 3600.0), ("v4-128", 12, 30.0, 3600.0),
    ]  # fmt: skip
    train, tries = study.streams
    assert train.band is PriorityBand.PRODUCTION
    assert train.users == (("ann", 1.0), ("bob", 1.0))
    assert train.num_slices == (((1,), 1.0), ((2,), 1.0))
    assert (train.run.median_s, train.run.p90_s, train.save_every_s) == (8 * 3600.0, 24 * 3600.0, 1800.0)
    assert len(tries.users) == 12
    assert tries.num_slices == (((1,), 8.0), ((2,), 2.0))
    (backlog,) = study.backlogs
    assert (backlog.user, backlog.waiting, backlog.stream.band) == ("carl", 4, PriorityBand.BATCH)
    assert [(policy.name, policy.spares, policy.heed_notices, policy.evictions) for policy in study.policies] == [
        ("as it is", 0, True, True), ("notices ignored", 0, False, True), ("one spare", 1, True, True),
        ("no evictions", 0, True, False),
    ]  # fmt: skip


def test_policies_may_differ_in_when_gangs_grow() -> None:
    study = study_of(JOBS + '[[policies]]\nname = "as it pays"\n[[policies]]\nname = "once"\ngrow_after_s = 0\n')
    job = SimulatedJob(slice_spec("job", "v4-16", [1, 2], grow_after=5.0), run_s=60.0)
    assert [policy.applied_to(job).spec.grow_after for policy in study.policies] == ["auto", 0.0]


def test_policies_may_differ_in_who_gives_way() -> None:
    study = study_of(JOBS + '[[policies]]\nname = "on"\n[[policies]]\nname = "off"\nevictions = false\n')
    assert [(policy.name, policy.evictions) for policy in study.policies] == [("on", True), ("off", False)]


def test_omitted_fields_have_defaults() -> None:
    study = study_of(JOBS)
    assert [policy.name for policy in study.policies] == ["default"]
    (stream,) = study.streams
    assert (stream.name, stream.users, stream.run.median_s, stream.run.p90_s) == (
        "job1", (("user", 1.0),), 3600.0, 3600.0,
    )  # fmt: skip


def test_flexible_slice_counts_are_read() -> None:
    (stream,) = study_of(JOBS + "num_slices = [[1, 2], 4]").streams
    assert stream.num_slices == (((1, 2), 1.0), ((4,), 1.0))
    (stream,) = study_of(JOBS + 'num_slices = { "2,1" = 3, "4" = 1 }').streams
    assert stream.num_slices == (((1, 2), 3.0), ((4,), 1.0))


TRACE = LEAST + '[[traces]]\nfile = "jobs"\nformat = "csv"\ntype = "v4-16"\n'


def test_trace_begins_at_its_day() -> None:
    text = HELIOS + "ann,8,172800,60\nann,8,173000,60\n"
    (trace,) = study_of(TRACE + "from_day = 1.5", jobs=text).traces
    assert [(at, job.spec.job_id) for at, job in trace.arrivals] == [
        (0.0, "trace1-ann-172800"),
        (200.0, "trace1-ann-173000"),
    ]
    assert [(row.line, row.why) for row in trace.left_out] == [
        (2, "it was submitted before from_day"), (3, "it was submitted before from_day"),
    ]  # fmt: skip


def test_columns_of_a_trace_are_named() -> None:
    columns = 'columns = { user = "who", cpus = { column = "cpu_milli", unit = 0.001 }, ran = "seconds" }\n'
    text = "Who,submit_time,gpu_num,cpu_milli,seconds\nzoe,5,0,2500,60\n"
    (trace,) = study_of(TRACE + columns + "[[hosts]]\ncount = 1\ncpus = 4", jobs=text).traces
    ((_, job),) = trace.arrivals
    assert (job.spec.user, job.spec.resources, job.run_s) == ("zoe", {"CPU": 2.5}, 60.0)


def test_trace_is_read_from_its_file() -> None:
    (trace,) = study_of(TRACE, jobs=HELIOS).traces
    assert [(at, job.spec.job_id, job.spec.user, job.run_s) for at, job in trace.arrivals] == [
        (0.0, "trace1-ann-0", "ann", 60.0), (30.0, "trace1-bob-30", "bob", 60.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there are no hosts"),
        ("[[slices]]\ntype = 'v4-16'\ncount = 1", "days is missing; give a number, more than 0"),
        (LEAST.replace("days = 1", "days = 0"), "days is 0; give a number, more than 0"),
        (LEAST.replace("days = 1", "days = nan"), "days is nan"),
        (LEAST.replace("days = 1", f"days = 1{'0' * 400}"), "days is 10*; give a number, more than 0"),
        (LEAST.replace("days", "dayz"), "dayz: there is no such name here; did you mean days?"),
        ("notice = 1\n" + LEAST, "notice: there is no such name here; it may have days, seed"),
        (LEAST.replace("v4-16", "v4-17"), r"\[\[slices\]\] number 1: type: .*v4-16"),
        (LEAST.replace("count = 2", "count = true"), r"\[\[slices\]\] number 1: count is True; give an int"),
        (LEAST + "notice_s = '30'", "notice_s is '30'; give a number, 0 or more"),
        (LEAST + "preempted_every_h = 0", "preempted_every_h is 0; give a number, more than 0"),
        (JOBS + "waiting = 1", "per_day: give how many come in a day, or waiting"),
        (JOBS.replace("per_day = 10", ""), "per_day: give how many come in a day, or waiting"),
        (JOBS + "band = 'urgent'", "band is 'urgent'; give one of system, production, interactive, batch"),
        (JOBS + "num_slices = 0", "num_slices is 0; give slice counts such as"),
        (JOBS + "num_slices = { a = 1 }", "num_slices is .*; give slice counts such as"),
        (JOBS + "num_slices = { '1' = 'often' }", "num_slices is .*; give slice counts such as"),
        (JOBS + "num_slices = { '1' = -1, '2' = 2 }", "num_slices is .*; give slice counts such as"),
        (JOBS + "users = { ann = nan, bob = 1 }", "users is .*; give a number of users"),
        (JOBS + "users = { ann = inf, bob = 1 }", "users is .*; give a number of users"),
        (JOBS + "users = { ann = 0 }", "users is .*; give a number of users"),
        (JOBS + "users = 0", "users is 0"),
        (JOBS + "users = []", r"users is \[\]; give a number of users"),
        (JOBS + "users = [1, 2]", r"users is \[1, 2\]; give a number of users"),
        (LEAST + "[[policies]]\nspares = 1", r"\[\[policies\]\] number 1: name is missing; give a text"),
        (LEAST + "[timings]\nlaunch_s = -1", "timings: launch_s is -1"),
        (JOBS + "[[jobs]]\nname = 'job1'\nper_day = 1\nrun_h = 1", r"2 of \[\[jobs\]\] and .* have the name 'job1'"),
        (JOBS + "[[traces]]\nname = 'job1'\nfile = 'jobs'\ntype = 'v4-16'\nformat = 'csv'", "have the name 'job1'"),
        (LEAST + 2 * "[[policies]]\nname = 'a'\n", r"2 of \[\[policies\]\] have the name 'a'"),
        ("slices = 3\ndays = 1", r"slices is 3; give tables that begin with \[\[slices\]\]"),
        (LEAST + "[[traces]]\nfile = 'jobs'\ntype = 'v4-16'\nformat = 'xml'", "format is 'xml'; give one of slurm"),
        (TRACE + "columns = { owner = 'who' }", "columns: owner: there is no such name here; it may have job_id"),
        (TRACE + "columns = { user = 3 }", "columns: user is 3; give a text"),
        (TRACE + "columns = { cpus = { unit = 2 } }", "columns: cpus: column is missing; give a text"),
        (TRACE + "columns = { cpus = { column = 'c', unit = 0 } }", "cpus: unit is 0; give a number, more than 0"),
        (TRACE.replace("csv", "slurm") + "columns = { user = 'who' }", "columns: only format = \"csv\""),
        (TRACE + "columns = { ran = 'seconds' }", "jobs: there is no column seconds; the first line has to name"),
        (TRACE + "from_day = -1", "from_day is -1; give a number, 0 or more"),
    ],
)  # fmt: skip
def test_senseless_value_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(InvalidStudyError, match=says):
        study_of(text, jobs=HELIOS)


SHARED = """
days = 1
[[slices]]
type = "v6e-16"
count = 4
cpus = 60
[[slices]]
type = "v6e-64"
count = 1
[[policies]]
name = "divided"
[[policies]]
name = "shared"
take_back = "held"
"""


def test_policies_may_differ_in_whether_slices_are_fixed() -> None:
    assert [policy.take_back for policy in study_of(SHARED).policies] == [None, "held"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SHARED.replace("held", "all"), "number 2: take_back is 'all'; give one of idle, lower-bands, held"),
        (SHARED.replace("cpus = 60", "host_dies_every_d = 9"), r"take_back: .* not lost .* \[\[slices\]\] number 1"),
        (SHARED.replace("cpus = 60", "preempted_every_h = 9"), r"take_back: .* not lost .* \[\[slices\]\] number 1"),
        (
            SHARED.replace("v6e-64", "v6e-16"),
            r"v6e-16 is the type of two \[\[slices\]\]; put these together",
        ),
        (SHARED.replace("v6e-64", "v5p-64"), "take_back: .* one generation"),
        (
            "days = 1\n[[hosts]]\ncount = 1\ncpus = 8\n[[policies]]\nname = 'shared'\ntake_back = 'held'",
            r"take_back: the chips of all \[\[slices\]\] are shared, and there are none",
        ),
    ],
)
def test_slices_that_can_not_be_those_of_a_reservation_are_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidStudyError, match=says):
        study_of(text)


def test_reservation_is_refused_where_the_provisioner_was_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(one for one in services.installed_services() if one.name != "capacity")
    monkeypatch.setattr(services, "installed_services", lambda: others)
    with pytest.raises(InvalidStudyError, match="take_back needs the provisioner: there is no service 'capacity'"):
        study_of(SHARED)
    assert study_of(SHARED.replace('take_back = "held"', "")).policies


@pytest.mark.parametrize("value", [3, "x", [1], None])
def test_description_that_is_no_table_is_refused(value: Any) -> None:
    with pytest.raises(InvalidStudyError):
        read_study({"days": 1, "slices": [value]}, lambda _: [])
