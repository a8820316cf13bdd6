"""Export and import: a Controller's queue, settings and sums go into a file, and from there to a new Controller."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from iris_ray.actors.controller import controller_process, write_ahead_log
from iris_ray.actors.controller import journal as journal_module
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.actors.protocol.services import installed_services
from iris_ray.cli.conventions import private_file
from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.goodput import controller as goodput_module
from iris_ray.goodput.calls import GoodputCalls, UserDay
from iris_ray.goodput.sums import ChipState, Sums
from iris_ray.handover.calls import HandoverCalls
from iris_ray.handover.controller import hand_over
from iris_ray.handover.file import END, Line, read, written
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Teams
from iris_ray.state.events import (
    Event,
    JobSubmittedEvent,
    LimitsSetEvent,
    PastUsageEvent,
    SettingSetEvent,
    TaintedEvent,
    TeamsSetEvent,
)
from tests.proofs.every_operation.operations import Operations, StoreIsAwayError
from tests.proofs.every_operation.runs import Said, Scenario
from tests.proofs.every_operation.scenarios.records import StoreInFile
from tests.support.meters import RecordedMeter
from tests.support.worlds import gang_spec

T = TypeVar("T")
WHOLE: dict[str, Any] = {
    "setting": {"evictions": "off", "operators": "ann,olga"},
    "limits": {"bob": 8},
    "teams": ["ads"],
    "taint": {"v4-16-1": ["drained"]},
    "usage": {"ann": 50},
    "user_day": {"ann": (3, 60.0)},
    "fleet_day": {"busy": 57600.0},
}
"""What is carried over, by the kind of its lines."""
HEADS: dict[str, Collection[str]] = {"new": WHOLE, "small": ("setting", "usage", "fleet_day")}
"""The new Controllers, with what they take over. The second one counts as empty even then."""


class HasAllButJobsError(IrisError):
    """An import is refused, and the message says how to go on."""


def exports() -> Scenario:
    return Scenario(
        "exports",
        _prepare,
        _act,
        _judge,
        (OSError, IrisError, StoreIsAwayError),
        {"file is written in place": _in_place, "sums don't know what they include": _forget_it},
    )


def _use(store: StoreInFile) -> None:
    setattr(journal_module, "ClusterStore", lambda: store)  # noqa: B010
    write_ahead_log.WRITE_AGAIN_S = 0.0
    write_ahead_log.MOST_ENTRIES = 1000
    services = tuple(one for one in installed_services() if one.name in ("handover", "goodput"))
    setattr(controller_process, "installed_services", lambda: services)  # noqa: B010
    setattr(goodput_module, "ray_meter", RecordedMeter)  # noqa: B010


def _with_controller(store: StoreInFile, work: Callable[[Controller], Awaitable[T]]) -> T:
    """Return what a function returns of a Controller that goes on from what is in a store."""
    _use(store)

    async def run() -> T:
        controller = Controller(lambda: NodeTable((), {}, {}), lambda: None, lambda: None)
        await controller.ping()
        return await work(controller)

    return asyncio.run(run())


def _events(now: float) -> list[Event]:
    group = GroupSpec("rl-1", "rl", (("trainer", "a"), ("sampler", "b")), ("trainer",))
    return [
        SettingSetEvent("evictions", WasSet("off", "olga", 1.0)),
        SettingSetEvent("operators", WasSet("ann,olga", "olga", 2.0)),
        LimitsSetEvent("bob", PriorityBand.BATCH, Limits(chips=8)),
        TeamsSetEvent(tuple(Teams.from_tables({"ads": {"users": ["ann"], "weight": 2.0}}))),
        TaintedEvent("v4-16-1", "drained", "old"),
        PastUsageEvent({"ann": {"TPU": 50.0}}, now),
        *(JobSubmittedEvent(gang_spec(job_id, user="ann", group=group), 1.0) for job_id in "ab"),
        JobSubmittedEvent(gang_spec("alone", user="bob"), 2.0),
    ]


def _prepare(place: Path) -> None:
    async def old(controller: Controller) -> None:
        sums = Sums()
        sums.users.include(UserDay(20_000, "ann", 3, {"productive": 60.0}, {"productive": 960.0}, "ads"))
        sums.fleet.add("2026-11-20", {ChipState.BUSY: 16.0}, 3600.0)
        controller._journal.service_records.write("goodput", sums.to_json())
        await controller._events.recorded(_events(controller._clock.now()))

    for name in ("old", *HEADS):
        (place / name).mkdir()
    _with_controller(StoreInFile(place / "old"), old)


def _export(store: StoreInFile, file: Path) -> None:
    _use(store)
    lines, left_out = hand_over(Journal())
    assert not left_out, left_out
    with private_file(file) as opened:
        opened.writelines(written({"at": 0.0}, [*lines, END]))


def _lines(file: Path) -> dict[str, list[Line]]:
    with open(file) as opened:
        return read(opened, str(file)).lines


def _import(store: StoreInFile, lines: dict[str, list[Line]]) -> None:
    """Take over what is in the file, as the command does."""
    taken = [line for kind, some in lines.items() if kind not in ("job", "package") for line in some]

    async def restore(controller: Controller) -> None:
        question = json.dumps(taken).encode(), "olga"
        try:
            await controller.serve("handover", HandoverCalls.restore.__name__, question, {})
        except InvalidRequestError as error:
            if "--jobs-only" in str(error):
                raise HasAllButJobsError from error
            raise

    _with_controller(store, restore)


def _act(place: Path, said: Said, operations: Operations) -> None:
    file = place / "queue.jsonl"
    _export(StoreInFile(place / "old", operations), file)
    said("exported")
    for head, kinds in HEADS.items():
        _import(StoreInFile(place / head, operations), _only(kinds, _lines(file)))
        said(head)


def _only(kinds: Collection[str], lines: dict[str, list[Line]]) -> dict[str, list[Line]]:
    return {kind: some for kind, some in lines.items() if kind in kinds}


def _found(place: Path) -> dict[str, Any]:
    """Return what a new Controller has, by the kind of the lines that it is from."""

    async def look(controller: Controller) -> dict[str, Any]:
        state = controller._state
        days = await controller.serve("goodput", GoodputCalls.user_times.__name__, (0.0,), {})
        fleet = await controller.serve("goodput", GoodputCalls.fleet_times.__name__, ("",), {})
        return {
            "setting": {name: was.text for name, was in state.settings.was_set.items()},
            "limits": {user: limits.chips for (user, _), limits in state.limits.table.items()},
            "teams": [team.name for team in state.teams.teams],
            "taint": {target: sorted(taints) for target, taints in state.fleet.taints.items()},
            "usage": {user: round(hours["TPU"]) for user, hours in state.past_usage.snapshot().items()},
            "user_day": {day.user: (day.jobs, day.seconds["productive"]) for day in days},
            "fleet_day": fleet.get("2026-11-20", {}),
        }

    return _with_controller(StoreInFile(place), look)


def _require_whole(place: Path, head: str) -> None:
    found = _found(place / head)
    expected = {kind: of if kind in HEADS[head] else type(of)() for kind, of in WHOLE.items()}
    assert found == expected, found


def _judge(place: Path, said: list[list[Any]]) -> None:
    file = place / "queue.jsonl"
    if ["exported"] not in said and not file.exists():
        _export(StoreInFile(place / "old"), file)
    lines = _lines(file)
    assert {line["job_id"] for line in lines["job"]} == {"a", "b", "alone"}
    for head, kinds in HEADS.items():
        if [head] in said:
            _require_whole(place, head)
        with contextlib.suppress(HasAllButJobsError):
            _import(StoreInFile(place / head), _only(kinds, lines))
        _require_whole(place, head)


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _in_place() -> None:
    setattr(sys.modules[__name__], "private_file", lambda path: path.open("w"))  # noqa: B010


def _forget_it() -> None:
    Sums.to_json = lambda sums: json.dumps(sums.lines()).encode()  # type: ignore[method-assign, assignment]
