"""The page "A day on TPUs" as a person goes through it: its commands, in its order, on the cluster that it starts."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.docs.pages import blocks
from tests.support.command_line import REPOSITORY, command_line
from tests.support.notebooks import Notebook
from tests.support.waiting import wait_until

PAGE = "docs/day-on-tpus.md"
BLOCKS = [block for block in blocks("sh", "python", "text") if block.page == PAGE]
PROGRAMS = "train.py", "group.py"
"""What a person saves the page's programs as, in their order."""
WAIT_S = 300.0


class Person:
    """A person in a directory of theirs who copies from the page, with the ids that the commands have printed."""

    def __init__(self, here: Path, environ: dict[str, str]) -> None:
        self.here, self.environ = here, environ
        self._ids: dict[str, str] = {}

    def types(self, line: str) -> str:
        """Type a line; return what it prints, once it has ended well."""
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", self._with_ids(line)], cwd=self.here, env=self.environ,
            capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        print(f"{time.monotonic() - began:.1f} s: {line}")
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        self._ids |= {found[1]: found[0] for found in re.finditer(r"^(\w+)-[0-9a-f]{8}$", done.stdout, re.MULTILINE)}
        return done.stdout

    @contextlib.contextmanager
    def terminal(self, line: str) -> Iterator["subprocess.Popen[str]"]:
        """A terminal in which this line runs until the end of the block."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {self._with_ids(line)}"], cwd=self.here, env=self.environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.terminate()
                process.communicate(timeout=WAIT_S)

    def _with_ids(self, line: str) -> str:
        return re.sub(r"\b(\w+)-1a2b3c4d", lambda found: self._ids.get(found[1], found[0]), line)


@pytest.fixture
def person(tmp_path: Path) -> Person:
    """A person whose shell finds iris-ray."""
    programs, here = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    here.mkdir()
    for name, words in {"iris-ray": command_line(), "python": [sys.executable]}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        (programs / name).chmod(0o755)
    left_out = {"RAY_ADDRESS", "IRIS_RAY_CODE"}
    environ = {name: value for name, value in os.environ.items() if name not in left_out} | {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(tmp_path), "IRIS_USER": "ann", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    return Person(here, environ)


def serve_and_forward(person: Person, server: str, forward: str) -> None:
    """Reach a server beside a task through a port of this machine."""
    (port,) = re.findall(r"(\d+):", forward.partition("#")[0])
    here = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError), urlopen(here, timeout=10) as page:
            return bool(page.status == 200)
        return False

    with person.terminal(server), person.terminal(forward):
        wait_until(answers, WAIT_S)


def run_cell(person: Person, files: Path, cell: str) -> str:
    """Run a cell in a notebook, and give the hosts back. Return what it shows."""
    with Notebook.opened(person.here, files, person.environ) as notebook:
        is_well, out, err = notebook.run(cell)
        assert is_well, err
        assert notebook.run("%slice mine --end")[0]
        return out


def shows(person: Person, line: str, pattern: str) -> bool:
    return re.search(pattern, person.types(line)) is not None


@pytest.mark.proof
@pytest.mark.way_in
@pytest.mark.timeout(1800)  # thirty commands, each of which starts Python and joins the cluster
@pytest.mark.filterwarnings("default")  # Jupyter's
def test_page_holds_as_it_is_written(person: Person, tmp_path: Path) -> None:
    start, *rest = BLOCKS
    programs = iter(PROGRAMS)
    printed: dict[str, str] = {}
    with person.terminal(start.text) as cluster:
        assert cluster.stdout is not None
        line = next(line for line in cluster.stdout if "export RAY_ADDRESS=" in line)
        person.environ["RAY_ADDRESS"] = line.strip().partition("=")[2]
        for block in rest:
            lines = block.text.replace("\\\n", " ").splitlines()
            if block.language == "python":
                (person.here / next(programs)).write_text(block.text)
            elif block.language == "text":
                if lines[0].startswith("%%slice") and find_spec("ipykernel") is not None:
                    printed["cell"] = run_cell(person, tmp_path, block.text)
            elif block.how == "terminals":
                serve_and_forward(person, *lines)
            else:
                if block.how == "once it runs":
                    wait_until(partial(shows, person, "iris-ray ls", "long-.* running .* step "), WAIT_S)
                if block.how == "in the morning":
                    wait_until(partial(shows, person, lines[0], "night-"), WAIT_S)
                for line in lines:
                    words = line.partition("#")[0].strip()
                    printed[words] = printed.get(words, "") + person.types(words)
        look_at(person, printed)


def look_at(person: Person, printed: dict[str, str]) -> None:
    """See in what the commands have printed that they have done what the page says."""
    first, second = printed["iris-ray dev run mine -- python train.py 15"].split("step 0: ")[1:]
    assert "step 10: loss 3" in first, "it hardly moves"
    assert "step 10: loss 0.0" in second, "the edit has arrived"
    if "cell" in printed:
        assert sorted(line.partition("| ")[2] for line in printed["cell"].splitlines()) == [
            "'process 0 of 2'", "'process 1 of 2'"
        ]  # fmt: skip
    assert "long-" in printed["iris-ray ls"]
    assert printed["iris-ray exec long-1a2b3c4d --all-tasks -- uptime"].count("load average") == 2
    assert "step 0: loss" in printed['iris-ray logs long-1a2b3c4d --grep "step 0"']
    assert "train.py" in printed["iris-ray job stacks long-1a2b3c4d"]
    assert len([*person.here.glob("long-*-0.svg")]) == 1
    assert len([*person.here.glob("long-*-xprof/plugins/profile/*/task-*.xplane.pb")]) == 2
    assert "{'trainer': [4, 0], 'samplers': None}" in printed["python group.py"]
    why = "ValueError: the loss is"
    assert why in printed["iris-ray history --state failed --since 1d"]
    assert "crashed" in printed["iris-ray history night-1a2b3c4d"]
    assert why in printed["iris-ray logs night-1a2b3c4d --tail 20"]
    (report,) = person.here.glob("night-*.report.txt")
    assert why in report.read_text()
    assert "ann" in printed["iris-ray report"]
