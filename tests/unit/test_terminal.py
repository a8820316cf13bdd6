"""Live lines on a real terminal: a program draws them in a process of its own, and the test reads the screen."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import REPOSITORY
from tests.support.terminal import Terminal, python

BEGIN = """
import logging, os, sys
from iris_ray.terminal import live_line
go_on = sys.stdin.readline
"""
PRINTS = (
    BEGIN
    + """
logging.basicConfig(format="%(message)s")
with live_line("train", 0.0) as line:
    line.show("step 1")
    go_on()
    print("out " * 30)
    print("error", file=sys.stderr)
    logging.warning("logged")
    sys.stdout.buffer.write(b"bytes\\n")
    line.show("step 2")
    go_on()
print("after")
"""
)


def test_line_shows_state_and_leaves_nothing_behind():
    with Terminal(python(PRINTS)) as terminal:
        (line,) = terminal.wait_for_text("train step 1")
        assert line.startswith("train step 1 0:0")
        terminal.go_on()
        screen = terminal.wait_for_text("train step 2")
        assert screen[-1].startswith("train step 2 0:0")
        terminal.go_on()
        assert terminal.end() == [*screen[:-1], "after"]


def test_prints_stand_above_the_line_unchanged():
    with Terminal(python(PRINTS), columns=200) as terminal:
        terminal.wait_for_text("train step 1")
        terminal.go_on()
        screen = terminal.wait_for_text("train step 2")
        assert screen[:-1] == [("out " * 30).rstrip(), "error", "logged", "bytes"]


def test_redirected_stdout_stays_in_its_file(tmp_path: Path):
    with (tmp_path / "out").open("wb") as out, Terminal(python(PRINTS), stdout=out.fileno()) as terminal:
        terminal.wait_for_text("train step 1")
        terminal.go_on()
        screen = terminal.wait_for_text("train step 2")
        assert screen[:-1] == ["error", "logged"]
        terminal.go_on()
        terminal.end()
    text = (tmp_path / "out").read_text()
    assert sorted(text.splitlines()) == sorted(["out " * 30, "bytes", "after"])


def test_unfinished_line_is_left_alone():
    program = """
with live_line("train", 0.0) as line:
    line.show("step 1")
    go_on()
    print("a question? ", end="")
    for _ in range(3):
        line.show("step 2")
        go_on()
    print("answered")
    go_on()
"""
    with Terminal(python(BEGIN + program)) as terminal:
        terminal.wait_for_text("train step 1")
        terminal.go_on()
        assert terminal.wait_for_text("a question?") == ["a question?"]
        for _ in range(3):
            assert terminal.lines() == ["a question?"]
            terminal.go_on()
        assert terminal.wait_for_text("train step 2")[0] == "a question? answered"


@pytest.mark.parametrize("columns", [12, 40])
def test_narrow_terminal_shows_one_row_a_line(columns: int):
    program = """
with live_line("train-1a2b3c4d", 0.0) as line:
    line.show("waiting for " + "日本 v4-16-0 " * 20)
    go_on()
    line.show("step 2")
    go_on()
"""
    stale = {"COLUMNS": "200"}  # as a shell that was wider once has exported it
    with Terminal(python(BEGIN + program), columns, stale) as terminal:
        (line,) = terminal.wait_for_text("train")
        assert "…" in line
        terminal.go_on()
        terminal.wait_for(lambda lines: len(lines) == 1 and ("step 2" in lines[0] or columns < 20))
        terminal.go_on()
        assert terminal.end() == []


def test_many_lines_are_stacked_and_the_rest_counted():
    program = """
import contextlib
with contextlib.ExitStack() as stack:
    for number in range(6):
        stack.enter_context(live_line(f"job-{number}", 0.0)).show("runs")
    go_on()
    print("a word")
    go_on()
"""
    with Terminal(python(BEGIN + program)) as terminal:
        screen = terminal.wait_for_text("and 2 more")
        assert [line.split()[0] for line in screen] == ["job-0", "job-1", "job-2", "job-3", "and"]
        terminal.go_on()
        terminal.wait_for(lambda lines: len(lines) == 6 and lines[0] == "a word" and lines[-1] == "and 2 more")
        terminal.go_on()
        assert terminal.end() == ["a word"]


def test_ctrl_c_leaves_a_clean_screen_before_the_traceback():
    program = """
with live_line("train", 0.0) as line:
    line.show("step 1")
    go_on()
"""
    with Terminal(python(BEGIN + program)) as terminal:
        terminal.wait_for_text("train step 1")
        terminal.press_ctrl_c()
        screen = terminal.end()
        assert screen[0] == "Traceback (most recent call last):"
        assert screen[-1] == "KeyboardInterrupt"
        assert not any("step 1" in line and "show" not in line for line in screen)


def test_text_cannot_move_the_cursor():
    program = """
with live_line("train", 0.0) as line:
    line.show("a\\x1b[2Jb\\nc")
    go_on()
"""
    with Terminal(python(BEGIN + program)) as terminal:
        (line,) = terminal.wait_for_text("train")
        assert line.startswith("train a?[2Jb c ")


def test_forked_child_prints_without_parents_lines():
    program = """
with live_line("train", 0.0) as line:
    line.show("step 1")
    go_on()
    if os.fork() == 0:
        print("child", isinstance(sys.stdout, type(sys.__stdout__)), flush=True)
        os._exit(0)
    os.wait()
    go_on()
