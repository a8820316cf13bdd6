"""``iris-ray cluster controller export`` and ``import``: a Controller's queue, settings and past use as a file."""

import base64
import contextlib
import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

import iris_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.cli.address import cluster, node_address_option
from iris_ray.cli.controller import start_one
from iris_ray.cli.conventions import private_file, require_place
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import counted, one_line, print_json
from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.model.job_group import GroupSpec
from iris_ray.terminal import live_line

if TYPE_CHECKING:
    from iris_ray.actors.protocol.messages import RunRequest
    from iris_ray.handover.file import Line

POOLS_ANSWER_S, POOL_ANSWER_AT_LEAST_S = 30.0, 1.0
"""The time for all pools, which are asked at once, so that hanging ones don't add up; and the time for each."""
_TO_SUMS = ("kind", "user", "team", "ended_at", "seconds", "chip_seconds")
"""The fields of an ended job that the new Controller needs."""
_NO_RECORDS = ("finished", "package", "job")


class Exported(TypedDict):
    """A file that was written.

    Attributes:
        file: its path.
        lines: how many lines of each kind it has, without the packages of jobs.
        left_out: jobs and settings that can't be exported, each with the reason.
    """

    file: str
    lines: Mapping[str, int]
    left_out: list[str]


class Imported(TypedDict):
    """The result of an import.

    Attributes:
        jobs: the ids of the jobs that the import has put into the queue.
        left_out: jobs and settings that were not imported, each with the reason.
        remarks: further information for the operator.
    """

    jobs: list[str]
    left_out: list[str]
    remarks: list[str]


@click.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--variables", is_flag=True, help="With the values of the jobs' environment variables: they may be secrets."
)
@json_option(Exported)
@node_address_option
def export(file: Path, variables: bool, as_json: bool) -> None:
    """Write the queue, budgets, limits, teams, settings, drains of slices, and past use into a file.

    \b
      iris-ray cluster controller export queue.jsonl
      jq 'select(.kind == "job") | .job_id' queue.jsonl

    Nothing changes in the cluster. FILE must not exist yet. It gets one JSON object on each line; only its owner may
    read it (mode 0600). A detached job (iris-ray submit) can be started again from it: its function and its working
    directory are in the file. The values of its environment variables are not, unless you say --variables; those of its
    secrets never are. The command names jobs that can't be exported, above all those whose caller waits for their
    results, because that caller ends with the cluster.
    """
    from iris_ray.actors.controller.journal import Journal
    from iris_ray.handover.controller import hand_over
    from iris_ray.handover.file import END, leave_out_variables, written

    require_place(file, "FILE")
    if file.exists():
        raise InvalidRequestError(f"{file} exists already; give another name, or remove it")
    with cluster():
        lines, left_out = hand_over(Journal())
        jobs = [line for line in lines if line["kind"] == "job"]
        packages = _add_what_pools_know(jobs)
    if not variables:
        for line in jobs:
            leave_out_variables(line)
    header = {
        "iris_ray": iris_ray.__version__,
        "python": platform.python_version(),
        "at": time.time(),
        "left_out": left_out,
    }
    with private_file(file) as opened:
        opened.writelines(written(header, [*lines, *packages, END]))
    left_out = [*left_out, *(f"{line['job_id']}: {line['why_not']}" for line in jobs if "why_not" in line)]
    if as_json:
        print_json({"file": str(file), "lines": Counter(one["kind"] for one in lines), "left_out": left_out})
        return
    click.echo(f"{click.format_filename(file)}: {_counts([*lines, *packages])}")
    _say_left_out(left_out, "can't be carried over")


