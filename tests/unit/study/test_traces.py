"""Jobs of real clusters, from what their accounting prints."""

import pytest

from iris_ray.errors import InvalidStudyError
from iris_ray.study.jobs import Arrival
from iris_ray.study.traces import Column, LeftOut, TracedJob, TraceRules, as_trace, read_trace

SLURM = """\
JobID|User|Submit|Elapsed|State|AllocTRES
101|ann|2026-01-05T10:00:00|1-02:00:30|COMPLETED|billing=64,cpu=64,gres/gpu=16,mem=512G,node=2
101.batch||2026-01-05T10:00:05|1-02:00:30|COMPLETED|cpu=32,mem=256G,node=1
102|bob|2026-01-05T09:59:00|00:10:00|CANCELLED by 1001|cpu=8,mem=32G,node=1
103_7|bob|2026-01-05T10:01:00|00:00:00|CANCELLED by 1001|
104|ann|2026-01-05T10:02:00|30:00|FAILED|cpu=4,gres/gpu:a100=4,node=1
"""
HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1000,u1,vcA,8,48,1,COMPLETED,2020-04-01 00:00:30,2020-04-01 00:01:00,2020-04-01 01:01:00,3600,30
1001,u2,vcA,0,4,1,FAILED,2020-04-01 00:00:00,2020-04-01 00:00:10,2020-04-01 00:00:40,30,10
"""


OPENB = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
openb-pod-0000,12000,16384,1,1000,,LS,Running,0,12537496,0
openb-pod-0005,20000,65536,0,0,,LS,Running,2759674,12902960,2759676
openb-pod-0009,4000,16384,8,1000,,BE,Pending,3019330,3019400,
"""
"""The columns and first rows of Alibaba's cluster-trace-gpu-v2023, and a row that was never scheduled."""
OPENB_COLUMNS = {
    "job_id": Column(("name",)),
    "user": Column(("qos",)),
    "submitted": Column(("creation_time",)),
    "started": Column(("scheduled_time",)),
    "ended": Column(("deletion_time",)),
    "accelerators": Column(("num_gpu",)),
    "cpus": Column(("cpu_milli",), 0.001),
}


def rows(text: str, form: str) -> list[TracedJob | LeftOut]:
    return list(read_trace(text.splitlines(), form, "trace"))


def read(text: str, form: str) -> list[TracedJob]:
    return [row for row in rows(text, form) if isinstance(row, TracedJob)]


def arrivals(jobs: list[TracedJob], rules: TraceRules) -> list[Arrival]:
    return as_trace(jobs, rules, "trace").arrivals


def test_slurm_accounting_skips_steps_and_unstarted_jobs() -> None:
    ann, bob, typed = read(SLURM, "slurm")
    assert (ann.job_id, ann.user, ann.run_s, ann.accelerators, ann.cpus, ann.nodes) == (
        "101", "ann", 26 * 3600.0 + 30.0, 16, 64.0, 2,
    )  # fmt: skip
    assert (bob.user, bob.run_s, bob.accelerators) == ("bob", 600.0, 0)
    assert ann.submitted_at - bob.submitted_at == 60.0
    assert (typed.accelerators, typed.run_s) == (4, 1800.0)


def test_helios_csv_is_read() -> None:
    first, second = read(HELIOS, "csv")
    assert (first.job_id, first.user, first.run_s, first.accelerators, first.cpus) == ("1000", "u1", 3600.0, 8, 48.0)
    assert first.submitted_at - second.submitted_at == 30.0


def test_traced_jobs_run_on_slices_with_enough_chips() -> None:
    rules = TraceRules(name="trace", tpu_type="v4-16", save_every_s=600.0, max_cpus=32.0)
    (at_bob, bob), (at_ann, ann), (_, typed) = arrivals(read(SLURM, "slurm"), rules)
    assert (at_bob, at_ann) == (0.0, 60.0)
    assert ann.spec.coscheduling is not None
    assert (ann.spec.job_id, ann.spec.user, ann.spec.coscheduling.num_groups) == ("trace-101", "ann", (2,))
    assert (ann.run_s, ann.save_every_s) == (93630.0, 600.0)
    assert (bob.spec.coscheduling, bob.spec.resources) == (None, {"CPU": 8.0})
    assert typed.spec.coscheduling is not None
    assert typed.spec.coscheduling.num_groups == (1,)


