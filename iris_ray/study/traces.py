"""Reads the jobs of a real cluster from its accounting.

There are two formats, each with a first line of column names:

- ``slurm``: the output of ``sacct --parsable2 --allusers`` with the columns JobID, User, Submit, ElapsedRaw (or
  Elapsed) and AllocTRES (or ReqTRES).
- ``csv``: comma-separated as in the public traces of Helios, and in a flattened one of Philly: user, submit_time,
  gpu_num, duration and, if there are any, job_id, cpu_num and node_num.

A trace has only the run times of jobs, so jobs that failed or were cancelled run as long as they did there and then
succeed. Jobs that never ran are left out.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from iris_ray.errors import InvalidStudyError
from iris_ray.model.checks import as_user, part_of_id
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.study.jobs import Arrival, SimulatedJob, slice_spec, tasks_spec


@dataclass(frozen=True, slots=True)
class TracedJob:
    """One job of a trace.

    Attributes:
        submitted_at: seconds since a time of the trace's choice.
        run_s: how many seconds it ran.
        accelerators: the number of its GPUs.
        cpus: the number of its CPUs, on all nodes together.
    """

    job_id: str
    user: str
    submitted_at: float
    run_s: float
    accelerators: int
    cpus: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRules:
    """How jobs of a trace become jobs on slices.

    Args:
        name: the prefix of the jobs' ids.
        tpu_type: the type of slices for jobs with accelerators, as many slices as have enough chips.
        save_every_s: how often they save their state; infinite: never.
        heeds_notices: whether they save and move when they are told.
        max_slices: jobs on more slices are left out.
        max_cpus: the CPUs of a host without TPU; jobs with larger tasks are left out, 0 leaves out all without GPUs.
    """

    name: str
    tpu_type: str
    band: PriorityBand = PriorityBand.INTERACTIVE
    save_every_s: float = math.inf
    heeds_notices: bool = True
    max_slices: int = 1_000_000
    max_cpus: float = 0.0


def arrivals(jobs: Iterable[TracedJob], rules: TraceRules) -> list[Arrival]:
    """Return the jobs of a trace, the first one at the beginning."""
    specs = ((job, _spec(job, rules)) for job in _with_own_ids(jobs))
    found = [(job.submitted_at, spec, job.run_s) for job, spec in specs if spec is not None]
    found.sort(key=lambda job: job[0])
    first = found[0][0] if found else 0.0
    return [
        (at - first, SimulatedJob(spec, run_s, rules.save_every_s, rules.heeds_notices)) for at, spec, run_s in found
    ]


def _with_own_ids(jobs: Iterable[TracedJob]) -> Iterator[TracedJob]:
    """Yield the jobs with ids that a job of ours can have. Repeated ids, as of requeued jobs, get a number."""
    seen: Counter[str] = Counter()
    for job in jobs:
        job_id = part_of_id(job.job_id)
        seen[job_id] += 1
        times = seen[job_id]
        yield replace(job, job_id=job_id if times == 1 else f"{job_id}-{times}")


def _spec(job: TracedJob, rules: TraceRules) -> JobSpec | None:
    job_id, more = f"{part_of_id(rules.name)}-{job.job_id}", {"user": as_user(job.user), "priority": rules.band}
    if job.accelerators:
        slices = -(-job.accelerators // get_tpu_config(rules.tpu_type).chip_count)
        return slice_spec(job_id, rules.tpu_type, slices, **more) if slices <= rules.max_slices else None
    each = job.cpus / job.nodes
    return tasks_spec(job_id, job.nodes, each, **more) if 0 < each <= rules.max_cpus else None


def read_trace(lines: Iterable[str], form: str, source: str) -> Iterator[TracedJob]:
    """Yield the jobs of a trace that ran.

    Args:
        lines: the file's lines.
        form: ``slurm`` or ``csv``.
        source: the file's name, for messages.

    Raises:
        InvalidStudyError: a column is missing, or a value makes no sense; the message has the line.
    """
    options, read_row, needed = FORMATS[form]
    rows = csv.DictReader(lines, **options)
    columns = {name.strip().lower() for name in rows.fieldnames or ()}
    for names in needed:
        if columns.isdisjoint(names):
            raise InvalidStudyError(
                f"{source}: there is no column {' or '.join(names)}; the first line has to name the columns,"
                f" and names {', '.join(sorted(columns)) or 'none'}"
            )
    try:
        for row in rows:
            values = {(name or "").strip().lower(): value for name, value in row.items() if isinstance(value, str)}
            job = read_row(values)
            if job is not None and job.run_s > 0:
                yield job
    except KeyError as missing:
        raise InvalidStudyError(f"{source}, line {rows.line_num}: it has no value for {missing}") from None
    except (ValueError, OverflowError) as error:
        raise InvalidStudyError(f"{source}, line {rows.line_num}: {error}") from None
    except csv.Error as error:
        raise InvalidStudyError(f"{source}, after line {rows.line_num}: {error}") from None


def _slurm_row(row: Mapping[str, str]) -> TracedJob | None:
    if "." in row["jobid"] or row["submit"] in ("", "Unknown"):  # a step of a job, or a job that was never submitted
        return None
    tres = dict(re.findall(r"([^,=]+)=([^,]+)", row.get("alloctres") or row.get("reqtres") or ""))
    gpus = [amount for name, amount in tres.items() if name == "gres/gpu"] or [
        amount for name, amount in tres.items() if name.startswith("gres/gpu:")
    ]
    return TracedJob(
        job_id=row["jobid"],
        user=row["user"],
        submitted_at=_seconds(row["submit"]),
        run_s=float(row["elapsedraw"] or 0) if "elapsedraw" in row else _duration(row["elapsed"]),
        accelerators=sum(int(amount) for amount in gpus),
        cpus=float(tres.get("cpu", 0)),
        nodes=max(1, int(tres.get("node", 1))),
    )


def _csv_row(row: Mapping[str, str]) -> TracedJob | None:
    if not row["duration"].strip():
        return None
    return TracedJob(
        job_id=row.get("job_id") or row.get("jobid") or f"{row['user']}-{row['submit_time']}",
        user=row["user"],
        submitted_at=_seconds(row["submit_time"]),
        run_s=float(row["duration"]),
        accelerators=int(float(row["gpu_num"] or 0)),
        cpus=float(row.get("cpu_num") or 0),
        nodes=max(1, int(float(row.get("node_num") or 1))),
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        date = datetime.fromisoformat(text.strip())
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is no time")
    return seconds


def _duration(text: str) -> float:
    """Return the seconds of ``[days-]hours:minutes:seconds``."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no duration such as 1-02:30:00")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


_ReadRow = Callable[[Mapping[str, str]], TracedJob | None]

FORMATS: Mapping[str, tuple[Mapping[str, Any], _ReadRow, tuple[tuple[str, ...], ...]]] = {
    "slurm": (
        {"delimiter": "|", "quoting": csv.QUOTE_NONE},
        _slurm_row,
        (("jobid",), ("user",), ("submit",), ("elapsedraw", "elapsed"), ("alloctres", "reqtres")),
    ),
    "csv": ({"delimiter": ","}, _csv_row, (("user",), ("submit_time",), ("gpu_num",), ("duration",))),
}
"""How lines are split, the reader of a row, and the columns that have to be there, by format."""
