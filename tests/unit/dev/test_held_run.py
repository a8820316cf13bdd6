"""Runs on held hosts: real processes, real programs. Nothing of a run outlives it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.dev.code_directory import CodeDirectory
from iris_ray.dev.held_job import Held, HeldHost
from iris_ray.dev.held_run import HeldRun, Sent
from iris_ray.errors import SessionError, TaskMovedError
from iris_ray.framing import MOST_STRANGERS
from iris_ray.model.notices import Notice, NoticeKind
from tests.support.gangs import alive
from tests.support.held_hosts import HeldHosts
from tests.support.waiting import wait_until

DAEMON = """
import os, subprocess, sys, time
print(os.getpid(), flush=True)
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", code], env={}, start_new_session=True)
time.sleep(60)
"""
"""Tells its pid and that of a daemon which leaves its parent, its session and its variables."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldHosts]:
    preload = ["colorsys", "no_such_module", "this"]  # "this" prints when it is imported
    with HeldHosts.of(tmp_path_factory.mktemp("held"), 2, preload) as hosts:
        yield hosts


@pytest.fixture
def hosts(shared: HeldHosts) -> HeldHosts:
    for file in shared.here.iterdir():
        file.unlink()
    return shared


def pids(run: HeldRun, count: int) -> list[int]:
    """Return the pids that a run prints first."""
    said = defaultdict[HeldHost, bytes](bytes)
    for piece in run.pieces():
        said[piece.host] += piece.data
        if sum(of_host.count(b"\n") for of_host in said.values()) == count:
            break
    return [int(pid) for of_host in said.values() for pid in of_host.split()]


def all_gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


def test_program_runs_on_every_host_with_arguments(hosts: HeldHosts) -> None:
    hosts.write(train="import sys, helper\nprint(helper.x, *sys.argv[1:], __name__, 'colorsys' in sys.modules)")
    hosts.write(helper="x = 1")
    sent: list[Sent] = []
    assert hosts.run("python", "train.py", "--steps", "3", sent=sent) == (
        0, ["1 --steps 3 __main__ True\n"] * 2, [""] * 2
    )  # fmt: skip
    hosts.write(helper="x = 'edited'")
    assert hosts.run("python", "-u", "-m", "train", sent=sent)[1] == ["edited __main__ True\n"] * 2
    assert sent[1] == Sent(1, len("x = 'edited'"))


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (("python", "-c", "import sys; sys.exit(3)"), 3, "", ""),
        (("python", "-c", "import sys; sys.exit('why')"), 1, "", "why\n"),
        (("python", "-c", "import os; os.kill(os.getpid(), 9)"), 137, "", ""),
        (("python", "no.py"), 2, "", "python: can't open file 'no.py': No such file or directory\n"),
        (("sh", "-c", 'echo "$A"; exit 4'), 4, "b\n", ""),
        (("python", "-X", "utf8", "-c", "print('cold')"), 0, "cold\n", ""),
        (("no-such-program",), 127, "", "iris-ray: 'no-such-program' can't be started on this host: No such file or"),
    ],
)
def test_program_ends_as_it_would_here(hosts: HeldHosts, words: tuple[str, ...], code: int, out: str, err: str) -> None:
    found, outs, errs = hosts.run(*words, A="b")
    assert (found, outs) == (code, [out] * 2)
    assert all(one.startswith(err) and bool(one) == bool(err) for one in errs)


def test_error_is_told_from_users_first_frame(hosts: HeldHosts) -> None:
    hosts.write(train="def f():\n    raise RuntimeError('mine')\n\nf()\n")
    code, _, errs = hosts.run("python", "train.py")
    assert code == 1
    assert errs[0].splitlines()[:2] == ["Traceback (most recent call last):", '  File "train.py", line 4, in <module>']
    assert errs[0].endswith("RuntimeError: mine\n")


