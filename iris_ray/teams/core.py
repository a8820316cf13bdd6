"""Teams as operators write them: TOML files, and the chips of a quota's type."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from iris_ray.errors import InvalidTeamsError
from iris_ray.model.checks import shown
from iris_ray.model.teams import Teams


def read_teams(text: str) -> tuple[Teams, str | None]:
    """Parse a file into its teams and the version of the tree that it is based on, if it names one.

    The format is that in the docstring of `iris_ray.model.teams`.

    Raises:
        InvalidTeamsError: the text is not valid TOML, or a team is invalid; the message names the team.
    """
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is no TOMLDecodeError
        raise InvalidTeamsError(f"the teams can't be read: {error}") from None
    tables, version = raw.pop("teams", {}), raw.pop("version", None)
    if raw or not isinstance(tables, dict):
        raise InvalidTeamsError(
            f"the file has {shown(next(iter(raw), tables))} in addition to [teams.NAME]; give only teams"
        )
    if not isinstance(version, str | None):
        raise InvalidTeamsError(f"version is {shown(version)}; leave it as `iris-ray team show --toml` has written it")
    return Teams.from_tables(tables), version


def to_toml(teams: Teams) -> str:
    """Return the teams as TOML, with their version."""
    return "\n".join([f'version = "{teams.version}"\n', *(_table_as_toml(*item) for item in teams.to_tables().items())])


def _table_as_toml(team: str, table: Mapping[str, Any]) -> str:
    lines = [f"[teams.{_key(team)}]"]
    for name, value in table.items():
        if name == "quota":
            lines += [f"quota.{_key(kind)} = {_inline(given)}" for kind, given in value.items()]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _inline(given: Any) -> str:
    if isinstance(given, dict):
        return f"{{ {', '.join(f'{name} = {amount!r}' for name, amount in given.items())} }}"
    return repr(given)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)
