"""The settings of a cluster: one table of what operators decide for all users, and what was set of it.

People write a setting as text, ``NAME=VALUE``. The Controller checks the text and records it. Checks, the command
``iris-ray cluster settings`` and docs/operating.md take everything from `TABLE`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import is_seconds, unknown

EVERYBODY, OFF, ON = "everybody", "off", "on"
LOCATION = re.compile(r"projects/[a-z0-9.:-]+/locations/[a-z0-9-]+")
"""A zone of the Cloud TPU API."""
_DEMAND = {"auto": None, "always": True, "never": False}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ClusterSetting(Generic[Value]):
    """One setting.

    Attributes:
        name: as people write it.
        default: the text of its value where nobody has set it.
        form: what a value looks like, with its unit.
        help: what it decides, in a sentence.
        parse: returns the value of a text; raises ValueError, whose message says what to give.
    """

    name: str
    default: str
    form: str
    help: str
    parse: Callable[[str], Value]

    def checked(self, text: str) -> str:
        """Return a text as it is kept: without white space around it.

        Raises:
            InvalidRequestError: the setting can't have this value; the message says what to give.
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
        seconds = -1.0
    if not is_seconds(seconds):
        raise ValueError("give a number of seconds, 0 or more")
    return seconds


def _location(text: str) -> str | None:
    if text == OFF:
        return None
    if not LOCATION.fullmatch(text):
        raise ValueError(f"give projects/PROJECT/locations/ZONE, or {OFF}")
    return text


def _demand(text: str) -> bool | None:
    if text not in _DEMAND:
        raise ValueError(f"give one of {', '.join(_DEMAND)}")
    return _DEMAND[text]


OPERATORS = ClusterSetting(
    "operators",
    EVERYBODY,
    "users, by commas",
    "Who may cancel jobs of others, drain, taint, set limits and change these settings.",
    _users,
)
EVICTIONS = ClusterSetting(
    "evictions", ON, f"{ON} or {OFF}", "Whether jobs take hosts from jobs of lower bands.", _switch
)
EVICTION_GRACE_S = ClusterSetting(
    "eviction_grace_s", "30", "seconds", "How long a gang has from the notice of an eviction to its end.", _seconds
)
CLOUD_TPU = ClusterSetting(
    "cloud_tpu",
    OFF,
    "projects/PROJECT/locations/ZONE",
    "In which zone of Google's Cloud TPU API the Controller asks what became of lost slices.",
    _location,
)
AUTOSCALER_DEMAND = ClusterSetting(
    "autoscaler_demand",
    "auto",
    ", ".join(_DEMAND),
    "Whether the Controller shows missing slices to Ray's autoscaler; auto: if one runs.",
    _demand,
)

_ALL: tuple[ClusterSetting[Any], ...] = (OPERATORS, EVICTIONS, EVICTION_GRACE_S, CLOUD_TPU, AUTOSCALER_DEMAND)
TABLE: Mapping[str, ClusterSetting[Any]] = {setting.name: setting for setting in _ALL}


def setting_named(name: str) -> ClusterSetting[Any]:
    """Return the setting of a name.

    Raises:
        UnknownNameError: there is none; the message has the nearest.
    """
    if name not in TABLE:
        raise unknown("setting", name, TABLE)
    return TABLE[name]


@dataclass(frozen=True, slots=True)
class WasSet:
    """What somebody has set.

    Attributes:
        text: the value, as `ClusterSetting.checked` returns it.
        user: who.
        at: when, in seconds since the epoch, by the wall clock.
    """

    text: str
    user: str
    at: float


class ClusterSettings:
    """What was set in one cluster. All else has its default.

    Attributes:
        version: counts the changes.
        was_set: by name.
    """

    def __init__(self) -> None:
        self.version = 0
        self.was_set: dict[str, WasSet] = {}

    def set(self, name: str, to: WasSet | None) -> None:
        """Replace a setting; None: it has its default again."""
        self.version += 1
        if to is None:
            self.was_set.pop(name, None)
        else:
            self.was_set[name] = to

    def value(self, setting: ClusterSetting[Value]) -> Value:
        """Return what holds for a setting."""
        found = self.was_set.get(setting.name)
        return setting.parse(setting.default if found is None else found.text)
