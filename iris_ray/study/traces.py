"""Reads the jobs of a real cluster from its accounting.

There are two formats, each with a first line of column names:

- ``slurm``: the output of ``sacct --parsable2 --allusers`` with the columns JobID, User, Submit, ElapsedRaw (or
  Elapsed) and AllocTRES (or ReqTRES).
- ``csv``: comma-separated, with the columns of the public traces of Helios and of a flattened one of Philly
  (`CSV_COLUMNS`), or with others that are named.

A trace has only the run times of jobs, so jobs that failed or were cancelled run as long as they did there and then
succeed. A row that makes no job is left out, with the reason.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from iris_ray.errors import InvalidRequestError, InvalidStudyError, NotPermittedError
from iris_ray.model.checks import as_user, part_of_id
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import hosts_of_shape, shapes_of
from iris_ray.model.teams import Teams
from iris_ray.model.topology import get_tpu_config
from iris_ray.study.jobs import Arrival, SimulatedJob, slice_spec, tasks_spec


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a CSV file.

    Args:
        names: it has one of these names, in lower case.
        unit: the factor for its numbers, such as 0.001 for thousandths of a CPU.
    """

    names: tuple[str, ...]
    unit: float = 1.0


CSV_COLUMNS: Mapping[str, Column] = {
    "job_id": Column(("job_id", "jobid")),
    "user": Column(("user",)),
    "submitted": Column(("submit_time",)),
    "started": Column(()),
    "ended": Column(()),
    "ran": Column(("duration",)),
    "accelerators": Column(("gpu_num",)),
    "cpus": Column(("cpu_num",)),
    "nodes": Column(("node_num",)),
}
"""The facts about a job that a CSV file has, and their columns. Without ``ran``, a job runs from ``started`` (or
``submitted``) to ``ended``."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row of a trace that makes no job.

    Attributes:
        line: its number in the file.
        why: the reason, in words.
    """

    line: int
    why: str


@dataclass(frozen=True, slots=True)
class TracedJob:
    """One job of a trace.

    Attributes:
        line: the number of its line in the file.
        submitted_at: seconds since a time of the trace's choice.
        run_s: how many seconds it ran.
        accelerators: the number of its GPUs.
        cpus: the number of its CPUs, on all nodes together.
    """

    line: int
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
        parts: whether a job that needs less than a slice asks for the smallest part of one that has enough chips.
        save_every_s: how often they save their state; infinite: never.
        heeds_notices: whether they save and move when they are told.
        from_s: jobs that were submitted less than these seconds after the first one are left out.
        max_slices: jobs on more slices are left out.
        max_cpus: the CPUs of a host without TPU; jobs with larger tasks are left out, 0 leaves out all without GPUs.
        teams: all teams. Jobs of users who could not submit them are left out.
        team: the team that they name; None: that of their user.
    """

    name: str
    tpu_type: str
    parts: bool = False
    band: PriorityBand = PriorityBand.INTERACTIVE
    save_every_s: float = math.inf
    heeds_notices: bool = True
    from_s: float = 0.0
    max_slices: int = 1_000_000
    max_cpus: float = 0.0
    teams: Teams = field(default_factory=Teams)
    team: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a trace, and its other rows.

    Attributes:
        source: the file's name.
        arrivals: the jobs, the first one at the beginning.
        left_out: the rows that make no job.
    """

    source: str
    arrivals: list[Arrival]
    left_out: list[LeftOut]


