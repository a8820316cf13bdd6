"""The records of a Controller as lines of a file, and the lines as events of another Controller.

See `iris_ray.handover.file` for the format. Times are wall times in the file.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.services import ControllerPart
from iris_ray.actors.protocol.services import all_settings, installed_services
from iris_ray.actors.protocol.status import JobFacts, job_in
from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.handover.calls import HandoverCalls
from iris_ray.handover.file import Line, spec_line
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.goodput import Totals
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.plain_values import plain
from iris_ray.model.teams import Teams
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    Event,
    LimitsSetEvent,
    PastUsageEvent,
    SettingSetEvent,
    TaintedEvent,
    TeamsSetEvent,
)
from iris_ray.state.job_table import times_of_forgotten

LEAST_RUNTIME_S = 1.0
"""The rest of `max_runtime` for a job whose time was over when it was exported."""
_NODE_ID = re.compile(r"[0-9a-f]{56}")

# -- from records to lines ---------------------------------------------------------------------------------------------


def hand_over(journal: Journal) -> tuple[list[Line], list[str]]:
    """Return the records of the last Controller, which may still run, as lines for a file. Write nothing.

    Returns:
        Lines of all kinds but packages; the functions and variables of jobs are missing, as only their pools have them.
        And the records that can't be carried over, in words.

    Raises:
        UnknownRecordError: another version of iris_ray wrote the records.
    """
    records, settings = journal.look_back()
    lines: list[Line] = []
    left_out: list[str] = []
    for event in settings:
        if isinstance(line := _line_of(event, journal.clock), str):
            left_out.append(line)
        elif line is not None:
            lines.append(line)
    lines += _lines_of_sums(journal)
    teams = Teams(team for event in settings if isinstance(event, TeamsSetEvent) for team in event.teams)
    left = {record.job.spec.job_id for record in records if record.job.over is None}
    for job in (record.job for record in records if record.job.spec.spare_for is None):
        is_over = job.over is not None
        lines.append(finished_line(job, journal.clock) if is_over else job_line(job, journal.clock, teams, left))
    left_out += [f"{aside.name}: {aside.why}" for aside in journal.contained.records.values()]
    return lines, left_out


def _lines_of_sums(journal: Journal) -> list[Line]:
    """Return the lines with the sums of the service ``goodput``, if it is installed and has any."""
    if not _has_goodput() or (recorded := journal.service_records.read("goodput")) is None:
        return []
    from iris_ray.goodput.sums import Sums

    name, values = "the time of earlier jobs and chips", {"service/goodput": recorded}
    return journal.contained.read(name, values, lambda: Sums.read(recorded).lines()) or []


def _has_goodput() -> bool:
    return any(service.name == "goodput" for service in installed_services())


def _line_of(event: Event, clock: Clock) -> Line | str | None:
    """Return the line of an event; a sentence if it can't be carried over; None if there is nothing to carry over."""
    match event:
        case SettingSetEvent(name, WasSet(text, user, at)):
            return {"kind": "setting", "name": name, "text": text, "user": user, "at": at}
        case LimitsSetEvent(user, band, limits):
            return {"kind": "limits", "user": user, "band": band.name, "limits": dict(limits.items())}
        case TeamsSetEvent(teams) if teams:
            return {"kind": "teams", "teams": Teams(teams).to_tables()}
        case TaintedEvent(target, taint, reason, until):
            if until is not None or _NODE_ID.fullmatch(target):
                return f"the taint {taint} on {target} ({reason}): it is about a machine of this cluster"
            return {"kind": "taint", "target": target, "taint": taint, "reason": reason}
        case PastUsageEvent(hours, at, of_teams):
            past = {"hours": {user: dict(of) for user, of in hours.items()}}
            past |= {"of_teams": {team: dict(of) for team, of in of_teams.items()}} if of_teams else {}
            return {"kind": "usage", "at": clock.wall(at), **past}
    return None


def job_line(job: Job, clock: Clock, teams: Teams, left: Collection[str]) -> Line:
    """Return the line of a job that has not ended, with what is left of its budgets, and a team that exists.

    ``left``: ids of the jobs that have not ended; the group of the job consists of those.
    """
    return {
        "kind": "job",
        "job_id": job.spec.job_id,
        "state": job.state.value,
        "submitted_at": clock.wall(job.submitted_at),
        "attempts": job.attempt,
        "tasks": job.size,
        "succeeded": job.counts[TaskState.SUCCEEDED],
        "yields": job.yields,
        "spec": spec_line(
            replace(
                with_remaining_budgets(job, clock.now()),
                team=teams.nearest(job.spec.team),
                group=job.spec.group and job.spec.group.without_others(left),
            )
        ),
    }


