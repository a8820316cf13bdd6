"""The file that carries a Controller's queue, settings and past use to an empty Controller, of any later version.

It is text: one JSON object on each line, with its ``kind``. Nothing in it is a pickled object of iris_ray; only users'
functions are pickled, and files zipped, in base64. The first line is the header, with the number of the format.

To change it: a new kind of line, or a new key, needs no new `FORMAT`, because readers give a missing key its default
and name the kinds that they don't know. Another meaning of a kind or key does; then keep the reader of the format
before. tests/data/export-format-1.jsonl is of today, and every later version must read it.
"""

import base64
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from iris_ray.actors.protocol.messages import NO_OWNER_YET, ProcessSpec, RunRequest
from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.job_spec import OPTIONS_OF_A_JOB, CoschedulingConfig, JobSpec
from iris_ray.model.options import OPTIONS, PriorityBand
from iris_ray.model.secret import SecretValue

FORMAT = 1
HEADER = "iris_ray export"

Line = dict[str, Any]
Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Makes JSON of a value, and the value of JSON."""

# -- jobs --------------------------------------------------------------------------------------------------------------


def _with(constraint: Constraint) -> Line:
    value = constraint.value
    values = [one.value for one in value] if isinstance(value, tuple) else None if value is None else value.value
    return {"key": constraint.key, "op": constraint.op.name, "value": values}


def _constraint(line: Line) -> Constraint:
    return Constraint(line["key"], ConstraintOp[line["op"]], line.get("value"))


def _same(value: Any) -> Any:
    return value


_CONSTRAINTS: Codec = lambda all_: list(map(_with, all_)), lambda lines: tuple(map(_constraint, lines))
SPEC: Mapping[str, Codec] = {  # an option has a line of its own only if JSON would change its value
    **dict.fromkeys(OPTIONS_OF_A_JOB, (_same, _same)),
    **dict.fromkeys(("job_id", "name", "user", "device", "replicas", "whole_groups", "may_evict"), (_same, _same)),
    "priority": (lambda band: band.name, PriorityBand.__getitem__),
    "after": (dict, dict),
    "group": (
        lambda group: group and {**asdict(group), "members": dict(group.members)},
        lambda line: line and GroupSpec(line["group_id"], line["name"], (*line["members"].items(),), (*line["main"],)),
    ),
    "coscheduling": (
        lambda config: config and {"group_by": config.group_by, "num_groups": list(config.num_groups)},
        lambda line: line and CoschedulingConfig(line["group_by"], line["num_groups"]),
    ),
    "constraints": _CONSTRAINTS,
    "preferences": _CONSTRAINTS,
    "tolerations": (list, tuple),
    "stored_secrets": (list, tuple),
    "resources": (dict, dict),
}
NOT_IN_FILE = frozenset({"owner", "spare_for"})
"""Fields of a `JobSpec` that are not carried over: its pool is another one, and spares are made anew."""

RUN = tuple(field.name for field in fields(RunRequest) if field.name in OPTIONS.keys() - {"env", "secrets"})
"""Fields of a `RunRequest` that are plain values: options, apart from variables."""


def spec_line(spec: JobSpec) -> Line:
    """Convert the spec of a job to JSON."""
    return {name: to_json(getattr(spec, name)) for name, (to_json, _) in SPEC.items()}


def spec_of(line: Line) -> JobSpec:
    """Convert JSON to the spec of a job. An invalid line raises an `IrisError`, or any other error."""
    known = {name: of_json(line[name]) for name, (_, of_json) in SPEC.items() if name in line}
    return JobSpec(owner=NO_OWNER_YET, **known)


def run_line(request: RunRequest, function: bytes) -> Line:
    """Return the line from which a pool can start a job again: its request, and its pickled function."""
    stored = {name: one for name, one in request.secrets.items() if one.stored}
    given = {name: one.as_file for name, one in request.secrets.items() if not one.stored}
    return {
        "function": base64.b64encode(function).decode(),
        "env": dict(request.env) | dict.fromkeys(given),  # without their values in any case
        "kept_back": given,
        "from_store": {name: [one.stored, one.as_file] for name, one in stored.items()},
        "runtime_env": environment_line(request.process.runtime_env),
        "preload": list(request.process.preload),
        **{name: getattr(request, name) for name in RUN},
    }


def environment_line(runtime_env: Mapping[str, Any]) -> Line:
    """Return a runtime environment of Ray as JSON, without what Ray keeps there for itself.

    Raises:
        TypeError: JSON has no such value.
    """
    found: Line = json.loads(json.dumps({k: v for k, v in runtime_env.items() if not k.startswith("_")}))
    return found


def run_of(spec: JobSpec, line: Line) -> RunRequest:
    """Return the request by which a pool starts the job again."""
    function = base64.b64decode(line["function"])
    process = ProcessSpec(dict(line.get("runtime_env") or {}), tuple(line.get("preload") or ()))
    given = {name: line[name] for name in RUN if name in line}
    env = dict(line.get("env") or {})
    secrets = {
        name: SecretValue(env.pop(name), as_file) for name, as_file in line.get("kept_back", {}).items() if name in env
    }
    secrets |= {
        name: SecretValue("", as_file, stored=stored) for name, (stored, as_file) in line.get("from_store", {}).items()
    }
    return RunRequest(spec, function, env, process, **{"keep_warm": 0.0, **given}, secrets=secrets)


def leave_out_variables(line: Line) -> None:
    """Remove the values of all environment variables from a job's line: they may be secrets. Their names stay."""
    for variables in _variables(line):
        variables |= dict.fromkeys(variables)


