"""Every command in the documents exists and takes the options that it is shown with."""

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click
import pytest

from iris_ray.cli.main import Commands, main
from tests.docs.pages import PAGES, REPOSITORY, blocks, inline_code
from tests.support.command_line import COMMANDS

TARGETS = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
FOREIGN = {"git", "pip", "export", "eval", "pre-commit", "sed", "jq"}
"""Commands of others, which are taken as they are."""
GROUPS = {path for path, command in COMMANDS.items() if isinstance(command, Commands)}


def shell_lines() -> Iterator[tuple[str, str]]:
    """Where each command of a shell block stands, and the command."""
    for block in blocks("sh", "bash", "console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if shlex.split(line, comments=True):
                yield str(block), line


def lines_of_ours() -> Iterator[tuple[str, str]]:
    """The same of blocks of text, of which only our commands can be told from the rest."""
    for block in blocks("text", "yaml"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.strip().startswith("iris-ray "):
                yield str(block), line


def options_of(command: click.Command) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found |= options_of(inner)
    return found


def require_command(words: list[str]) -> None:
    """Have click parse a command line of iris-ray; nothing is run.

    Raises:
        click.UsageError: there is no such command or option.
    """
    command: click.Command = main
    context = click.Context(main, info_name="iris-ray")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        command, context = found, click.Context(found, info_name=name, parent=context)
    if not isinstance(command, click.Group) and words:
        command.make_context(context.info_name, words, parent=context.parent)


@pytest.mark.parametrize(("where", "line"), list(shell_lines()))
def test_shell_line_is_a_command_that_exists(where: str, line: str) -> None:
    words = shlex.shlex(line, posix=True, punctuation_chars="|")
    words.whitespace_split = True
    for is_pipe, part in groupby(words, "|".__eq__):
        if not is_pipe:
            require_that_exists(where, *part)


def require_that_exists(where: str, command: str, *rest: str) -> None:
    if command == "iris-ray":
        require_command(list(rest))
    elif command == "xargs":
        require_that_exists(where, *rest, "WORD")
    elif command == "make":
        assert [target for target in rest if target not in TARGETS and "=" not in target] == []
    elif command in ("python", ".venv/bin/python"):
        module = REPOSITORY / (rest[1].replace(".", "/") if rest[0] == "-m" else rest[0])
        is_saved = f"as `{rest[0]}`" in (REPOSITORY / where.partition(":")[0]).read_text()  # by the reader
        assert is_saved or module.exists() or module.with_suffix(".py").exists()
    else:
        assert command in FOREIGN


@pytest.mark.parametrize(("where", "line"), list(lines_of_ours()))
def test_line_of_text_is_a_command_that_exists(
    where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start.sh").touch()  # a reader's file that a command names
    monkeypatch.chdir(tmp_path)
    _, *rest = shlex.split(line, comments=True)
    require_command(rest)


def test_no_script_that_starts_a_cluster_is_sent_to_one() -> None:
    """It would simulate hosts inside each task. `iris-ray run --mode` runs here."""
    sent = [
        (where, word)
        for where, line in (*shell_lines(), *lines_of_ours())
        if line.split()[:2] in (["iris-ray", "run"], ["iris-ray", "submit"]) and "--mode" not in line
        for word in shlex.split(line, comments=True)[2:]
        if word.endswith(".py") and (REPOSITORY / word).is_file()
    ]
    assert [one for one in sent if "SimulatedCluster" in (REPOSITORY / one[1]).read_text()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_in_backticks_exists(page: Path) -> None:
    for code in inline_code(page):
        words = code.split()
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in TARGETS, code
        if words[:1] == ["iris-ray"] and len(words) > 1:
            words = words[1:]
            assert words[0].startswith("-") or words[0] in COMMANDS, code
        if words and words[0] in GROUPS and len(words) > 1:
            words = [" ".join(words[:2]), *words[2:]]
            assert words[0] in COMMANDS, code
        if words and words[0] in COMMANDS and len(words) > 1:
            assert {word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)} <= options_of(
                COMMANDS[words[0]]
            ), code


def test_every_command_is_in_the_guide() -> None:
    """Under one of its names: a daily command has a short one."""
    lines = [shlex.split(line, comments=True)[1:] for _, line in shell_lines() if line.startswith("iris-ray ")]
    shown = {COMMANDS[path] for words in lines for path in (" ".join(words[:n]) for n in (3, 2, 1)) if path in COMMANDS}
    assert [path for path, command in COMMANDS.items() if path not in GROUPS and command not in shown] == []