def test_classes_threads_and_exit_handlers_of_program_work(hosts: HeldHosts) -> None:
    hosts.write(
        train="""
import atexit, multiprocessing, pickle, random, threading, time

class Mine: pass

def square(x): return x * x

if __name__ == "__main__":
    atexit.register(print, "at exit")
    pickle.loads(pickle.dumps(Mine()))
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]), random.random())
"""
    )
    first, second = (hosts.run("python", "train.py") for _ in range(2))
    assert first[1][0].splitlines()[-2:] == ["thread", "at exit"] or "thread" in first[1][0]
    assert first[1][0].splitlines()[-1] == "at exit"
    drawn = {text.partition("[9] ")[2].split()[0] for text in (*first[1], *second[1])}
    assert len(drawn) == 4  # no run draws what another has drawn


def test_variable_that_acts_at_start_gets_fresh_process(hosts: HeldHosts) -> None:
    words = ("python", "-c", "import sys; print(sys.flags.hash_randomization, 'colorsys' in sys.modules)")
    assert hosts.run(*words, PYTHONHASHSEED="0")[1] == ["0 False\n"] * 2


def test_path_of_python_chooses_the_interpreter(hosts: HeldHosts, tmp_path: Path) -> None:
    """One that the hosts lack, such as that of a laptop's environment, is the task's, and a line says so."""
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho another python: $2\n")
    other.chmod(0o700)
    assert hosts.run(str(other), "-c", "print(1)") == (0, ["another python: print(1)\n"] * 2, [""] * 2)
    warm = ("-c", "import sys; print('colorsys' in sys.modules)")
    assert hosts.run(sys.executable, *warm) == (0, ["True\n"] * 2, [""] * 2)
    absent = f"iris-ray: /no/where/python is not on this host; the task's Python runs, {sys.executable}\n"
    assert hosts.run("/no/where/python", *warm) == (0, ["True\n"] * 2, [absent] * 2)
    fresh = ("-O", "-c", "import sys; print('colorsys' in sys.modules)")
    assert hosts.run("/no/where/python", *fresh) == (0, ["False\n"] * 2, [absent] * 2)
    assert hosts.run("/no/where/python", *warm, PYTHONHASHSEED="0") == (0, ["False\n"] * 2, [absent] * 2)


def test_programs_read_what_is_given_as_input(hosts: HeldHosts) -> None:
    data = b"x" * 300_000  # more than a pipe takes
    with hosts.begin("python", "-c", "import sys; print(len(sys.stdin.read()))") as run:
        run.write(data)
        run.write(b"")
        said = b"".join(piece.data for piece in run.pieces())
    assert said.count(b"300000") == 2


def test_ctrl_c_reaches_programs_on_all_hosts(hosts: HeldHosts) -> None:
    hosts.write(
        train="import time\ntry:\n    print(1, flush=True)\n    time.sleep(60)\nfinally:\n    print('cleaned up')"
    )
    with hosts.begin("python", "train.py") as run:
        said = b""
        for piece in run.pieces():
            said += b"" if piece.is_err else piece.data
            if b"1" in piece.data and said.count(b"1") == 2:
                run.interrupt()
    assert said.count(b"cleaned up") == 2
    assert run.exit_code == 130


@pytest.mark.parametrize("ends", ["person ends it", "person is gone", "program"])
def test_no_process_outlives_its_run(hosts: HeldHosts, ends: str) -> None:
    hosts.write(train=DAEMON if ends != "program" else DAEMON.replace("time.sleep(60)\n", "time.sleep(1)\n"))
    with hosts.begin("python", "train.py") as run:
        left = pids(run, 4)
        if ends == "person ends it":
            run.end()
        if ends != "person is gone":
            assert not [piece for piece in run.pieces() if piece.data]
            assert all_gone(left)
    wait_until(lambda: all_gone(left), 10.0)


