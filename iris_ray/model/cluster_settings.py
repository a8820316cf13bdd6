"""The cluster settings that operators make for all users: a table of their definitions, and one cluster's values.

A setting is written as text, ``NAME=VALUE``, which the Controller checks and records. The checks, the command
``iris-ray cluster settings`` and docs/operating.md are derived from `TABLE`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import Seconds, unknown

EVERYBODY, OFF, ON = "everybody", "off", "on"
LOCATION = re.compile(r"projects/[a-z0-9.:-]+/locations/[a-z0-9-]+")
"""A zone of the Cloud TPU API."""
_DEMAND = {"auto": None, "always": True, "never": False}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ClusterSetting(Generic[Value]):
    """One setting of a cluster.

    Attributes:
        name: its name on the command line.
        default: the text of its value if no operator has set it.
        form: the format of a value, with its unit.
        help: its effect, in a sentence.
        parse: converts a text to a value; raises a ValueError whose message says which values are valid.
    """

    name: str
    default: str
    form: str
    help: str
    parse: Callable[[str], Value]

    def checked(self, text: str) -> str:
        """Return a valid text without surrounding white space.

        Raises:
            InvalidRequestError: the text isn't valid for this setting; the message says which values are.
        """
        try:
            self.parse(text.strip())
        except ValueError as error:
            raise InvalidRequestError(f"{self.name} is {text!r}; {error}") from None
        return text.strip()


def _users(text: str) -> frozenset[str] | None:
    names = frozenset(filter(None, map(str.strip, text.split(","))))
    if not names:
        raise ValueError(f"name at least one user, as in olga,otto; or give {EVERYBODY}")
    return None if names == {EVERYBODY} else names


def _switch(text: str) -> bool:
    if text not in (ON, OFF):
        raise ValueError(f"give {ON} or {OFF}")
    return text == ON


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if Seconds().problem(seconds):
        raise ValueError("give a number of seconds, 0 or more")
    return seconds


def _count(text: str) -> int | None:
    if text == OFF:
        return None
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise ValueError(f"give a whole number, 1 or more, or {OFF}")
    return int(text)


def _place(text: str) -> str:
    if text not in (ON, OFF) and not text.startswith("/"):
        raise ValueError(f"give {ON}, {OFF}, or a directory on the head that begins with /")
    return text


def _copies(text: str) -> str:
    if text != OFF and not text.startswith("/") and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+(/\S*)?", text) is None:
        raise ValueError(
            f"give {OFF}, a directory on the head that begins with /, or a URL such as gs://bucket/history"
        )
    return text.rstrip("/") or "/"


def _positive(text: str) -> int:
    found = _count(text)
    if found is None:
        raise ValueError("give a whole number, 1 or more")
    return found


def _locations(text: str) -> tuple[str, ...]:
    if text == OFF:
        return ()
    places = tuple(place.strip() for place in text.split(","))
    if not all(map(LOCATION.fullmatch, places)):
        raise ValueError(f"give projects/PROJECT/locations/ZONE, or several with commas, or {OFF}")
    return places


def _demand(text: str) -> bool | None:
    if text not in _DEMAND:
        raise ValueError(f"give one of {', '.join(_DEMAND)}")
    return _DEMAND[text]


OPERATORS = ClusterSetting(
    "operators",
    EVERYBODY,
    "users, by commas",
    "Who may cancel jobs of others, drain, taint, and set limits, teams and these settings.",
    _users,
)
EVICTIONS = ClusterSetting(
    "evictions", ON, f"{ON} or {OFF}", "Whether jobs take hosts from jobs of lower bands.", _switch
)
EVICTION_GRACE_S = ClusterSetting(
    "eviction_grace_s", "30", "seconds", "How long a gang has from the notice of an eviction to its end.", _seconds
)
EVICTIONS_PER_JOB = ClusterSetting(
    "evictions_per_job",
    "6",
    f"a number, or {OFF}",
    "How often in an hour a job, or each gang of a job with several, may be evicted.",
    _count,
)
EVICTIONS_PER_USER = ClusterSetting(
    "evictions_per_user",
    "200",
    f"a number, or {OFF}",
    "How often in an hour gangs of one user may be evicted; one job may take more at once if none was.",
    _count,
)
EVICTIONS_PER_TEAM = ClusterSetting(
    "evictions_per_team",
    OFF,
    f"a number, or {OFF}",
    "The same for gangs of one team and its parts. What such a team borrows is taken back later, then.",
    _count,
)
CLOUD_TPU = ClusterSetting(
    "cloud_tpu",
    OFF,
    "projects/PROJECT/locations/ZONE, …",
    "In which zones of Google's Cloud TPU API the Controller asks what became of lost slices.",
    _locations,
)
AUTOSCALER_DEMAND = ClusterSetting(
    "autoscaler_demand",
    "auto",
    ", ".join(_DEMAND),
    "Whether the Controller asks Ray's autoscaler or KubeRay for missing slices; auto: if an autoscaler runs.",
    _demand,
)
HISTORY = ClusterSetting(
    "history",
    ON,
    f"{ON}, {OFF}, or a directory on the head",
    "Whether the Controller keeps a history, and where; on: beside its records, or in the head's directory.",
    _place,
)
HISTORY_DAYS = ClusterSetting(
    "history_days", "400", "days", "How long the history keeps jobs, events and samples.", _positive
)
HISTORY_MB = ClusterSetting(
    "history_mb", "1024", "megabytes", "How large the history may get; then the oldest goes first.", _positive
)
HISTORY_PARQUET = ClusterSetting(
    "history_parquet",
    OFF,
    f"a directory, SCHEME://BUCKET/PATH, or {OFF}",
    "Where the Controller copies the history once an hour, as Parquet files by table and month.",
    _copies,
)

_ALL: tuple[ClusterSetting[Any], ...] = (
    OPERATORS,
    EVICTIONS,
    EVICTION_GRACE_S,
    EVICTIONS_PER_JOB,
    EVICTIONS_PER_USER,
    EVICTIONS_PER_TEAM,
    CLOUD_TPU,
    AUTOSCALER_DEMAND,
    HISTORY,
    HISTORY_DAYS,
    HISTORY_MB,
    HISTORY_PARQUET,
)
TABLE: Mapping[str, ClusterSetting[Any]] = {setting.name: setting for setting in _ALL}


def setting_named(name: str) -> ClusterSetting[Any]:
    """Return a setting by its name, or raise UnknownNameError with the most similar names."""
    if name not in TABLE:
        raise unknown("setting", name, TABLE)
    return TABLE[name]


@dataclass(frozen=True, slots=True)
class WasSet:
    """The value of a setting as an operator set it.

    Attributes:
        text: the value, as `ClusterSetting.checked` returns it.
        user: the operator.
        at: the time, in seconds since the epoch.
    """

    text: str
    user: str
    at: float


class ClusterSettings:
    """The settings of one cluster. A setting that ``was_set`` lacks has its default; ``version`` counts the changes."""

    def __init__(self) -> None:
        self.version = 0
        self.was_set: dict[str, WasSet] = {}

    def set(self, name: str, to: WasSet | None) -> None:
        """Replace the value of a setting; None restores its default."""
        self.version += 1
        if to is None:
            self.was_set.pop(name, None)
        else:
            self.was_set[name] = to

    def value(self, setting: ClusterSetting[Value]) -> Value:
        """Return the value of a setting in this cluster."""
        found = self.was_set.get(setting.name)
        return setting.parse(setting.default if found is None else found.text)