def _add_what_pools_know(jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each job how its pool would start it again, or why that is not possible. Return the packages they need.

    A pool is a process of its user: its answer may be anything, and concerns its own job only.
    """
    import ray
    from ray.exceptions import RayError

    from iris_ray.actors.calls.asking import Actor
    from iris_ray.actors.calls.names import NAMESPACE, detached_pool
    from iris_ray.actors.calls.ray_internals import fetch_package
    from iris_ray.handover.calls import HandoverCallsOfPool

    asked = []
    for line in jobs:
        if "/" in line["job_id"]:  # its pool may outlive the attempt of the task, but not the task's job
            line["why_not"] = "a task has submitted it, and submits it again on the new cluster"
            continue
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
            if known is None:
                line["why_not"] = "its pool is about to end"
                continue
            known = json.loads(json.dumps({"run": known["run"], "ray_job": known["ray_job"]}))
            uris = _packages_of(known["ray_job"], known["run"]["runtime_env"])
        except (RayError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = (str(error).strip().splitlines() or [""])[-1]
            line["why_not"] = f"its pool does not say how to start it again ({type(error).__name__}: {why[:200]})"
            continue
        for uri in uris:
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


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--env-file", metavar="FILE", help="Variables of the jobs that the export has left out, NAME=VALUE a line."
)
@click.option("--jobs-only", is_flag=True, help="Only submit the jobs that this cluster does not know yet.")
@json_option(Imported)
@node_address_option
def import_(file: Path, env_file: str | None, jobs_only: bool, as_json: bool) -> None:
    """Import the file of an export into a new cluster.

    \b
      iris-ray cluster controller import queue.jsonl
      iris-ray cluster controller import queue.jsonl --jobs-only --env-file secrets.env

    The Controller must be empty, except with --jobs-only, and is started if none runs. Settings that are set here
    already stay. The jobs enter the queue in their old order, under their old ids, with the rest of their budgets (jobs
    of several gangs, such as independent tasks, with all their retries); jobs that ran begin another attempt, and
    continue from their own checkpoints. The command names jobs that can't be imported; the jobs of a group are imported
    together or not at all. --jobs-only submits the rest, after an interruption or with the missing variables. Only
    operators may do this without --jobs-only.
    """
    from iris_ray.client.connection import current_user
    from iris_ray.client.remote_options import read_env_file
    from iris_ray.handover.calls import HandoverCalls
    from iris_ray.handover.file import read, startable

    try:
        with file.open() as opened:
            export = read(opened, str(file))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidRequestError(f"the file {file} can't be read: {why}") from None
    found = startable(export, read_env_file(env_file) if env_file else {})
    left_out, remarks = found.left_out, found.remarks
    for kind, count in export.unknown.items():
        left_out.append(f"{counted(count, 'line')} of the kind {kind!r}: only later versions know it")
    records = [line for kind, lines in export.lines.items() if kind not in _NO_RECORDS for line in lines]
    sums = [{key: line.get(key) for key in _TO_SUMS} for line in export.lines["finished"]]
    with cluster():
        if find_controller() is None:
            start_one()
        running = ControllerConnection()
        if not jobs_only:
            stays = running.ask(HandoverCalls.restore, json.dumps([*records, *sums]).encode(), current_user())
            remarks += [f"the setting {name} stays {was.text}, as set here" for name, was in stays.items()]
        known = {job.job_id: job for job in running.ask_all(ControllerInterface.list_jobs)}
        _restore_packages(export.lines["package"])
    there = {job_id for job_id, job in known.items() if job.attempt or not job.state.finished or not job.group}
    left_out += [f"{job_id}: there is a job of this id" for job_id in found.jobs if job_id in there]
    started = _submit([one for job_id, one in found.jobs.items() if job_id not in there], left_out)
    if as_json:
        print_json({"jobs": started, "left_out": left_out, "remarks": remarks})
        return
    taken = [] if jobs_only else [*records, *sums]
    click.echo(f"taken over: {_counts(taken) or 'no settings'}; {counted(len(started), 'job')} in the queue")
    for remark in remarks:
        click.echo(f"  {remark}")
    _say_left_out(left_out, "not carried over")


def _restore_packages(lines: Iterable[Mapping[str, Any]]) -> None:
    from iris_ray.actors.calls.ray_internals import store_package

    for line in lines:
        store_package(line["uri"], base64.b64decode(line["zip"]))


def _submit(jobs: "Iterable[tuple[RunRequest, Line]]", left_out: list[str]) -> list[str]:
    """Submit jobs in their order, each in a Ray job of its environment. Return the ids of the accepted ones.

    If a job of a group is refused, the others are withdrawn: the next import can submit them all.
    """
    from ray.exceptions import RayError

    from iris_ray.client.client import launch
    from iris_ray.client.connection import current_user
    from iris_ray.handover.file import without_group

    started: list[str] = []
    refused: dict[str, str] = {}  # by the id of their group

    def refuse(job_id: str, group: GroupSpec | None, why: object) -> None:
        left_out.append(f"{job_id}: {one_line(why)}")
        if group is None:
            return
        refused[group.group_id] = job_id
        withdrawn = [one for one in started if one in group.job_ids.values()]
        for one in withdrawn:
            started.remove(one)
            left_out.append(without_group(one, group, job_id))
        with contextlib.suppress(IrisError):  # they have ended with the one that was refused
            for one in withdrawn[:1]:  # its end ends all
                reason = f"{job_id} of its group was refused"
                ControllerConnection().ask(ControllerInterface.cancel, one, reason, current_user())

    for environment, same in groupby(jobs, lambda job: json.dumps(job[1].get("ray_job") or {}, sort_keys=True)):
        runtime_env, waiting = json.loads(environment), list(same)
        try:
            with cluster(**({"runtime_env": runtime_env} if runtime_env else {})), live_line("iris-ray") as shown:
                while waiting:
                    request, line = waiting.pop(0)
                    job_id, group = request.spec.job_id, request.spec.group
                    if group is not None and group.group_id in refused:
                        left_out.append(without_group(job_id, group, refused[group.group_id]))
                        continue
                    shown.show(f"submitting {job_id}")
                    try:
                        launch(request, detached=True)
                    except (IrisError, RayError, ValueError) as error:  # the last: its pool of before is still there
                        refuse(job_id, group, error)
                        continue
                    started.append(job_id)
                    if line.get("yields"):
                        try:
                            ControllerConnection().ask(ControllerInterface.set_yielding, {job_id: True}, current_user())
                        except IrisError as error:
                            left_out.append(f"that {job_id} yields: {error}")
        except IrisError as error:  # Ray can't make this environment, for example
            for request, _ in waiting:
                refuse(request.spec.job_id, request.spec.group, error)
    return started


def _counts(lines: Iterable[Mapping[str, Any]]) -> str:
    from iris_ray.handover.file import KINDS

    counts = Counter(line["kind"] for line in lines)
    return ", ".join(counted(counts[kind], name) for kind, name in KINDS.items() if counts[kind])


def _say_left_out(left_out: Iterable[str], how: str) -> None:
    for one in left_out:
        click.echo(f"{how}: {one_line(one)}", err=True)
