"""What docs/json-output.md says of the JSON of commands; the tests of the commands hold each output against it."""

import click
import jsonschema
import pytest

from iris_ray.cli.output import JsonOption
from tests.support.command_line import COMMANDS
from tools.json_page import PAGE, json_options, json_page, schema_of

LISTS = {path for path, command in COMMANDS.items() if any("-q" in one.opts for one in command.params)}
HAVE_JSON = {path for path, command in COMMANDS.items() if any(isinstance(one, JsonOption) for one in command.params)}
WITHOUT = {"run", "exec", "shell", "port-forward", "cp", "dev run", "rerun", "demo", "cluster dashboard", "completion"}
"""Commands that print what programs of the user print, or nothing that a program reads; `rerun` has those of submit."""


def test_page_of_json_is_made_from_the_code() -> None:
    assert PAGE.read_text() == json_page(), "write it anew: python -m tools.json_page"


def test_meaning_of_a_field_ends_with_its_section_of_the_docstring() -> None:
    assert [line for line in PAGE.read_text().splitlines() if "Raises:" in line or "Example" in line] == []


def test_every_other_command_has_json() -> None:
    groups = {path for path, command in COMMANDS.items() if isinstance(command, click.Group)} - {"cluster settings"}
    assert {path.removeprefix("job ") for path in set(COMMANDS) - groups - HAVE_JSON} <= WITHOUT


def test_every_listing_command_prints_ids_alone() -> None:
    lists = {path for path in COMMANDS if path.split()[-1] in ("ls", "tasks", "models", "runners", "limits")}
    assert lists | {"history", "team show", "cluster settings"} <= LISTS
    assert LISTS <= HAVE_JSON


@pytest.mark.parametrize("option", [pytest.param(option, id=path) for path, _, option in json_options()])
def test_schema_is_valid_json_schema(option: JsonOption) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(option))