def as_trace(rows: Iterable[TracedJob | LeftOut], rules: TraceRules, source: str) -> Trace:
    """Return the jobs that rows make."""
    left_out, jobs = list[LeftOut](), list[TracedJob]()
    for row in rows:
        (left_out if isinstance(row, LeftOut) else jobs).append(row)  # type: ignore[arg-type]
    jobs.sort(key=lambda job: job.submitted_at)
    begin = jobs[0].submitted_at + rules.from_s if jobs else 0.0
    found: list[tuple[float, JobSpec, float]] = []
    for job in _with_own_ids(jobs):
        spec = "it was submitted before from_day" if job.submitted_at < begin else _spec(job, rules)
        if isinstance(spec, str):
            left_out.append(LeftOut(job.line, spec))
        else:
            found.append((job.submitted_at, spec, job.run_s))
    first = found[0][0] if found else 0.0
    arrivals = [
        (at - first, SimulatedJob(spec, run_s, rules.save_every_s, rules.heeds_notices)) for at, spec, run_s in found
    ]
    return Trace(source, arrivals, sorted(left_out, key=lambda row: row.line))


def _with_own_ids(jobs: Iterable[TracedJob]) -> Iterator[TracedJob]:
    """Yield the jobs with ids that a job of ours can have. Repeated ids, as of requeued jobs, get a number."""
    seen: Counter[str] = Counter()
    for job in jobs:
        job_id = part_of_id(job.job_id)
        seen[job_id] += 1
        times = seen[job_id]
        yield replace(job, job_id=job_id if times == 1 else f"{job_id}-{times}")


def _spec(job: TracedJob, rules: TraceRules) -> JobSpec | str:
    """Return the job that a row makes, or why it makes none."""
    user = as_user(job.user)
    try:
        return _spec_of(job, rules, {"user": user, "team": rules.teams.team_for(user, rules.team)})
    except (InvalidRequestError, NotPermittedError) as error:
        return str(error)


