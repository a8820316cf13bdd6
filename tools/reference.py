"""Writes docs/reference/, every public name and every command, from the code: ``python -m tools.reference``.

Signatures come from `inspect`, docstrings from griffe's reader of Google's style, commands and flags from click.
"""

import enum
import inspect
import logging
import re
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from griffe import Docstring, DocstringSectionKind

from iris_ray.cli.main import main
from tools.public_names import PLACES, members_of, names_of, public, shown_signature

logging.getLogger("griffe").setLevel(logging.CRITICAL)  # arguments without types: the signature has them

DIRECTORY = Path(__file__).parents[1] / "docs" / "reference"
SECTIONS = {
    "Running jobs": ("client", "secrets", "dev", "docker", "remote"),
    "Inside a task": ("task", "endpoints"),
    "How jobs and tasks stand": ("actors", "logs"),
    "Serving models": ("slots",),
    "What jobs ask for, and how they end": ("model",),
    "Errors": ("errors",),
}
"""The sections of iris_ray's page, and the packages whose names each has."""
TITLES = {
    "iris_ray": "Running jobs and serving models",
    "iris_ray.slots": "Slots",
    "iris_ray.jax": "JAX in a task",
    "iris_ray.outer": "Slices that train by themselves",
    "iris_ray.checkpoint": "Checkpoints in memory",
    "iris_ray.levanter": "For users of Levanter",
    "iris_ray.fray": "For users of Marin's Fray",
    "iris_ray.testing": "Simulated clusters",
    "iris_ray.study": "Studies in virtual time",
    "iris_ray.state": "Driving the core: the state",
    "iris_ray.scheduler": "Driving the core: the scheduler",
    "iris_ray.events": "Driving the core: the events",
    "iris_ray.errors": "Errors",
}
"""The titles of the pages of `PLACES`."""
WRITTEN_BY = "<!-- Written by `python -m tools.reference`; do not edit. -->\n"


def pages() -> dict[str, str]:
    """Return all pages by their file's name."""
    names = public()
    found = {f"{place}.md": _module(place, names) for place in PLACES}
    found["commands.md"] = _commands()
    index = [
        WRITTEN_BY,
        "# Reference",
        "",
        "Every public name and every command, from the docstrings and help texts in the code.",
        "",
        "| page | has |",
        "|---|---|",
        "| [commands](commands.md) | every command of `iris-ray`, with its arguments and flags |",
        *(f"| [`{place}`]({place}.md) | {TITLES[place]} |" for place in PLACES),
        "",
        "[Options of a run](../options.md), [environment variables](../environment.md) and [JSON](../json-output.md)"
        " have pages of their own.",
    ]
    return {"README.md": "\n".join(index) + "\n", **found}


# -- Python ------------------------------------------------------------------------------------------------------------


def _module(place: str, names: dict[str, Any]) -> str:
    paragraphs = (inspect.getdoc(import_module(place)) or "").split("\n\n")
    about = "\n\n".join(one for one in paragraphs if not re.search(r"May import|\.pyi?`", one))  # for maintainers
    lines = [WRITTEN_BY, f"# `{place}` · {TITLES[place]}", "", *_docstring(about)]
    first = {id(what): name for name, what in names.items()}
    own: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)
    again: list[str] = []
    for name in names_of(place):
        what = getattr(import_module(place), name)
        if first[id(what)] == f"{place}.{name}":
            own[_section(what) if place == "iris_ray" else ""].append((name, what))
        else:
            again.append(f"- [`{name}`]({_address(first[id(what)])})")
    for section in SECTIONS if place == "iris_ray" else ("",):
        lines += [f"## {section}", ""] if section else []
        for name, what in sorted(own[section], key=lambda pair: pair[0].lower()):
            lines += _object(name, what, "###" if section else "##")
    if again:
        lines += ["## Also importable from here", "", *again, ""]
    return _page(lines)


