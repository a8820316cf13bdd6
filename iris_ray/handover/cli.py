"""``iris-ray cluster controller export`` and ``import``: a Controller's queue, settings and history as a file."""

import base64
import contextlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import click

import iris_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.options import json_option
from iris_ray.cli.printing import counted, print_json
from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.model.options import EACH_SLICE
from iris_ray.terminal import live_line

POOLS_ANSWER_S, POOL_ANSWER_AT_LEAST_S = 30.0, 1.0
"""The time for all pools, which are asked at once, so that hanging ones don't add up; and the time for each."""
_TO_SUMS = ("kind", "user", "team", "ended_at", "seconds", "chip_seconds")
"""The fields of an ended job that the new Controller needs."""
_RECORDS = ("setting", "limits", "teams", "taint", "usage", "user_day", "fleet_day")
_NAMES = {
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


@click.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--variables", is_flag=True, help="With the values of the jobs' environment variables: they may be secrets."
)
@json_option
@address_option
def export(file: Path, variables: bool, as_json: bool) -> None:
    """Write the queue, budgets, limits, settings and history into a file.

    \b
      iris-ray cluster controller export queue.jsonl
      jq 'select(.kind == "job") | .job_id' queue.jsonl

    Nothing changes in the cluster. The file is one JSON object on each line; only its owner may read it (mode 0600). A
    detached job (iris-ray submit) can be started again from it: its function and its working directory are in the file.
    The values of its environment variables are not, unless you say --variables. What can't be carried over is named:
    above all jobs whose caller waits for their results, because that caller ends with the cluster.
    """
    from iris_ray.actors.controller.journal import Journal
    from iris_ray.handover.controller import hand_over
    from iris_ray.handover.file import END, leave_out_variables, written

    if file.exists():
        raise InvalidRequestError(f"{file} exists already; give another name, or remove it")
    with cluster():
        found = hand_over(Journal())
        jobs = [line for line in found.lines if line["kind"] == "job"]
        packages = _add_what_pools_know(jobs)
    if not variables:
        for line in jobs:
            leave_out_variables(line)
    header = {
        "iris_ray": iris_ray.__version__,
        "python": platform.python_version(),
        "at": time.time(),
        "left_out": found.left_out,
    }
    with _private(file) as opened:
        opened.writelines(written(header, [*found.lines, *packages, END]))
    left_out = [*found.left_out, *(f"{line['job_id']}: {line['why_not']}" for line in jobs if "why_not" in line)]
    if as_json:
        print_json({"file": str(file), "lines": Counter(one["kind"] for one in found.lines), "left_out": left_out})
        return
    click.echo(f"{file}: {_counts([*found.lines, *packages])}")
    _say_left_out(left_out, "can't be carried over")