def _spec_of(job: TracedJob, rules: TraceRules, owner: dict[str, Any]) -> JobSpec | str:
    job_id, more = f"{part_of_id(rules.name)}-{job.job_id}", owner | {"priority": rules.band}
    if job.accelerators:
        device = get_tpu_config(rules.tpu_type)
        slices = -(-job.accelerators // device.chip_count)
        if slices > rules.max_slices:
            return f"it needs more slices of {rules.tpu_type} than there are"
        parts = shapes_of(device) if rules.parts else ()
        enough = (shape for shape in parts if hosts_of_shape(shape) * device.chips_per_vm >= job.accelerators)
        return slice_spec(job_id, rules.tpu_type, slices, topology=next(enough, None), **more)
    each = job.cpus / job.nodes
    if not each:
        return "it asks for no accelerators and no CPUs"
    if not rules.max_cpus:
        return "it needs a host without TPU, and the study has none: add [[hosts]]"
    if each > rules.max_cpus:
        return "it needs more CPUs on a host than any host without TPU has"
    return tasks_spec(job_id, job.nodes, each, **more)


def read_trace(
    lines: Iterable[str], form: str, source: str, columns: Mapping[str, Column] | None = None
) -> Iterator[TracedJob | LeftOut]:
    """Yield the rows of a trace.

    Args:
        lines: the file's lines.
        form: ``slurm`` or ``csv``.
        source: the file's name, for messages.
        columns: of a CSV file, in place of those of `CSV_COLUMNS`.

    Raises:
        InvalidStudyError: a column is missing, or a value makes no sense; the message has the line.
    """
    options, read_row, needed = _slurm() if form == "slurm" else _csv({**CSV_COLUMNS, **(columns or {})})
    rows = csv.DictReader(lines, **options)
    there = {name.strip().lower() for name in rows.fieldnames or ()}
    for names in needed:
        if there.isdisjoint(names):
            raise InvalidStudyError(
                f"{source}: there is no column {' or '.join(names)}; the first line has to name the columns,"
                f" and names {', '.join(sorted(there)) or 'none'}"
            )
    try:
        for row in rows:
            values = {(name or "").strip().lower(): value for name, value in row.items() if isinstance(value, str)}
            job = read_row(values, rows.line_num)
            if isinstance(job, TracedJob) and not job.run_s > 0:
                job = "it did not run"
            if job is not None:
                yield LeftOut(rows.line_num, job) if isinstance(job, str) else job
    except KeyError as missing:
        raise InvalidStudyError(f"{source}, line {rows.line_num}: it has no value for {missing}") from None
    except (ValueError, OverflowError) as error:
        raise InvalidStudyError(f"{source}, line {rows.line_num}: {error}") from None
    except csv.Error as error:
        raise InvalidStudyError(f"{source}, after line {rows.line_num}: {error}") from None


FORMATS = ("slurm", "csv")

_ReadRow = Callable[[Mapping[str, str], int], TracedJob | str | None]
"""Returns a row's job, or why it makes none; None for a row that is about no job of its own."""
_Format = tuple[Mapping[str, Any], _ReadRow, tuple[tuple[str, ...], ...]]
"""How lines are split, the reader of a row, and the columns that have to be there."""


def _slurm() -> _Format:
    needed = ("jobid",), ("user",), ("submit",), ("elapsedraw", "elapsed"), ("alloctres", "reqtres")
    return {"delimiter": "|", "quoting": csv.QUOTE_NONE}, _slurm_row, needed


def _slurm_row(row: Mapping[str, str], line: int) -> TracedJob | str | None:
    if "." in row["jobid"]:  # a step of a job
        return None
    if row["submit"] in ("", "Unknown"):
        return "it was never submitted"
    tres = dict(re.findall(r"([^,=]+)=([^,]+)", row.get("alloctres") or row.get("reqtres") or ""))
    gpus = [amount for name, amount in tres.items() if name == "gres/gpu"] or [
        amount for name, amount in tres.items() if name.startswith("gres/gpu:")
    ]
    return TracedJob(
        line=line,
        job_id=row["jobid"],
        user=row["user"],
        submitted_at=_seconds(row["submit"]),
        run_s=float(row["elapsedraw"] or 0) if "elapsedraw" in row else _duration(row["elapsed"]),
        accelerators=sum(int(amount) for amount in gpus),
        cpus=float(tres.get("cpu", 0)),
        nodes=max(1, int(tres.get("node", 1))),
    )


def _csv(columns: Mapping[str, Column]) -> _Format:
    ends = (*columns["ran"].names, *columns["ended"].names)
    needed = columns["submitted"].names, (*columns["accelerators"].names, *columns["cpus"].names), ends

    def text(row: Mapping[str, str], what: str) -> str:
        return next((row[name].strip() for name in columns[what].names if row.get(name)), "")

    def number(row: Mapping[str, str], what: str) -> float:
        return float(text(row, what) or 0) * columns[what].unit

    def time(row: Mapping[str, str], what: str) -> float | None:
        return _seconds(text(row, what)) * columns[what].unit if text(row, what) else None

    def read(row: Mapping[str, str], line: int) -> TracedJob | str:
        for names in needed:
            if row.keys().isdisjoint(names):
                raise KeyError(names[0])
        submitted, ended = time(row, "submitted"), time(row, "ended")
        if submitted is None:
            return "it was never submitted"
        ran = number(row, "ran") if text(row, "ran") else None
        if ran is None and ended is not None:
            started = time(row, "started")
            if started is None and columns["started"].names:
                return "it did not run"
            ran = ended - (submitted if started is None else started)
        if ran is None:
            return "it has no end"
        if not math.isfinite(ran):
            raise ValueError(f"{ran:g} seconds is not a run time")
        user = text(row, "user") or "nobody"
        return TracedJob(
            line=line,
            job_id=text(row, "job_id") or f"{user}-{text(row, 'submitted')}",
            user=user,
            submitted_at=submitted,
            run_s=ran,
            accelerators=math.ceil(number(row, "accelerators")),
            cpus=number(row, "cpus"),
            nodes=max(1, int(number(row, "nodes"))),
        )

    return {"delimiter": ","}, read, needed


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        date = datetime.fromisoformat(text.strip())
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a time")
    return seconds


def _duration(text: str) -> float:
    """Return the seconds of ``[days-]hours:minutes:seconds``."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a duration such as 1-02:30:00")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