def fill_in_variables(line: Line, given: Mapping[str, str]) -> list[str]:
    """Set the variables of a job's line whose values were left out. Return the names without a value."""
    missing = set()
    for variables in _variables(line):
        left_out = {name for name, value in variables.items() if value is None}
        variables |= {name: given[name] for name in left_out & given.keys()}
        missing |= left_out - given.keys()
    return sorted(missing)


def _variables(line: Line) -> list[dict[str, str | None]]:
    """Return the variables of the tasks, of their processes, and of the Ray job."""
    run, ray_job = line.get("run") or {}, line.get("ray_job") or {}
    found = run.get("env"), (run.get("runtime_env") or {}).get("env_vars"), ray_job.get("env_vars")
    return [variables for variables in found if variables]


# -- the whole file ----------------------------------------------------------------------------------------------------

KINDS: Mapping[str, str] = {
    "setting": "setting",
    "limits": "limit",
    "teams": "tree of teams",
    "taint": "taint",
    "usage": "past usage",
    "user_day": "day of a user",
    "fleet_day": "day of the chips",
    "finished": "finished job",
    "package": "package",
    "job": "job",
}
"""The kinds of lines, and their names for people."""


@dataclass(slots=True)
class Export:
    """A file that was read.

    Attributes:
        header: its first line.
        lines: the other lines by kind.
        unknown: kinds of lines that this version does not know, each with the number of its lines.
    """

    header: Line
    lines: dict[str, list[Line]]
    unknown: dict[str, int]


def written(header: Mapping[str, Any], lines: Iterable[Line]) -> Iterator[str]:
    """Yield the lines of a file."""
    yield json.dumps({"kind": HEADER, "format": FORMAT, **header}) + "\n"
    for line in lines:
        yield json.dumps(line) + "\n"


