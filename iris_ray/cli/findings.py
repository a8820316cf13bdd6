"""What ``iris-ray doctor`` finds."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what to do about it."""

    level: Level
    check: str
    found: str
    advice: str | None = None