def test_jobs_too_large_for_every_host_are_left_out() -> None:
    assert [job.spec.job_id for _, job in arrivals(read(SLURM, "slurm"), TraceRules(name="t", tpu_type="v4-16"))] == [
        "t-101", "t-104",
    ]  # fmt: skip
    few = TraceRules(name="t", tpu_type="v4-16", max_slices=1)
    assert [job.spec.job_id for _, job in arrivals(read(SLURM, "slurm"), few)] == ["t-104"]


def test_rows_that_make_no_job_are_told_with_line_and_reason() -> None:
    slurm = SLURM + "105|bob|Unknown|00:00:00|PENDING|\n106|bob|2026-01-05T10:03:00|01:00|COMPLETED|\n"
    trace = as_trace(rows(slurm, "slurm"), TraceRules(name="t", tpu_type="v4-16", max_slices=1, max_cpus=4.0), "trace")
    assert [job.spec.job_id for _, job in trace.arrivals] == ["t-104"]
    assert trace.left_out == [
        LeftOut(2, "it needs more slices of v4-16 than there are"),
        LeftOut(4, "it needs more CPUs on a host than any host without TPU has"),
        LeftOut(5, "it did not run"),
        LeftOut(7, "it was never submitted"),
        LeftOut(8, "it asks for no accelerators and no CPUs"),
    ]


def test_job_that_no_cluster_takes_is_left_out() -> None:
    text = "user,gpu_num,cpu_num,node_num,submit_time,duration\n" + "ann,0,90000000,90000000,0,60\nann,0,1,1,5,60\n"
    trace = as_trace(rows(text, "csv"), TraceRules(name="t", tpu_type="v4-16", max_cpus=8.0), "trace")
    assert [job.spec.job_id for _, job in trace.arrivals] == ["t-ann-5"]
    assert [(row.line, "100,000" in row.why) for row in trace.left_out] == [(2, True)]


def test_jobs_for_hosts_without_tpu_are_told_if_there_are_none() -> None:
    trace = as_trace(rows(HELIOS, "csv"), TraceRules(name="t", tpu_type="v4-16"), "trace")
    assert trace.left_out == [LeftOut(3, "it needs a host without TPU, and the study has none: add [[hosts]]")]


def test_trace_of_alibaba_is_read_by_its_columns() -> None:
    first, second, never = read_trace(OPENB.splitlines(), "csv", "trace", OPENB_COLUMNS)
    assert isinstance(first, TracedJob)
    assert (first.job_id, first.user, first.run_s, first.accelerators, first.cpus) == (
        "openb-pod-0000", "LS", 12_537_496.0, 1, 12.0,
    )  # fmt: skip
    assert isinstance(second, TracedJob)
    assert (second.accelerators, second.run_s) == (0, 12_902_960.0 - 2_759_676.0)
    assert never == LeftOut(4, "it did not run")


def test_simultaneous_jobs_of_one_user_stay_separate() -> None:
    text = "user,gpu_num,submit_time,duration\n" + "ann,16,0,60\n" * 3
    found = arrivals(read(text, "csv"), TraceRules(name="t", tpu_type="v4-16"))
    assert [job.spec.job_id for _, job in found] == ["t-ann-0", "t-ann-0-2", "t-ann-0-3"]


def test_quotes_in_slurm_column_are_kept() -> None:
    named = SLURM.replace("|COMPLETED|", '|"one and|').replace("|FAILED|", '|"other|')
    assert [job.job_id for job in read(named, "slurm")] == ["101", "102", "104"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1002,u1,vcA,8", "line 4: it has no value for 'submit_time'"),
        ("1002,u1,vcA,inf,4,1,COMPLETED,2020-04-01 00:00:00,,,30,10", "line 4: .*infinity"),
        ("1002,u1,vcA,8,4,1,COMPLETED,nan,,,30,10", "line 4: 'nan' is not a time"),
        (f'1002,u1,"{"vcA" * 50_000}', "after line 3: field larger than field limit"),
    ],
    ids=["torn", "inf", "nan", "open quote"],
)
def test_odd_line_is_refused_with_number(line: str, says: str) -> None:
    with pytest.raises(InvalidStudyError, match=says):
        read(HELIOS + line, "csv")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("JobID|User|Submit|State|AllocTRES\n", "no column elapsedraw or elapsed"),
        ("", "names none"),
        (SLURM.replace("1-02:00:30|COMPLETED|billing", "soon|COMPLETED|billing"), "line 2: 'soon' is not a duration"),
        (SLURM.replace("2026-01-05T09:59:00", "yesterday"), "line 4: .*yesterday"),
    ],
)
def test_unreadable_trace_is_refused_with_place(text: str, says: str) -> None:
    with pytest.raises(InvalidStudyError, match=says):
        read(text, "slurm")
