"""Reads a study from its description in TOML. ``docs/studies.md`` lists all names."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from iris_ray.errors import InvalidRequestError, InvalidStudyError, InvalidTeamsError, NotPermittedError
from iris_ray.model.checks import AUTO, Check, Number, Whole, is_number, nearest
from iris_ray.model.multislice import parse_num_slices
from iris_ray.model.options import PriorityBand
from iris_ray.model.parts import require_shape
from iris_ray.model.teams import Teams
from iris_ray.model.topology import get_tpu_config
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.study.agenda import Timings
from iris_ray.study.hosts import CPUS
from iris_ray.study.jobs import JobStream, RunTimes
from iris_ray.study.simulation import LOOK_AGAIN_S
from iris_ray.study.study import Backlog, HostKind, SliceKind, Study, StudyPolicy, reservations
from iris_ray.study.traces import CSV_COLUMNS, FORMATS, Column, Trace, TraceRules, as_trace, read_trace

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


class Section:
    """Reads one table of a description value by value. Each error names the place of the value and a correct one.

    Args:
        table: its values.
        place: its name in messages, such as ``[[slices]] number 1``; empty for the whole description.
        known: all names that it may have.
    """

    def __init__(self, table: object, place: str, known: tuple[str, ...]) -> None:
        self._place = place
        if not isinstance(table, Mapping):
            raise InvalidStudyError(f"{place} is {table!r}; write a table, with name = value on each line")
        self._table: Mapping[str, Any] = table
        for name in table:
            if name not in known:
                near = nearest(str(name), known, most=1, cutoff=0.6)
                hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(known)}"
                raise InvalidStudyError(f"{self.at(name)}: there is no such name here; {hint}")

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def has_table(self, name: str) -> bool:
        """Return whether a value is a table."""
        return isinstance(self._table.get(name), Mapping)

    def at(self, name: str) -> str:
        """Return the place of a value, for messages."""
        return f"{self._place}: {name}" if self._place else name

    def refuse(self, name: str, expected: str) -> InvalidStudyError:
        """Return the error for a value that makes no sense."""
        value = self._table.get(name)
        if value is None:
            return InvalidStudyError(f"{self.at(name)} is missing; give {expected}")
        return InvalidStudyError(f"{self.at(name)} is {value!r}; give {expected}")

    def _checked(self, name: str, check: Check) -> Any:
        value = self._table.get(name)
        if check.problem(value) is not None:
            raise self.refuse(name, check.wanted)
        return value

    def number(
        self, name: str, default: float | None = None, least: float = 0, unit: float = 1.0, above: bool = False
    ) -> float:
        """Return a number of at least ``least``, or above it, times ``unit``; the ``default`` is not multiplied."""
        if name not in self._table and default is not None:
            return default
        check = Number(least, above)
        value: float = self._checked(name, check)
        if value > sys.float_info.max / unit:
            raise self.refuse(name, check.wanted)
        return float(value) * unit

    def positive(self, name: str, default: float | None = None, unit: float = 1.0) -> float:
        """Return a number above 0; as for `number`."""
        return self.number(name, default, unit=unit, above=True)

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return an int; as for `number`."""
        found: int = default if name not in self._table and default is not None else self._checked(name, Whole(least))
        return found

    def text(self, name: str, default: str | None = None) -> str:
        """Return a str that is not empty."""
        value = self._table.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.refuse(name, "a text in quotes")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self._table.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return one of some texts."""
        value = self._table.get(name, default)
        if value not in choices:
            raise self.refuse(name, f"one of {', '.join(choices)}")
        return str(value)

    def weighted(self, name: str, default: Any, read: Callable[[Any], Any], expected: str) -> tuple[Any, ...]:
        """Return items with their weights, from a list of items, a table of weights by item, or one item.

        Args:
            name: the value's name.
            default: the item if there is no such value.
            read: parses an item; raises ValueError.
            expected: correct values, in words, for messages.
        """
        value = self._table.get(name, default)
        pairs = value.items() if isinstance(value, Mapping) else [(item, 1) for item in _listed(value)]
        try:
            found = tuple((read(item), float(weight)) for item, weight in pairs if is_number(weight) and weight >= 0)
        except (TypeError, ValueError):
            raise self.refuse(name, expected) from None
        if len(found) < len(list(pairs)) or not 0 < sum(weight for _, weight in found) < math.inf:
            raise self.refuse(name, expected)
        return found

    def tables(self, name: str, known: tuple[str, ...]) -> list["Section"]:
        """Return the tables of an array, such as all ``[[slices]]``."""
        value = self._table.get(name, [])
        if not isinstance(value, list):
            raise self.refuse(name, f"tables that begin with [[{name}]]")
        return [Section(table, f"[[{name}]] number {number}", known) for number, table in enumerate(value, 1)]

    def table(self, name: str, known: tuple[str, ...]) -> "Section":
        """Return a table in this table; an empty one if there is none."""
        return Section(self._table.get(name, {}), self.at(name), known)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


# -- description -------------------------------------------------------------------------------------------------------

ReadLines = Callable[[str], Iterable[str]]

_STUDY = (
    "days", "seed", "plan_every_s", "look_again_s", "timings", "slices", "hosts", "jobs", "traces", "teams", "policies",
)  # fmt: skip
_SLICES = (
    "type", "count", "cpus", "preempted_every_h", "notice_s", "away_h", "host_dies_every_d", "repair_h",
)  # fmt: skip
_HOSTS = ("count", "cpus", "dies_every_d", "repair_h")
_JOBS = (
    "name", "users", "band", "per_day", "waiting", "type", "topology", "num_slices", "replicas", "cpus", "run_h",
    "run_h_p90", "save_every_min", "heed_notices", "team",
)  # fmt: skip
_TRACES = (
    "file", "format", "columns", "from_day", "name", "type", "parts", "band", "save_every_min", "heed_notices", "team",
)  # fmt: skip
_POLICIES = ("name", "spares", "heed_notices", "backfill_bound_s", "evictions", "grow_after_s", "quotas", "parts",
    "take_back",
)  # fmt: skip
_BANDS = tuple(band.name.lower() for band in PriorityBand)


def read_study(description: Mapping[str, Any], read_lines: ReadLines) -> Study:
    """Return the study of a description.

    Args:
        description: the contents of the TOML file.
        read_lines: returns the lines of a trace file, by its name in the description.

    Raises:
        InvalidStudyError: a value is missing or makes no sense; the message has its place.
    """
    whole = Section(description, "", _STUDY)
    slices = tuple(map(_slices, whole.tables("slices", _SLICES)))
    hosts = tuple(map(_hosts, whole.tables("hosts", _HOSTS)))
    if not slices and not hosts:
        raise InvalidStudyError("there are no hosts; add [[slices]] or [[hosts]]")
    teams, jobs = _teams(description), whole.tables("jobs", _JOBS)
    streams = [(one, _stream(one, number, teams)) for number, one in enumerate(jobs)]
    traces = whole.tables("traces", _TRACES)
    policies = tuple(_policy(one, slices) for one in whole.tables("policies", _POLICIES))
    begins = [stream.name for _, stream in streams] + [_trace_name(one, number) for number, one in enumerate(traces)]
    _require_own_names(begins, "[[jobs]] and [[traces]]")
    _require_own_names([policy.name for policy in policies], "[[policies]]")
    return Study(
        seconds=whole.positive("days", unit=DAY),
        seed=whole.integer("seed", 0),
        slices=slices,
        hosts=hosts,
        streams=tuple(stream for one, stream in streams if "waiting" not in one),
        backlogs=tuple(backlog for one, stream in streams if "waiting" in one for backlog in _backlogs(one, stream)),
        traces=tuple(_trace(one, number, slices, hosts, teams, read_lines) for number, one in enumerate(traces)),
        teams=teams,
        policies=policies or (StudyPolicy(name="default"),),
        timings=_timings(whole),
        plan_every_s=whole.number("plan_every_s", 0.0),
        look_again_s=whole.positive("look_again_s", LOOK_AGAIN_S),
    )


def _slices(one: Section) -> SliceKind:
    return SliceKind(
        tpu_type=_tpu_type(one),
        count=one.integer("count", least=1),
        cpus=one.positive("cpus", CPUS),
        preempted_every_s=one.positive("preempted_every_h", math.inf, HOUR),
        notice_s=one.number("notice_s") if "notice_s" in one else None,
        away_s=one.number("away_h", HOUR, unit=HOUR),
        host_dies_every_s=one.positive("host_dies_every_d", math.inf, DAY),
        repair_s=one.number("repair_h", HOUR, unit=HOUR),
    )


def _hosts(one: Section) -> HostKind:
    return HostKind(
        count=one.integer("count", least=1),
        cpus=one.positive("cpus"),
        dies_every_s=one.positive("dies_every_d", math.inf, DAY),
        repair_s=one.number("repair_h", HOUR, unit=HOUR),
    )


def _teams(description: Mapping[str, Any]) -> Teams:
    try:
        return Teams.from_tables(description.get("teams", {}))
    except InvalidTeamsError as error:
        raise InvalidStudyError(str(error)) from None


def _team(one: Section, users: Iterable[str], teams: Teams) -> str | None:
    """Return the team that jobs name, once it is clear that each of these users may submit them."""
    team = one.text("team") if "team" in one else None
    try:
        for user in users:
            teams.team_for(user, team)
    except (InvalidRequestError, InvalidTeamsError, NotPermittedError) as error:
        raise InvalidStudyError(f"{one.at('team')}: {error}") from None
    return team


def _stream(one: Section, number: int, teams: Teams) -> JobStream:
    if ("per_day" in one) == ("waiting" in one):
        raise InvalidStudyError(
            f"{one.at('per_day')}: give how many come in a day, or waiting = how many of each user always wait"
        )
    median_s, users = one.positive("run_h", unit=HOUR), _users(one)
    counts = one.weighted("num_slices", 1, _slice_counts, 'slice counts such as [1, 2], or {"1" = 7, "2" = 3}')
    if "topology" in one and any(each != (1,) for each, _ in counts):
        raise one.refuse("num_slices", "1, since a job with a topology runs on one part")
    return JobStream(
        name=one.text("name", f"job{number + 1}"),
        per_day=one.positive("per_day", 1.0),
        run=RunTimes(median_s, max(median_s, one.positive("run_h_p90", median_s, HOUR))),
        users=users,
        band=_band(one),
        tpu_type=_tpu_type(one) if "type" in one else None,
        topology=_topology(one) if "topology" in one else None,
        num_slices=counts,
        replicas=one.integer("replicas", 1, least=1),
        cpus=one.positive("cpus", 1.0),
        save_every_s=one.positive("save_every_min", math.inf, MINUTE),
        heeds_notices=one.flag("heed_notices", True),
        teams=teams,
        team=_team(one, (user for user, _ in users), teams),
    )


def _users(one: Section) -> tuple[tuple[str, float], ...]:
    """Return users with their weights, from their number, their names, or a table of weights by name."""
    value = one.weighted("users", "user", lambda user: user, "a number of users, their names, or weights by name")
    (first, _), *more = value
    if isinstance(first, int) and not more:
        return tuple((f"user-{number}", 1.0) for number in range(one.integer("users", least=1)))
    if not all(isinstance(user, str) and user for user, _ in value):
        raise one.refuse("users", "a number of users, their names, or weights by name")
    return value


def _backlogs(one: Section, stream: JobStream) -> list[Backlog]:
    waiting = one.integer("waiting", least=1)
    return [
        Backlog(stream=replace(stream, users=((user, 1.0),)), user=user, waiting=waiting) for user, _ in stream.users
    ]


def _trace(
    one: Section,
    number: int,
    slices: Iterable[SliceKind],
    hosts: Iterable[HostKind],
    teams: Teams,
    read_lines: ReadLines,
) -> Trace:
    source, tpu_type, form = one.text("file"), _tpu_type(one), one.choice("format", FORMATS)
    rules = TraceRules(
        name=_trace_name(one, number),
        tpu_type=tpu_type,
        parts=one.flag("parts", False),
        band=_band(one),
        save_every_s=one.positive("save_every_min", math.inf, MINUTE),
        heeds_notices=one.flag("heed_notices", True),
        from_s=one.number("from_day", 0.0, unit=DAY),
        max_slices=sum(kind.count for kind in slices if kind.tpu_type == tpu_type),
        max_cpus=max((kind.cpus for kind in hosts), default=0.0),
        teams=teams,
        team=_team(one, (), teams),
    )
    return as_trace(read_trace(read_lines(source), form, source, _columns(one, form)), rules, source)


def _columns(one: Section, form: str) -> dict[str, Column]:
    """Return the columns that a description names, such as ``{ user = "owner" }`` or with a unit."""
    if "columns" not in one:
        return {}
    if form != "csv":
        raise InvalidStudyError(f'{one.at("columns")}: only format = "csv" has columns that can be named')
    named = one.table("columns", tuple(CSV_COLUMNS))
    found = {}
    for what in (what for what in CSV_COLUMNS if what in named):
        if named.has_table(what):
            column = named.table(what, ("column", "unit"))
            found[what] = Column((column.text("column").lower(),), column.positive("unit", 1.0))
        else:
            found[what] = Column((named.text(what).lower(),))
    return found


def _trace_name(one: Section, number: int) -> str:
    return one.text("name", f"trace{number + 1}")


def _require_own_names(names: Iterable[str], of: str) -> None:
    """Refuse equal names: the ids of their jobs, or the names of their results, would be equal."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidStudyError(f"{count} of {of} have the name {name!r}; give each a name of its own")