def with_remaining_budgets(job: Job, now: float) -> JobSpec:
    """Return a job's spec with the rest of its retry budgets and time, and the predecessors that it still awaits.

    The gangs of a job with several begin anew.
    """
    spec = replace(job.spec, after=job.awaits)
    if (end := job.ends_at) < math.inf:
        spec = replace(spec, max_runtime=max(LEAST_RUNTIME_S, end - now))
    if spec.is_one_gang:
        spec = replace(
            spec,
            max_retries_failure=max(0, spec.max_retries_failure - job.gang.failures),
            max_retries_preemption=max(0, spec.max_retries_preemption - job.gang.preemptions),
        )
    if spec.max_task_failures is not None:
        spec = replace(spec, max_task_failures=max(0, spec.max_task_failures - job.failures))
    return spec


def finished_line(job: Job, clock: Clock) -> Line:
    """Return the line of a job that has ended: for people, and for the sums."""
    totals = next((one.totals for one in times_of_forgotten(job)), Totals())
    return {
        "kind": "finished",
        **job_in("export", JobFacts(job, ControllerState(), clock.wall)),
        "name": job.spec.name,
        "team": job.spec.team,
        "state": job.state.value,
        "ended_at": clock.wall_or_none(job.times.ended_at),
        "seconds": dict(totals.seconds),
        "chip_seconds": dict(totals.chip_seconds),
    }


# -- from lines to events ----------------------------------------------------------------------------------------------


class HandoverInController(ControllerPart):
    """See `HandoverCalls`."""

    calls = (HandoverCalls,)

    async def restore(self, lines: bytes, user: str) -> dict[str, WasSet]:
        state, clock = self.controller.state, self.controller.clock
        self.controller.permissions.require_operator(user, "import the export of another Controller")
        if there := ", ".join(_what_is_there(state)):
            raise InvalidRequestError(
                f"this Controller is not empty: it has {there}; import into a new cluster, or with --jobs-only"
            )
        stays = dict(state.settings.was_set)
        events = taken_over(lines, clock, time.time(), tuple(stays))
        if _has_goodput():
            from iris_ray.goodput.calls import GoodputCalls

            await self.controller.ask(GoodputCalls.take_over, lines, user)
        recorded = self.controller.apply(events)
        self.controller.settings_changed()
        await asyncio.shield(recorded)
        return stays


def taken_over(lines: bytes, clock: Clock, now: float, keep: Sequence[str] = ()) -> list[Event]:
    """Convert lines of a file to events: settings, limits, teams, taints and usage.

    Args:
        lines: a JSON list of the lines of `hand_over`, without jobs.
        clock: the Controller's.
        now: the wall time.
        keep: names of settings that are set here already, and stay.

    Raises:
        InvalidRequestError: a line makes no sense; the message has it.
    """
    try:
        found = json.loads(lines)
    except (ValueError, RecursionError):
        raise InvalidRequestError("the lines are not JSON") from None
    taken: list[Event] = []
    for line in found if isinstance(found, list) else [found]:
        try:
            taken += [plain(type(event), event, "it") for event in _events_of(line, clock, now, keep)]
        except (IrisError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = str(error) if isinstance(error, IrisError) else f"{type(error).__name__}: {error}"
            raise InvalidRequestError(f"the line {json.dumps(line)[:200]} can't be read: {why}") from None
    return taken


def _events_of(line: Line, clock: Clock, now: float, keep: Sequence[str]) -> Iterator[Event]:
    match line["kind"]:
        case "setting":
            name = str(line["name"])
            if name in all_settings() and name not in keep:
                was_set = WasSet(all_settings()[name].checked(line["text"]), str(line["user"]), float(line["at"]))
                yield SettingSetEvent(name, was_set)
        case "limits":
            yield LimitsSetEvent(str(line["user"]), PriorityBand[line["band"]], Limits(**line["limits"]))
        case "teams":
            yield TeamsSetEvent(tuple(Teams.from_tables(line["teams"])))
        case "taint":
            yield TaintedEvent(str(line["target"]), str(line["taint"]), str(line["reason"]))
        case "usage":
            hours = {str(user): _amounts(of) for user, of in line["hours"].items()}
            of_teams = {str(team): _amounts(of) for team, of in line.get("of_teams", {}).items()}
            age = max(0.0, now - float(line["at"]))
            yield PastUsageEvent(hours, clock.now() - age, of_teams)


def _amounts(line: Any) -> dict[str, float]:
    return {str(name): float(amount) for name, amount in line.items()}


def _what_is_there(state: ControllerState) -> Iterator[str]:
    """Yield the data of this Controller that an import would mix with, in words."""
    if state.jobs:
        yield f"{len(state.jobs)} jobs"
    if state.limits.table:
        yield f"the limits of {len(state.limits.table)} users and bands"
    if state.teams.teams:
        yield f"{len(state.teams.teams)} teams"
