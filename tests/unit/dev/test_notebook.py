"""A notebook whose cells run on held hosts, with a real Jupyter kernel."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from iris_ray.dev.held_job import remember
from tests.support.command_line import REPOSITORY
from tests.support.held_hosts import HeldHosts
from tests.support.notebooks import Notebook

pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("default")]  # Jupyter's are not ours


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[HeldHosts]:
    with HeldHosts.of(tmp_path, 2) as hosts:
        hosts.held = replace(hosts.held, cluster="auto")
        yield hosts


@pytest.fixture
def notebook(hosts: HeldHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    remember(hosts.held)
    with Notebook.opened(hosts.here, tmp_path, {**os.environ, "PYTHONPATH": str(REPOSITORY)}) as opened:
        yield opened


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_cells_run_on_all_hosts_until_they_are_lost(hosts: HeldHosts, notebook: Notebook) -> None:
    hosts.write(helper="def double(x):\n    return 2 * x\n")
    is_well, out, err = notebook.run("%%slice mine\nimport os, helper\nhost = os.getcwd()[-6]\nx = helper.double(4)")
    assert (is_well, out) == (True, "")
    assert err.startswith("sent 1 of 1 file")
    assert lines(notebook.run("%%slice mine\nprint('on', host)\nx + 1")[1]) == [
        "v4-16-0/0| 9", "v4-16-0/0| on 0", "v4-16-0/1| 9", "v4-16-0/1| on 1"
    ]  # fmt: skip

    is_well, out, err = notebook.run("%%slice mine\nif host == '1':\n    raise KeyError('mine')\nprint('fine')")
    assert (is_well, out) == (False, "v4-16-0/0| fine\n")
    assert "v4-16-0/1|     raise KeyError('mine')\n" in err
    assert "the cell failed on v4-16-0/1" in err
    assert "client/dev" not in err

    def interrupt(text: str) -> None:
        begun.append(text)
        if "".join(begun).count("begun") == 2 and len(begun) < 9:
            begun.extend([""] * 9)
            notebook.kernel.interrupt_kernel()

    begun: list[str] = []
    cell = "%%slice mine\nimport time\nprint('begun', flush=True)\ntime.sleep(60)"
    is_well, _, err = notebook.run(cell, interrupt)
    assert not is_well
    assert err.count("KeyboardInterrupt") == 2
    assert lines(notebook.run("%%slice mine\nx")[1]) == ["v4-16-0/0| 8", "v4-16-0/1| 8"]  # variables are there still

    hosts.there[1].over.write_text("nothing has run on it")
    is_well, _, err = notebook.run(cell)
    assert not is_well
    assert "v4-16-0/1 is given back: nothing has run on it. The next %%slice mine begins with fresh processes" in err
    assert "if you need them, run these cells again: In [2], In [3], In [4], In [5], In [6], In [7]" in err
    hosts.there[1].over.unlink()
    is_well, _, err = notebook.run("%%slice mine\nx")
    assert not is_well
    assert "NameError: name 'x' is not defined" in err

    assert notebook.run("%slice mine --end") == (True, "", "")
    assert hosts.run("python", "-c", "print(1)")[1] == ["1\n"] * 2  # the hosts are free


def test_magic_that_can_not_work_is_refused(notebook: Notebook) -> None:
    for cell, says in (
        ("%slice mine", "%slice NAME --end"),
        ("%%slice\n1", "required: name"),
        ("%%slice a b\n1", "unrecognized"),
    ):
        is_well, _, err = notebook.run(cell)
        assert not is_well
        assert says in err
