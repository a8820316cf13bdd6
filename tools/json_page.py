"""Writes docs/json-output.md, the reference of what ``--json`` prints, from the types that commands name.

``python -m tools.json_page`` writes it. `schema_of` returns the JSON Schema of a command's output, for tests.
"""

import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import click

from iris_ray.cli.main import every_command
from iris_ray.cli.output import JsonOption
from iris_ray.model.constraints import AttributeValue, Constraint
from iris_ray.scheduler.pending_reason import PendingReason

PAGE = Path(__file__).parents[1] / "docs" / "json-output.md"
HEAD = """# What `--json` prints

For scripts: the JSON output of the commands of [`iris-ray`](command-line.md) that have `--json`. This page is generated
from the types in the code.

- stdout has one JSON value. A command that can't do its work prints a message to stderr and nothing to stdout. Commands
  that report a result, such as `doctor`, `cluster selftest`, `cluster controller status`, `wait`, `host give-notice`
  and `job chips`, print their value and then exit with a code that tells the result.
- `cluster provision` prints one object on each line.
- Times are in seconds since the epoch, durations in seconds, and sizes in bytes. Fields whose name contains `hours` are
  in hours or chip-hours.
- Fields with a fixed list of values have names in capitals, such as `RUNNING`. Keys of objects and other strings may be
  in lower case, such as the states that `cluster controller status` counts and those in rows of the history.
- Fields may be added. Ignore those that you don't know.
- Most listing commands also have `-q`: ids alone, one on each line, in the form in which other commands take them.

```sh
iris-ray ls --json | jq -r '.[] | select(.state == "PENDING") | .job_id'
iris-ray ls -q --user ann | xargs iris-ray cancel --yes
```

## Commands

| command | prints | `-q` prints |
|---|---|---|
"""
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_ATTRIBUTES = re.compile(r"^(?:Attributes|Args):\n((?:    .*\n?|\n)*)", re.MULTILINE)


# -- the schema --------------------------------------------------------------------------------------------------------


def json_options() -> Iterator[tuple[str, click.Command, JsonOption]]:
    """Yield the commands that have ``--json``, each once and by its short name, with the option."""
    words = {command: path for path, command in reversed(list(every_command()))}
    short = {id(command): path for command, path in words.items()}
    for path, command in every_command():
        for option in command.params:
            if isinstance(option, JsonOption) and short[id(command)] == path:
                yield path, command, option


def schema_of(option: JsonOption) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints."""
    definitions: dict[str, Any] = {}
    return {**_schema(option.shape, definitions), "$defs": definitions}


def _schema(shape: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type, as `as_json` converts its values; add the objects in it to ``definitions``."""
    origin, arguments = get_origin(shape), get_args(shape)
    if shape in _PLAIN:
        return {"type": _PLAIN[shape]}
    if shape in (Any, object, AttributeValue):
        return {}
    if shape is Constraint:
        return {"type": "string"}
    if origin in (types.UnionType, Union):
        return {"anyOf": [_schema(one, definitions) for one in arguments]}
    if origin is not None and str(origin) == "typing.Literal":
        return {"enum": list(arguments)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if origin is tuple and Ellipsis not in arguments:
        items = [_schema(one, definitions) for one in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, (Sequence, Set)):
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if isinstance(shape, type) and issubclass(shape, Enum):
        return {"enum": [one.name for one in shape]}
    if is_dataclass(shape) or is_typeddict(shape):
        if shape.__name__ not in definitions:
            definitions[shape.__name__] = {}
            definitions[shape.__name__] |= _object(shape, definitions)
        return {"$ref": f"#/$defs/{shape.__name__}"}
    raise TypeError(f"{shape!r} is in the output of a command, and has no form in JSON here")


def _object(shape: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(shape)
    if is_dataclass(shape):
        names = [one.name for one in fields(shape) if not one.name.startswith("_")]
        required = names
    else:
        names, required = list(hints), sorted(shape.__required_keys__, key=list(hints).index)
    properties = {name: _schema(hints[name], definitions) for name in names}
    if shape is PendingReason:
        properties = {"sentence": {"type": "string"}, "summary": {"type": "string"}, **properties}
    said = _attributes(shape)
    for name, of in properties.items():
        if name in said:
            of["description"] = said[name]
    return {
        "type": "object",
        "description": _sentences(inspect.getdoc(shape) or ""),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _attributes(shape: type) -> dict[str, str]:
    """Return what the docstrings of a class and of its bases say of each attribute."""
    found: dict[str, str] = {}
    for one in reversed(shape.__mro__):
        if not (section := _ATTRIBUTES.search(inspect.cleandoc(one.__doc__ or ""))):
            continue
        for entry in re.split(r"\n(?=    \w)", f"\n{section[1]}")[1:]:
            names, _, text = entry.partition(":")
            found |= dict.fromkeys(re.split(r",\s*", names.strip()), " ".join(text.split()))
    return found


def _sentences(doc: str) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join(doc.partition("\n\n")[0].split())


# -- the page ----------------------------------------------------------------------------------------------------------


def json_page() -> str:
    """Return the page."""
    definitions: dict[str, Any] = {}
    lines = []
    for path, command, option in sorted(json_options(), key=lambda one: one[0]):
        ids = next((one.help or "" for one in command.params if "-q" in one.opts and isinstance(one, click.Option)), "")
        printed = _words(_schema(option.shape, definitions))
        lines.append(f"| `iris-ray {path}` | {printed} | {ids.removeprefix('Print ').partition(' only,')[0]} |")
    parts = [HEAD + "\n".join(lines), "\n## Objects"]
    for name in sorted(definitions):
        of = definitions[name]
        parts.append(f"\n### {name}\n\n{_marked(of['description'])}\n\n| field | type | meaning |\n|---|---|---|")
        rows = [(field, one, one.get("description", "")) for field, one in of["properties"].items()]
        for said, group in groupby(rows, key=lambda row: row[2] or row[0]):
            these = list(group)
            names = ", ".join(f"`{field}`" for field, _, _ in these)
            kinds = ", ".join(dict.fromkeys(_words(one) for _, one, _ in these))
            always = {*of["required"], "sentence", "summary"}
            may = "" if always.issuperset(field for field, _, _ in these) else "; may be absent"
            text = _marked(said) if these[0][2] else ""
            parts.append(f"| {names} | {kinds}{may} | {text[:1].upper()}{text[1:]} |")
    return "\n".join(parts) + "\n"


def _words(schema: Mapping[str, Any]) -> str:
    """Return a schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_words(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{one}`" for one in schema["enum"])
    if "prefixItems" in schema:
        return f"array of {', '.join(map(_words, schema['prefixItems']))}"
    if schema.get("type") == "array":
        return f"array of {_words(schema['items'])}"
    if schema.get("type") == "object":
        values = _words(schema["additionalProperties"])
        return "object" if values == "any" else f"object of {values}"
    return str(schema.get("type", "any"))


def _marked(text: str) -> str:
    """Return a docstring's text as Markdown in a table."""
    return re.sub(r"\bNone\b", "null", re.sub(r"`+([^`]+)`+", r"`\1`", text)).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(json_page())