def _policy(one: Section, slices: Sequence[SliceKind]) -> StudyPolicy:
    return StudyPolicy(
        name=one.text("name"),
        spares=one.integer("spares", 0),
        heed_notices=one.flag("heed_notices", True),
        backfill_bound_s=one.number("backfill_bound_s", BACKFILL_BOUND_S),
        evictions=one.flag("evictions", True),
        quotas=one.flag("quotas", True),
        parts=one.flag("parts", True),
        take_back=_take_back(one, slices) if "take_back" in one else None,
        grow_after=one.number("grow_after_s") if "grow_after_s" in one else AUTO,
    )


def _take_back(one: Section, slices: Sequence[SliceKind]) -> str:
    """Return how far chips are taken back, once it is clear that the slices can be those of a reservation."""
    chosen = one.choice("take_back", reservations().reaches())
    if not slices:
        raise InvalidStudyError(f"{one.at('take_back')}: the chips of all [[slices]] are shared, and there are none")
    for number, kind in enumerate(slices, 1):
        if min(kind.preempted_every_s, kind.host_dies_every_s) < math.inf:
            raise InvalidStudyError(
                f"{one.at('take_back')}: slices of a reservation are not lost in a study; take preempted_every_h and"
                f" host_dies_every_d out of [[slices]] number {number}"
            )
        if any(other.tpu_type == kind.tpu_type for other in slices[: number - 1]):
            raise InvalidStudyError(
                f"{one.at('take_back')}: {kind.tpu_type} is the type of two [[slices]]; put these together"
            )
    if len({get_tpu_config(kind.tpu_type).generation for kind in slices}) > 1:
        raise InvalidStudyError(f"{one.at('take_back')}: [[slices]] of one reservation are of one generation of TPUs")
    return chosen


