"""A notebook whose cells run on held hosts, with a real Jupyter kernel."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iris_ray.client.dev.held_job import remember
from tests.support.command_line import REPOSITORY
from tests.support.held_hosts import HeldHosts

pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'iris-ray[notebook]'")
pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("default")]  # Jupyter's are not ours

WAIT_S = 60.0


class Notebook:
    """A notebook with a kernel of its own."""

    def __init__(self, kernel: Any, client: Any) -> None:
        self.kernel = kernel
        self.client = client

    def run(self, cell: str, during: Any = None) -> tuple[bool, str, str]:
        """Run a cell. Return whether it went well, and what it has shown on stdout and stderr, and as its error."""
        shown = {"stdout": "", "stderr": ""}

        def show(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown[content["name"]] += content["text"]
                if during is not None:
                    during(content["text"])
            elif message["msg_type"] == "error":
                shown["stderr"] += content["evalue"]

        reply = self.client.execute_interactive(cell, timeout=WAIT_S, output_hook=show)
        return reply["content"]["status"] == "ok", shown["stdout"], shown["stderr"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[HeldHosts]:
    with HeldHosts.of(tmp_path, 2) as hosts:
        hosts.held = replace(hosts.held, cluster="auto")
        yield hosts


@pytest.fixture
def notebook(hosts: HeldHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    from jupyter_client.manager import KernelManager

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    remember(hosts.held)
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "IPYTHONDIR": str(tmp_path / "ipython")}
    kernel = KernelManager(connection_file=str(tmp_path / "kernel.json"))
    assert kernel.kernel_spec is not None
    kernel.kernel_spec.argv[0] = sys.executable
    kernel.start_kernel(cwd=str(hosts.here), env=environ)
    client = kernel.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=WAIT_S)
        opened = Notebook(kernel, client)
        assert opened.run("%load_ext iris_ray") == (True, "", "")
        yield opened
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
        kernel.cleanup_resources()


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_cells_run_on_all_hosts_until_they_are_lost(hosts: HeldHosts, notebook: Notebook) -> None:
    hosts.write(helper="def double(x):\n    return 2 * x\n")
    is_well, out, err = notebook.run("%%slice mine\nimport os, helper\nhost = os.getcwd()[-6]\nx = helper.double(4)")
    assert (is_well, out) == (True, "")
    assert err.startswith("sent 1 of 1 files")
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
    assert "run again what you need of In [2], In [3], In [4], In [5], In [6], In [7]" in err
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
