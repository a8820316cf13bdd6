"""``iris-ray dev run`` on hosts that are known from the run before: no cluster is asked."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.cli.conventions import INTERRUPTED, USAGE
from iris_ray.dev.held_job import Held, remember
from tests.support.command_line import REPOSITORY, address_of_nobody, command_line, invoke
from tests.support.held_hosts import HeldHosts


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldHosts]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with HeldHosts.of(tmp_path, 2) as hosts:
        hosts.held = Held("mine", "auto", hosts.held.job_id, hosts.held.hosts)
        remember(hosts.held)
        yield hosts


def start(hosts: HeldHosts, *words: str) -> "subprocess.Popen[str]":
    command = command_line("dev", "run", "mine", "--", *words)
    return subprocess.Popen(command, cwd=hosts.here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_run_prints_by_host_and_ends_with_code(hosts: HeldHosts) -> None:
    hosts.write(train="import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(os.getcwd()[-6] == '1')")
    (hosts.here / ".env").write_text("KEY=1")
    with start(hosts, "python", "train.py") as run:
        out, err = run.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["v4-16-0/0| out", "v4-16-0/1| out"]
    assert run.returncode == 1
    said, *rest = err.splitlines()
    assert said.startswith("iris-ray: sent 1 of 1 file, ")
    assert said.endswith("; left out: .env (looks like a secret)")
    assert {"v4-16-0/0| err", "v4-16-0/1| err"} <= {*rest}


def test_ctrl_c_ends_programs_that_ignore_it(hosts: HeldHosts) -> None:
    hosts.write(train="import signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(60)")
    with start(hosts, "python", "train.py") as run:
        assert run.stdout is not None
        assert {run.stdout.readline() for _ in range(2)} == {"v4-16-0/0| 1\n", "v4-16-0/1| 1\n"}
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.5)
        run.communicate(timeout=60)
    assert run.returncode == INTERRUPTED


def test_file_with_way_is_for_this_account_only(hosts: HeldHosts, tmp_path: Path) -> None:
    (file,) = (tmp_path / "cache/iris_ray/dev").iterdir()
    assert os.stat(file.parent).st_mode & 0o077 == 0
    assert hosts.held.hosts[0].token not in repr(hosts.held)


def test_run_whose_hosts_are_gone_asks_cluster(hosts: HeldHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    for warm in hosts.warm:
        warm.kill()
        warm.wait()
    address = address_of_nobody()
    remember(Held("mine", address, hosts.held.job_id, hosts.held.hosts))
    result = invoke("dev", "run", "mine", "--address", address, "--", "python", "train.py")
    assert f"nothing answers at {address}" in result.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("dev", "v4-16", "--name", "a/b"), "--name is 'a/b'; give letters"),
        (("dev", "hold", "v4-17", "--address", "127.0.0.1:1"), "'v4-17' is not a TPU type"),
        (("dev", "hold"), "give the TPU type once"),
        (("dev", "run", "mine"), "Missing argument 'COMMAND...'"),
    ],
)
def test_dev_that_can_not_work_is_refused(words: tuple[str, ...], says: str) -> None:
    result = invoke(*words)
    assert result.exit_code == USAGE
    assert says in result.output