@contextlib.contextmanager
def _private(file: Path) -> Iterator[Any]:
    """Open a new file that only its owner may read; it appears when it is complete."""
    partial = file.with_name(f"{file.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            yield opened
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def _add_what_pools_know(jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each job how its pool would start it again, or why that is not possible. Return the packages they need."""
    import ray
    from ray.exceptions import RayError

    from iris_ray.actors.calls.asking import Actor
    from iris_ray.actors.calls.names import NAMESPACE, detached_pool
    from iris_ray.actors.calls.ray_internals import fetch_package
    from iris_ray.handover.calls import HandoverCallsOfPool

    asked = []
    for line in jobs:
        try:
            pool = Actor[HandoverCallsOfPool](ray.get_actor(detached_pool(line["job_id"]), NAMESPACE))
            asked.append((line, pool.call(HandoverCallsOfPool.what_it_runs)))
        except ValueError:
            line["why_not"] = "its caller waits for its results; run its script again on the new cluster"
        except AttributeError:  # its pool has no such method
            line["why_not"] = "its iris_ray is older, and can't say how to start it again; submit it again"
    packages: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + POOLS_ANSWER_S
    for line, call in asked:
        try:
            known = ray.get(call, timeout=max(POOL_ANSWER_AT_LEAST_S, until - time.monotonic()))
        except (RayError, TypeError) as error:
            why = (str(error).strip().splitlines() or [""])[-1]
            line["why_not"] = f"its pool does not say how to start it again ({type(error).__name__}: {why[:200]})"
            continue
        if known is None:
            line["why_not"] = "its pool is about to end"
            continue
        for uri in _packages_of(known["ray_job"], known["run"]["runtime_env"]):
            if uri not in packages and (data := fetch_package(uri)) is not None:
                packages[uri] = {"kind": "package", "uri": uri, "zip": base64.b64encode(data).decode()}
            if uri not in packages:
                line["why_not"] = f"the cluster no longer has its package {uri}"
        line |= known
    return list(packages.values())


def _packages_of(*environments: Mapping[str, Any]) -> list[str]:
    """Return the packages in Ray's own store that runtime environments name."""
    parts = [(one.get("working_dir"), *(one.get("py_modules") or ())) for one in environments]
    return [uri for uris in parts for uri in uris if isinstance(uri, str) and uri.startswith("gcs://")]


# -- import ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Startable:
    """What of a file's jobs can be started again.

    Attributes:
        jobs: their lines, with all variables.
        left_out: why the others can't, in words.
        remarks: what is different for those that can.
    """

    jobs: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--env-file", metavar="FILE", help="Variables of the jobs that the export has left out, NAME=VALUE a line."
)
@click.option("--jobs-only", is_flag=True, help="Only submit the jobs that this cluster does not know yet.")
@json_option
@address_option
def import_(file: Path, env_file: str | None, jobs_only: bool, as_json: bool) -> None:
    """Take over what an export has written, into a new cluster.

    \b
      iris-ray cluster controller import queue.jsonl
      iris-ray cluster controller import queue.jsonl --jobs-only --env-file secrets.env

    The Controller must be empty, and is started if none runs. Settings that are set here already stay. The jobs enter
    the queue in their old order, under their old ids, with what is left of their budgets; those that ran begin another
    attempt and go on from their own checkpoints. What can't be carried over is named. If the import was interrupted,
    --jobs-only submits the rest.
    """
    from iris_ray.client.connection import current_user
    from iris_ray.client.remote_options import read_env_file
    from iris_ray.handover.calls import HandoverCalls
    from iris_ray.handover.file import read

    try:
        with file.open() as opened:
            export = read(opened, str(file))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidRequestError(f"the file {file} can't be read: {why}") from None
    found = _startable(export.header, export.lines["job"], read_env_file(env_file) if env_file else {})
    for kind, count in export.unknown.items():
        found.left_out.append(f"{counted(count, 'line')} of the kind {kind!r}: only later versions know it")
    records = [line for kind in _RECORDS for line in export.lines[kind]]
    records += [{key: line.get(key) for key in _TO_SUMS} for line in export.lines["finished"]]
    with cluster():
        if find_controller() is None:
            _start()
        running = ControllerConnection()
        if not jobs_only:
            stays = running.ask(HandoverCalls.restore, json.dumps(records).encode(), current_user())
            found.remarks += [f"the setting {name} stays {was.text}, as set here" for name, was in stays.items()]
        known = {job.job_id for job in running.ask_all(ControllerInterface.list_jobs)}
        _restore_packages(export.lines["package"])
    found.left_out += [f"{line['job_id']}: there is a job of this id" for line in found.jobs if line["job_id"] in known]
    started = _submit([line for line in found.jobs if line["job_id"] not in known], str(file), found.left_out)
    if as_json:
        print_json({"jobs": started, "left_out": found.left_out, "remarks": found.remarks})
        return
    taken = [] if jobs_only else [line for line in records if line["kind"] != "finished"]
    summed = [] if jobs_only else export.lines["finished"]
    click.echo(
        f"taken over: {_counts([*taken, *summed]) or 'no settings'}; {counted(len(started), 'job')} in the queue"
    )
    for remark in found.remarks:
        click.echo(f"  {remark}")
    _say_left_out(found.left_out, "not carried over")


def _start() -> None:
    import asyncio

    from iris_ray.actors.calls.controller_client import get_or_start_controller

    asyncio.run(get_or_start_controller())


def _startable(header: Mapping[str, Any], lines: Iterable[dict[str, Any]], given: Mapping[str, str]) -> Startable:
    from iris_ray.handover.file import fill_in_variables

    found, here = Startable(), platform.python_version()
    written_by = str(header.get("python") or here)
    same_python = written_by.split(".")[:2] == here.split(".")[:2]
    for line in lines:
        job_id = line["job_id"]
        if "run" not in line:
            found.left_out.append(f"{job_id}: {line.get('why_not', 'how to start it again was not known')}")
        elif not same_python:
            found.left_out.append(
                f"{job_id}: its function was pickled by Python {written_by}, and this is {here}: import it with Python"
                f" {'.'.join(written_by.split('.')[:2])}, or submit it again"
            )
        elif missing := fill_in_variables(line, given):
            found.left_out.append(
                f"{job_id}: the values of {', '.join(missing)} were not exported; import again with --jobs-only"
                " --env-file FILE"
            )
        else:
            found.jobs.append(line)
            spec = line["spec"]
            if line.get("succeeded") and (spec.get("coscheduling") is None or spec.get("failure_domain") == EACH_SLICE):
                found.remarks.append(
                    f"{job_id}: {line['succeeded']} of its {line['tasks']} tasks had succeeded; all run again"
                )
    return found


def _restore_packages(lines: Iterable[Mapping[str, Any]]) -> None:
    from iris_ray.actors.calls.ray_internals import store_package

    for line in lines:
        store_package(line["uri"], base64.b64decode(line["zip"]))


def _submit(lines: Iterable[dict[str, Any]], name: str, left_out: list[str]) -> list[str]:
    """Submit jobs in their order, each in a Ray job of its environment. Return the ids of those that are accepted."""
    from iris_ray.client.client import launch
    from iris_ray.client.connection import current_user
    from iris_ray.handover.file import request_in

    started: list[str] = []
    for environment, group in groupby(lines, lambda line: json.dumps(line.get("ray_job") or {}, sort_keys=True)):
        runtime_env = json.loads(environment)
        with cluster(**({"runtime_env": runtime_env} if runtime_env else {})), live_line("iris-ray") as shown:
            for line in group:
                shown.show(f"submitting {line['job_id']}")
                try:
                    launch(request_in(line, name), detached=True)
                except IrisError as error:
                    left_out.append(f"{line['job_id']}: {error}")
                    continue
                started.append(line["job_id"])
                if line.get("yields"):
                    yielding = {line["job_id"]: True}
                    try:
                        ControllerConnection().ask(ControllerInterface.set_yielding, yielding, current_user())
                    except IrisError as error:
                        left_out.append(f"that {line['job_id']} yields: {error}")
    return started


def _counts(lines: Iterable[Mapping[str, Any]]) -> str:
    counts = Counter(line["kind"] for line in lines)
    return ", ".join(counted(counts[kind], name) for kind, name in _NAMES.items() if counts[kind])


def _say_left_out(left_out: Iterable[str], how: str) -> None:
    for one in left_out:
        click.echo(f"{how}: {one}", err=True)