def read(lines: Iterable[str], name: str) -> Export:
    """Read a file.

    Args:
        lines: its lines.
        name: its name, for messages.

    Raises:
        InvalidRequestError: it is not an export, is cut off, or is of a later format; the message names the line.
    """
    export: Export | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            kind = line["kind"]
            if kind == "job" and export is not None:
                line["job_id"], line["spec"]
        except (ValueError, TypeError, KeyError, RecursionError):
            what = "is not a line of an export" if number > 1 else "is not an export of iris_ray"
            raise InvalidRequestError(
                f"{name}, line {number} {what}; it may be cut off: give a file that `iris-ray cluster controller"
                " export` has written"
            ) from None
        if export is None:
            export = Export(_checked_header(line, name), {kind: [] for kind in KINDS}, {})
        elif kind in KINDS:
            export.lines[kind].append(line)
        elif kind != "end":
            export.unknown[kind] = export.unknown.get(kind, 0) + 1
        else:
            return export
    raise InvalidRequestError(f"{name} is {'cut off: its last line is missing' if export else 'empty'}; export again")


END: Line = {"kind": "end"}
"""The last line: without it, the file is cut off."""


def _checked_header(line: Line, name: str) -> Line:
    if line["kind"] != HEADER:
        raise InvalidRequestError(f"{name}, line 1 is not the header of an export of iris_ray, but a {line['kind']!r}")
    if not isinstance(line.get("format"), int) or line["format"] > FORMAT:
        raise InvalidRequestError(
            f"{name} is of format {line.get('format')!r}, written by iris_ray {line.get('iris_ray')}, and this version"
            f" reads formats up to {FORMAT}: import it with iris_ray {line.get('iris_ray')} or newer"
        )
    return line


# -- what can be started again -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Startable:
    """The jobs of a file, by whether they can be started again.

    Attributes:
        jobs: the requests and lines of the startable ones by id, in the file's order.
        left_out: the other jobs, with the reason, for people.
        remarks: notes on startable jobs, for people.
    """

    jobs: dict[str, tuple[RunRequest, Line]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def startable(export: Export, given: Mapping[str, str]) -> Startable:
    """Return the jobs of a file that can be started again here. Jobs of a group can only be started together.

    Args:
        export: the file.
        given: values of variables that the export has left out.
    """
    found = Startable()
    for line in export.lines["job"]:
        job_id = str(line["job_id"])
        try:
            request = _request(export.header, line, given)
        except IrisError as error:
            found.left_out.append(f"{job_id}: {error}")
            continue
        found.jobs[job_id] = request, line
        if line.get("succeeded") and not request.spec.is_one_gang:
            succeeded = f"{line['succeeded']} of its {line.get('tasks')} tasks had succeeded"
            found.remarks.append(f"{job_id}: {succeeded}; all run again")
    there = set(found.jobs)
    for job_id in list(found.jobs):
        group = found.jobs[job_id][0].spec.group
        if group is not None and (lacks := [one for one in group.job_ids.values() if one not in there]):
            del found.jobs[job_id]
            found.left_out.append(without_group(job_id, group, lacks[0]))
    return found


def without_group(job_id: str, group: GroupSpec, lacks: str) -> str:
    """Return that a job is left out because another job of its group, ``lacks``, is."""
    return f"{job_id}: its group {group.name} starts together or not at all, and {lacks} is left out"


def _request(header: Line, line: Line, given: Mapping[str, str]) -> RunRequest:
    """Return the request by which a pool starts the job of a line.

    Raises:
        IrisError: it can't be started here; the message says why, to follow the job's id.
    """
    here = platform.python_version()
    written_by = str(header.get("python") or here)
    minor = written_by.split(".")[:2]
    if "run" not in line:
        raise InvalidRequestError(str(line.get("why_not", "how to start it again was not known")))
    if minor != here.split(".")[:2]:
        raise InvalidRequestError(
            f"its function was pickled by Python {written_by}, and this is {here}: import it with Python"
            f" {'.'.join(minor)}, or submit it again"
        )
    try:
        if missing := fill_in_variables(line, given):
            names = ", ".join(missing)
            raise InvalidRequestError(
                f"the values of {names} were not exported; import again with --jobs-only --env-file FILE"
            )
        return run_of(spec_of(line["spec"]), line["run"])
    except IrisError:
        raise
    except Exception as error:  # the file may have been edited
        raise InvalidRequestError(f"it can't be read: {type(error).__name__}: {error}") from None