def test_program_that_fails_ends_those_on_others(hosts: HeldHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.dev.held_run.TOGETHER_S", 0.5)
    hosts.write(train="import os, time\nif 'host1' in os.getcwd():\n    raise SystemExit(7)\ntime.sleep(60)\n")
    with hosts.begin("python", "train.py") as run:
        notes = [piece.note for piece in run.pieces() if piece.note]
    assert run.exit_code == 7
    assert notes == ["has ended with code 7; so do the others"]


def test_second_run_waits_for_first_and_is_refused(hosts: HeldHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.write(train=DAEMON)
    with hosts.begin("python", "train.py") as run:
        pids(run, 4)
        with pytest.raises(SessionError, match="another run goes on here"):
            hosts.begin("python", "train.py")
    assert hosts.run("python", "-c", "print(1)")[1] == ["1\n"] * 2


def test_file_that_goes_while_it_is_sent_loses_no_host(hosts: HeldHosts) -> None:
    hosts.write(train="print(1)", other="")
    code = CodeDirectory.look(hosts.here)
    (hosts.here / "other.py").unlink()
    with HeldRun(hosts.held) as run, pytest.raises(SessionError, match=r"^'other.py' has changed meanwhile"):
        run.start(code, ["python", "train.py"], {}, lambda _: None)
    assert hosts.run("python", "train.py")[1] == ["1\n"] * 2


def test_host_that_goes_tells_program_and_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TaskFiles(str(tmp_path / "task"))
    monkeypatch.setenv(TaskFiles.VARIABLE, files.prefix)
    with HeldHosts.of(tmp_path, 1) as hosts:
        hosts.write(
            train="""
import os, signal, time
from iris_ray import preemption_notice
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told\\n"))
os.write(1, b"begun\\n")  # whole lines: the signal may come in the midst of a print
while preemption_notice() is None:
    time.sleep(0.1)
time.sleep(1)
print(preemption_notice().reason)
"""
        )
        with hosts.begin("python", "train.py") as run:
            pieces = []
            for piece in run.pieces():
                pieces.append(piece)
                if b"begun" in piece.data:
                    files.write_notice(Notice(NoticeKind.PREEMPTION, "spot", time.time() + 60))
    assert [piece.note for piece in pieces if piece.note] == ["is to go: spot"]
    assert b"".join(piece.data for piece in pieces) == b"begun\ntold\nspot\n"


@pytest.mark.parametrize("how", ["given back", "lost"])
def test_run_that_loses_host_says_what_to_do(tmp_path: Path, how: str) -> None:
    with HeldHosts.of(tmp_path, 2) as hosts:
        hosts.write(train=DAEMON)
        with hosts.begin("python", "train.py") as run:
            left = pids(run, 4)
            if how == "given back":
                hosts.there[1].over.write_text("nothing has run on it")
            else:
                os.kill(keeper_of(left[0]), signal.SIGKILL)
            with pytest.raises(TaskMovedError, match=rf"{how}.*iris-ray dev run mine"):
                list(run.pieces())


def keeper_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_strangers_cost_no_process_and_hold_nobody_up(hosts: HeldHosts) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * MOST_STRANGERS):
            address = "127.0.0.1", hosts.held.hosts[0].port
            strangers.enter_context(contextlib.closing(socket.create_connection(address))).send(b"\0")
        assert hosts.run("python", "-c", "print(1)")[1] == ["1\n"] * 2
        warm = psutil.Process(hosts.warm[0].pid)
        wait_until(lambda: not warm.children())
        assert len(warm.net_connections()) <= MOST_STRANGERS + 1


FULL = """
import io, os, sys
from iris_ray.dev import warm_process

def refuse_once(owner, name):
    def call(*args, **kwargs):
        who = "keeper" if os.getppid() == warm else "warm" if os.getpid() == warm else "program"
        what = "status" if name == "open" and str(args[0]).endswith("/status") else name
        if os.path.exists(refused := f"{sys.argv[1]} {who} {what}"):
            os.unlink(refused)
            raise OSError(24, "Too many open files")
        return as_before(*args, **kwargs)
    as_before = getattr(owner, name)
    setattr(owner, name, call)

warm = os.getpid()
for name in ("fork", "pipe", "pidfd_open", "chdir", "open"):
    refuse_once(os, name)
refuse_once(io, "open")
warm_process.main()
"""
"""A warm process on a host that refuses an operation once, if there is a file with that operation's name."""


@contextlib.contextmanager
def full_host(tmp_path: Path, refused: str) -> Iterator[Held]:
    """A held host, one of whose processes is refused an operation once, as if the host were full."""
    (tmp_path / f"full {refused}").touch()
    words = [sys.executable, "-P", "-c", FULL, str(tmp_path / "full")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as warm:
        assert warm.stdin is not None
        assert warm.stdout is not None
        with warm.stdin:
            json.dump({"address": "127.0.0.1", "token": "t", "directory": str(tmp_path), "preload": []}, warm.stdin)
        host = HeldHost(0, "v4-8-0/0", "127.0.0.1", json.loads(warm.stdout.readline())["port"], "t")
        try:
            yield Held("mine", "", "dev-mine", (host,))
        finally:
            warm.kill()
    assert not (tmp_path / f"full {refused}").exists()


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ("warm fork", "can't start a process now: Too many open files"),
        ("keeper fork", "can't make the run now: Too many open files; the run has ended on all hosts; run it again"),
        ("keeper pipe", "can't make the run now: Too many open files; the run has ended on all hosts; run it again"),
        ("keeper pidfd_open", "can't watch the program: Too many open files; the run has ended on all hosts"),
    ],
)
def test_full_host_says_so_and_stays_held(tmp_path: Path, refused: str, told: str) -> None:
    def run_true() -> int:
        with HeldRun(held) as run:
            run.start(CodeDirectory(tmp_path, {}, ()), ["true"], {}, lambda _: None)
            assert not [*run.pieces()]
        return run.exit_code

    with full_host(tmp_path, refused) as held:
        with pytest.raises(SessionError, match=f"^v4-8-0/0: the host {told}") as error:
            run_true()
        assert not isinstance(error.value, TaskMovedError)
        assert run_true() == 0


