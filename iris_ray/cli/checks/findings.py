"""What ``iris-ray doctor`` and ``iris-ray selftest`` find."""

from dataclasses import dataclass
from enum import Enum

import click

from iris_ray.cli.printing.tables import print_labelled
from iris_ray.cli.printing.words import one_line


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


_COLOURS = {Level.OK: "green", Level.INFO: None, Level.WARNING: "yellow", Level.ERROR: "red"}


def print_finding(finding: Finding) -> None:
    """Print a finding as a line, and its advice below."""
    print_labelled(f"{finding.level.value:7}", _COLOURS[finding.level], f"  {finding.check}: {one_line(finding.found)}")
    if finding.advice:
        click.echo(f"{'':7}  → {finding.advice}")