def _page(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _address(name: str) -> str:
    place, _, own = name.rpartition(".")
    return f"{place}.md#{own.lower()}"


def _section(what: Any) -> str:
    module = what.__module__ if hasattr(what, "__module__") else "iris_ray.model"
    package = module.split(".")[1]
    return next(title for title, packages in SECTIONS.items() if package in packages)


def _object(name: str, what: Any, level: str) -> Iterator[str]:
    yield from (f"{level} {name}", "")
    if isinstance(what, type) and issubclass(what, enum.Enum):
        yield from ("```py", f"class {name}({_bases(what)})", "```", "", *_docstring(inspect.getdoc(what) or ""))
        yield from (f"- `{one.name}` = `{one.value!r}`" for one in what)
        yield ""
    elif isinstance(what, type):
        bases = _bases(what)
        constructed = not issubclass(what, BaseException) or "__init__" in vars(what)
        if constructed and what.__init__ is not object.__init__:  # type: ignore[misc]
            yield from _signature(f"class {name}", what)
        else:
            yield from ("```py", f"class {name}({bases})" if bases else f"class {name}", "```", "")
        yield from _docstring(inspect.getdoc(what) or "")
        if "__init__" in vars(what) and (made := what.__init__.__doc__) and made != object.__init__.__doc__:  # type: ignore[misc]
            yield from _docstring(inspect.cleandoc(made))
        for member, value in sorted(members_of(what).items()):
            yield from _member(f"{name}.{member}", value, f"{level}#")
    elif callable(what):
        yield from _signature(f"def {name}" if inspect.isroutine(what) else name, what)
        yield from _docstring(inspect.getdoc(what) or "")
        if not inspect.isroutine(what):
            for member in sorted(members_of(type(what))):
                yield from _member(f"{name}.{member}", getattr(what, member), f"{level}#")
    else:
        yield from ("```py", f"{name}: {type(what).__name__}", "```", "")


def _member(name: str, value: Any, level: str) -> Iterator[str]:
    yield from (f"{level} {name}", "")
    if callable(value):
        yield from _signature(f"def {name.rpartition('.')[2]}", value)
    yield from _docstring(inspect.getdoc(value) or "")


def _bases(what: type) -> str:
    return ", ".join(base.__name__ for base in what.__bases__ if base is not object)


def _signature(name: str, what: Any) -> Iterator[str]:
    signature = shown_signature(what)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    signature = signature.replace(parameters=parameters)
    if name.startswith("class "):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = f"{name}{signature}"
    if len(text) > 100 and parameters:
        returns = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
        text = f"{name}(\n{''.join(f'    {line},{chr(10)}' for line in _lines(parameters))}){returns}"
    yield from ("```py", text.replace("'", '"'), "```", "")


def _lines(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield str(one)


def _docstring(text: str) -> Iterator[str]:
    """Yield Markdown of a docstring in Google's style."""
    for section in Docstring(text, parser="google").parse(warn_unknown_params=False, warn_missing_types=False):
        kind, value = section.kind, section.value
        if kind is DocstringSectionKind.text:
            yield from (_markdown(value), "")
        elif kind is DocstringSectionKind.examples:
            yield from ("Examples:", "", *(f"```py\n{part[1]}\n```" for part in value), "")
        elif kind is DocstringSectionKind.admonition:
            yield from (f"{section.title or value.kind}:", "", *_code_or_text(value.contents), "")
        else:
            yield from (f"{kind.value.capitalize()}:", "")
            for entry in value:
                known_by = getattr(entry, "name", "") or str(entry.annotation or "")
                if known_by.endswith(","):  # several names, of which griffe takes the later ones for a type
                    known_by += f" {entry.annotation}"
                told = " ".join(_markdown(entry.description).split())
                yield f"- `{known_by}`: {told}" if known_by else f"- {told}"
            yield ""


def _code_or_text(text: str) -> Iterator[str]:
    if re.search(r"^(    |>>> )|\w\(|^\w+ = ", text, re.MULTILINE):
        yield f"```py\n{textwrap.dedent(text)}\n```"
    else:
        yield _markdown(text)


def _markdown(text: str) -> str:
    """Return a text of a docstring as Markdown: its code, its code blocks, and the pages that it names."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"(?<![\w/`(])docs/((?:\w|[-/])+\.md)(#[\w-]+)?", r"[\1](../\1\2)", text)
    return re.sub(r"(\S)?::\n\n((?:    .*\n?|\n)+)", _block, text, flags=re.MULTILINE)


def _block(found: re.Match[str]) -> str:
    introduced = f"{found[1]}:" if found[1] else ""
    return f"{introduced}\n\n```text\n{textwrap.dedent(found[2]).strip()}\n```\n"


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands() -> str:
    about = "Every command also explains itself with `--help`. `--address` may also come before the command, and"
    about += " `iris-ray --version` prints the version."
    lines = [WRITTEN_BY, "# Commands", "", about, ""]
    root = click.Context(main, info_name="iris-ray")
    known: dict[int, str] = {}
    for path, command, context in _below(main, root):
        if first := known.get(id(command)):
            lines += [f"## {path}", "", f"The same as [{first}](#{first.replace(' ', '-')}).", ""]
            continue
        known[id(command)] = path
        lines += [f"## {path}", "", *_command(command, context)]
    return _page(lines)


def _below(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        yield inner.command_path, command, inner
        if isinstance(command, click.Group):
            yield from _below(command, inner)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    pieces = command.collect_usage_pieces(context)
    yield from ("```plain", " ".join(filter(None, [context.command_path, *pieces])), "```", "")
    for part in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        if part.startswith("\b"):
            yield from ("```plain", textwrap.dedent(part.removeprefix("\b").strip("\n")), "```", "")
        elif part:
            yield from (re.sub(r"([<>*])", r"\\\1", part), "")
    records = [
        found for one in command.params if isinstance(one, click.Option) and (found := one.get_help_record(context))
    ]
    if records:
        yield from ("| flag | does |", "|---|---|")
        for flag, told in records:
            yield f"| `{_cell(flag)}` | {_markdown(_cell(' '.join(told.split())))} |"
        yield ""
    if command.epilog:  # the forms of its values, and its other names
        yield from (command.epilog, "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir(parents=True)
    for file, text in pages().items():
        (DIRECTORY / file).write_text(text)
