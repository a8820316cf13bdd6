"""The cluster settings that operators make for all users: a table of their definitions, and one cluster's values.

A setting is written as text, ``NAME=VALUE``, which the Controller checks and records. The table here has the kernel's
settings; services add theirs. The checks, the command ``iris-ray cluster settings`` and docs/operating.md are derived
from all (`all_settings` in `actors/protocol/services.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from iris_ray.errors import InvalidRequestError
from iris_ray.model.durations import FORMS, parse_duration

EVERYBODY, OFF, ON = "everybody", "off", "on"

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
        return parse_duration(text)
    except ValueError:
        raise ValueError(f"give a duration: {FORMS}") from None


def count_or_off(text: str) -> int | None:
    """Parse a positive whole number; None for `OFF`. Raises ValueError for any other text."""
    if text == OFF:
        return None
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise ValueError(f"give a whole number, 1 or more, or {OFF}")
    return int(text)


OPERATORS = ClusterSetting(
    "operators",
    EVERYBODY,
    "user names, separated by commas",
    "Users who may act on jobs of other users, drain and taint hosts, set limits, teams, secrets and settings, and"
    " submit jobs in the SYSTEM band.",
    _users,
)
EVICTIONS = ClusterSetting(
    "evictions",
    ON,
    f"{ON} or {OFF}",
    "Whether a waiting job may evict jobs of lower bands, and jobs that use quota which its team has lent.",
    _switch,
)
EVICTION_GRACE_S = ClusterSetting(
    "eviction_grace_s",
    "30",
    "a duration, such as 30 or 2m",
    "Time from the notice of an eviction until the gang is ended.",
    _seconds,
)
EVICTIONS_PER_JOB = ClusterSetting(
    "evictions_per_job",
    "6",
    f"a number, or {OFF}",
    "How often per hour a job may be evicted; in a job with several gangs, each gang.",
    count_or_off,
)
EVICTIONS_PER_USER = ClusterSetting(
    "evictions_per_user",
    "200",
    f"a number, or {OFF}",
    "How often per hour gangs of one user may be evicted. If none was within the hour, one job may evict more at once.",
    count_or_off,
)
EVICTIONS_PER_TEAM = ClusterSetting(
    "evictions_per_team",
    OFF,
    f"a number, or {OFF}",
    "The same for the gangs of one team and its subteams. A limit may delay the return of borrowed quota.",
    count_or_off,
)
_ALL: tuple[ClusterSetting[Any], ...] = (
    OPERATORS,
    EVICTIONS,
    EVICTION_GRACE_S,
    EVICTIONS_PER_JOB,
    EVICTIONS_PER_USER,
    EVICTIONS_PER_TEAM,
)
TABLE: Mapping[str, ClusterSetting[Any]] = {setting.name: setting for setting in _ALL}
"""The kernel's own settings by name."""


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