"""
    with Terminal(python(BEGIN + "import warnings; warnings.simplefilter('ignore')" + program)) as terminal:
        terminal.wait_for_text("train step 1")
        terminal.go_on()
        terminal.wait_for_text("child True")


def test_dumb_terminal_gets_no_live_line():
    with Terminal(python(PRINTS), columns=200, environment={"TERM": "dumb"}) as terminal:
        terminal.go_on()
        terminal.go_on()
        assert terminal.end() == [("out " * 30).rstrip(), "error", "logged", "bytes", "after"]
        assert b"\x1b" not in terminal.raw


def test_nothing_is_drawn_without_a_terminal():
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], input="\n\n", capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert sorted(done.stdout.splitlines()) == ["after", "bytes", "out " * 30]
    assert done.stderr == "error\nlogged\n"


def test_piped_stdout_suppresses_lines():
    with Terminal(["bash", "-c", f"{sys.executable} -c '{PRINTS}' | cat"], columns=200) as terminal:
        terminal.go_on()
        terminal.go_on()
        terminal.end()
        assert b"after" in terminal.raw
        assert b"\x1b" not in terminal.raw


COME_AND_GO = (
    BEGIN
    + """
import threading
log = logging.getLogger("busy")
log.addHandler(logging.StreamHandler())
log.propagate = False
done = threading.Event()
def write():
    while not done.is_set():
        log.warning("logged")
busy = threading.Thread(target=write, daemon=True)
busy.start()
for number in range(50):
    with live_line("train", 0.0) as line:
        line.show(str(number))
done.set()
busy.join()
print("has come and gone")
"""
)


def test_lines_come_and_go_while_another_thread_logs() -> None:
    """The lock of the lines and the one of a handler of logs are taken in one order."""
    with Terminal(python(COME_AND_GO), columns=200) as terminal:
        assert "has come and gone" in "\n".join(terminal.end())


# -- text of strangers -------------------------------------------------------------------------------------------------

EVIL = "x\x1b]52;c;cm0gLXJmIH4=\x07\x9b2J\x1b[2Jy \x1b[31mred\x1b[0m \u202ez"
ACTS = "\x1b]52", "\x1b[2J", "\x9b", "\x07", "\u202e"
"""Writes the clipboard, clears the screen, begins a sequence, rings, turns the line round."""
STRANGER = f"""
import logging, sys
import click
from iris_ray.cli import job_list, printing, streams
from iris_ray.cli.conventions import say_error
from iris_ray.cli.main import main
from iris_ray.terminal import guarded_output, print_line
text = {EVIL!r}
def guarded():
    job_list.ls.callback = lambda **_: (click.echo(text), click.echo(text, err=True), print(text), say_error(text))
    main(["ls"])
def handler():
    with guarded_output():
        handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({{"msg": text}}))
ways = dict(
    output=lambda: printing.print_output(text.encode() + b"\\n"),
    text=lambda: printing.print_output(text, err=True),
    facts=lambda: printing.print_facts({{"says": text}}),
    table=lambda: printing.print_table(("A", "B"), [("1", text)], ""),
    json=lambda: printing.print_json({{"status": text}}),
    finding=lambda: printing.print_finding(printing.Finding(printing.Level.ERROR, "c", text, text)),
    error=lambda: say_error(text),
    line=lambda: print_line(text),
    bytes=lambda: streams.print_bytes(text.encode(), False),
    handler=handler,
    guarded=guarded,
)
ways[sys.argv[1]]()
"""


@pytest.mark.parametrize(
    "way",
    ["output", "text", "facts", "table", "json", "finding", "error", "line", "bytes", "handler", "guarded"],
)
def test_text_of_strangers_controls_no_terminal(way: str) -> None:
    with Terminal([*python(STRANGER), way], columns=500) as terminal:
        screen = "\n".join(terminal.end())
    assert [act for act in ACTS if act.encode() in terminal.raw] == []
    assert "52;c;cm0gLXJm" in screen
    assert (b"\x1b[31mred" in terminal.raw) == (
        way in ("output", "text", "error", "line", "bytes", "handler", "guarded")
    )


def test_output_of_strangers_is_unchanged_in_a_pipe() -> None:
    program = "from iris_ray.cli import printing, streams; import sys; data = sys.stdin.buffer.read();"
    program += " printing.print_output(data); streams.print_bytes(data, False)"
    data = EVIL.encode() + b"\xff\r\n"
    done = subprocess.run([*python(program)], input=data, capture_output=True, cwd=REPOSITORY, timeout=60, check=True)
    assert done.stdout == 2 * data


GUARDED = r"""
import sys
from iris_ray.terminal import guarded_output, live_line
from iris_ray.cli.streams import pass_on
with guarded_output(), live_line("train", 0.0) as line:
    line.show("step 1")
    sys.stdin.readline()
    for byte in "caf\u00e9 \x1b[2K\r\n".encode():
        sys.stdout.buffer.write(bytes([byte]))
    print("10 %\r20 %")
    sys.stdin.readline()
pass_on(b"own \x1b[1mbold\x1b[0m \x1b[7C\n", False)
"""


def test_guarded_terminal_has_live_lines_progress_bars_and_own_programs() -> None:
    with Terminal(python(GUARDED)) as terminal:
        terminal.wait_for_text("train step 1")
        terminal.go_on()
        screen = terminal.wait_for_text("20 %")
        assert screen[:2] == [r"café \x1b[2K", "20 %"]
        terminal.go_on()
        assert terminal.end()[:2] == screen[:2]
    assert b"\x1b[7C" in terminal.raw