def _timings(whole: Section) -> Timings:
    names = tuple(field.name for field in fields(Timings))
    table, usual = whole.table("timings", tuple(f"{name}_s" for name in names)), Timings()
    return Timings(**{name: table.number(f"{name}_s", getattr(usual, name)) for name in names})


def _tpu_type(one: Section) -> str:
    name = one.text("type")
    try:
        return get_tpu_config(name).name
    except InvalidRequestError as error:
        raise InvalidStudyError(f"{one.at('type')}: {error}") from None


def _topology(one: Section) -> str:
    try:
        return require_shape(get_tpu_config(_tpu_type(one)), one.text("topology"))
    except InvalidRequestError as error:
        raise InvalidStudyError(f"{one.at('topology')}: {error}") from None


def _band(one: Section) -> PriorityBand:
    return PriorityBand[one.choice("band", _BANDS, PriorityBand.INTERACTIVE.name.lower()).upper()]


def _slice_counts(written: object) -> tuple[int, ...]:
    """Return the slice counts that a job can use, from 2, "2", [2, 4] or "2,4"."""
    if isinstance(written, str):
        written = [int(part) for part in written.split(",")]
    try:
        return parse_num_slices(written)  # type: ignore[arg-type]  # it checks
    except InvalidRequestError as error:
        raise ValueError(str(error)) from None