def test_program_that_cannot_enter_its_directory_has_not_succeeded(tmp_path: Path) -> None:
    with full_host(tmp_path, "program chdir") as held, HeldRun(held) as run:
        run.start(CodeDirectory(tmp_path, {}, ()), ["true"], {}, lambda _: None)
        assert [piece.data for piece in run.pieces()] == [
            b"iris-ray: 'true' can't be started on this host: Too many open files\n"
        ]
    assert run.exit_code == 127


def test_program_is_told_of_preemption_though_its_host_is_full_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TaskFiles(str(tmp_path / "task"))
    monkeypatch.setenv(TaskFiles.VARIABLE, files.prefix)
    program = "trap 'echo told; exit 5' TERM; echo begun; for i in $(seq 100); do sleep 0.1; done"
    with full_host(tmp_path, "keeper status") as held, HeldRun(held) as run:
        run.start(CodeDirectory(tmp_path, {}, ()), ["sh", "-c", program], {}, lambda _: None)
        printed = b""
        for piece in run.pieces():
            printed += piece.data
            if piece.data == b"begun\n":
                files.write_notice(Notice(NoticeKind.PREEMPTION, "spot", time.time() + 60))
    assert (run.exit_code, printed) == (5, b"begun\ntold\n")


def test_stranger_without_token_gets_nothing(hosts: HeldHosts) -> None:
    wrong = replace(hosts.held, hosts=tuple(replace(host, token="0" * 32) for host in hosts.held.hosts))
    with pytest.raises(ConnectionError):
        HeldRun(wrong)
    with contextlib.closing(socket.create_connection(("127.0.0.1", hosts.held.hosts[0].port))) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(100):
                pass


def test_much_output_arrives_whole_and_in_order(hosts: HeldHosts) -> None:
    code, outs, _ = hosts.run("python", "-c", "for n in range(100_000): print(n)")
    assert code == 0
    assert outs == ["".join(f"{n}\n" for n in range(100_000))] * 2
