"""A held host: runs of a person's directory, a preemption that a run hears of, and the next attempt on the same host.

The acting process is the host's: it is the warm process and, one after the other, the keepers of the runs. The person's
process is another one, in which no operation fails, and so are the programs.
"""

import contextlib
import io
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.dev import warm_process
from iris_ray.dev.code_directory import CodeDirectory
from iris_ray.dev.held_job import Held, HeldHost, _new_directory
from iris_ray.dev.held_run import HeldRun
from iris_ray.dev.warm_process import HeldDirectory, _keep, _Run
from iris_ray.errors import SessionError, TaskMovedError
from iris_ray.framing import Connection, Door
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.processes import subtree
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario

LOOPBACK, TOKEN = "127.0.0.1", "every-operation"
GONE_S = 10.0
"""The time after which nothing of a run may run any more; seconds."""
DAEMON = (
    "env -i setsid sh -c 'echo $$ > {place}/daemon; exec sleep 60' & until [ -s {place}/daemon ]; do sleep 0.01; done"
)
PLAIN = f"{DAEMON}; cat train.txt lib/model.txt; exit 3"
PREEMPTED = f"trap 'echo told; exit 5' TERM; {DAEMON}; echo begun; while :; do sleep 0.02; done"
FILES: list[dict[str, str]] = [
    {"train.txt": "one\n", "lib/model.txt": "b = 1\n" * 3000},
    {"train.txt": "two\n", "lib/model.txt": "b = 1\n" * 3000, "lib/new.txt": "new\n"},
    {"train.txt": "three\n", "lib/model.txt": "b = 3\n" * 3000},
]
"""The person's directory in each run. The second run is preempted."""
fork, exit_now, pipe, stat, listdir, close, unlink = (
    os.fork,
    os._exit,
    os.pipe,
    os.stat,
    os.listdir,
    os.close,
    os.unlink,
)


def held() -> Scenario:
    return Scenario(
        "held",
        _prepare,
        _act,
        _judge,
        (OSError,),
        {"an unknown end counts as success": _succeed, "a daemon outlives its run": _let_daemon_live},
    )


def _prepare(place: Path) -> None:
    for number, files in enumerate(FILES):
        for name, text in files.items():
            file = place / f"here{number}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    (place / "person").touch()


def _expected(number: int) -> tuple[int, str]:
    if number == 1:
        return 5, "begun\ntold\n"
    return 3, FILES[number]["train.txt"] + FILES[number]["lib/model.txt"]


# -- the person --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _person(place: Path, listener: socket.socket, operations: Operations) -> Iterator[Callable[[], bool]]:
    """Have a person's process make the runs. Yield a function that returns whether it has ended.

    It is not a child of this process: a keeper ends all of those.
    """
    port = listener.getsockname()[1]
    alive, ends = pipe()
    if (pid := fork()) == 0:
        operations.disarm()
        os.setpgid(0, 0)
        if fork() == 0:
            close(alive)
            listener.close()
            with contextlib.suppress(BaseException), open(place / "person", "a", buffering=1) as told:
                for number in range(len(FILES)):
                    told.write(_run(place, port, number) + "\n")
        exit_now(0)
    close(ends)
    os.waitpid(pid, 0)

    def is_gone() -> bool:
        return bool(select.select([alive], [], [], 0.0)[0])

    try:
        yield is_gone
    finally:
        deadline = time.monotonic() + GONE_S
        while not is_gone():
            assert time.monotonic() < deadline, "the person waits for ever"
            time.sleep(0.01)
        close(alive)


def _run(place: Path, port: int, number: int) -> str:
    """Make one run. Return what the person is told of it, as a line."""
    out, notes, trouble, code = b"", list[str](), "", None
    host = Held("mine", "", "dev-mine", (HeldHost(0, "v4-8-0/0", LOOPBACK, port, TOKEN),))
    try:
        with HeldRun(host) as run:
            words = ["sh", "-c", (PREEMPTED if number == 1 else PLAIN).format(place=place)]
            run.start(CodeDirectory.look(place / f"here{number}"), words, {}, lambda _: None)
            for piece in run.pieces():
                out += piece.data
                notes += [piece.note] if piece.note else []
                if piece.data == b"begun\n":
                    TaskFiles(str(place / "task")).write_notice(Notice(NoticeKind.PREEMPTION, "spot", time.time() + 60))
            code = run.exit_code
    except (SessionError, TaskMovedError, ConnectionError) as error:
        trouble = type(error).__name__
    except BaseException as error:
        trouble = repr(error)
    return json.dumps([number, code, out.decode(), notes, trouble])


# -- the host ----------------------------------------------------------------------------------------------------------


class _Exited(BaseException):
    """A keeper's process has ended."""


def _act(place: Path, said: Said, operations: Operations) -> None:
    warm_process.LOOK_S = 0.05
    setattr(subtree, "pids", _pids)  # noqa: B010
    files = TaskFiles(str(place / "task"))
    os.environ[TaskFiles.VARIABLE] = files.prefix
    with socket.create_server((LOOPBACK, 0)) as listener, _person(place, listener, operations) as is_gone:
        door = Door(listener, TOKEN, Connection)
        try:
            while not is_gone():
                with _new_directory(place / "dev-0") as directory:
                    while not is_gone() and not _is_there(files.notice):
                        if (connection := door.look(0.02)) is not None:
                            _be_keeper(connection, directory, operations, place)
                if _is_there(files.notice):  # the next attempt has files of its own
                    unlink(files.notice)
        finally:
            door.close()


def _be_keeper(connection: Connection, directory: HeldDirectory, operations: Operations, place: Path) -> None:
    """Be the keeper of one run, to its end. What the kernel does when a process ends is done after it."""
    roots: list[int] = []
    before = {*listdir("/proc/self/fd")}
    counted = os.fork

    def forked() -> int:
        if (pid := counted()) == 0:
            operations.disarm()
            os.fork, os._exit = counted, exit_now
        else:
            roots.append(pid)
        return pid

    def exited(_: int) -> NoReturn:
        raise _Exited

    os.fork, os._exit = forked, exited  # type: ignore[assignment]
    try:
        _keep(connection, directory)
    except _Exited:
        pass
    finally:
        os.fork, os._exit = counted, exit_now
        connection.close()
        for number in {*listdir("/proc/self/fd")} - before:
            with contextlib.suppress(OSError):
                close(int(number))
        for root in roots:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(root, signal.SIGKILL)
                os.waitpid(root, 0)
    _require_nothing_runs(place)


def _pids() -> list[int]:
    """Return this process and its descendants. To read of each process of the machine would be thousands of operations.

    The kernel gives an orphan to this process at once.
    """
    found = [os.getpid()]
    for pid in found:
        found += map(int, _content(Path(f"/proc/{pid}/task/{pid}/children")).split())
    every = {*os.listdir("/proc")}
    return [pid for pid in found if str(pid) in every]


def _content(path: Path) -> bytes:
    with contextlib.suppress(OSError), io.FileIO(str(path)) as file:  # no operation of the scenario
        return file.readall()
    return b""


def _is_there(path: Path) -> bool:
    try:
        stat(path)
    except FileNotFoundError:
        return False
    return True


def _require_nothing_runs(place: Path) -> None:
    """Raise AssertionError if the daemon of a run still runs."""
    pid = _daemon(place)
    deadline = time.monotonic() + GONE_S
    while pid and _is_there(Path("/proc", pid)):
        assert time.monotonic() < deadline, f"{pid}, the daemon of a run, still runs"
        time.sleep(0.01)


def _daemon(place: Path) -> str:
    return _content(place / "daemon").decode().strip()


def _judge(place: Path, said: list[list[Any]]) -> None:
    deadline = time.monotonic() + GONE_S
    told = place / "person"
    while len(lines := told.read_text().splitlines()) < len(FILES):
        assert time.monotonic() < deadline, f"the person waits for ever, after {len(lines)} runs"
        time.sleep(0.01)
    for number, code, out, notes, trouble in map(json.loads, lines):
        assert trouble in ("", "SessionError", "TaskMovedError", "ConnectionError"), (number, trouble)
        whole = _expected(number)
        assert whole[1].startswith(out), (number, "not what the program prints", out[:100])
        if not trouble:
            assert (code, out) == whole, (number, code, len(out))
            assert notes == (["is to go: spot"] if number == 1 else []), (number, notes)
    if pid := _daemon(place):  # that of a killed keeper ends with the attempt, by the host
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    with _new_directory(place / "dev-0") as directory:
        assert [*directory.path.iterdir()] == [directory.used]
    assert not (place / "dev-0").exists()


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _succeed() -> None:
    until_end = _Run._pump_until_end

    def ended(run: _Run, *args: Any) -> int | None:
        try:
            return until_end(run, *args)
        except OSError:
            return 0

    setattr(_Run, "_pump_until_end", ended)  # noqa: B010


def _let_daemon_live() -> None:
    setattr(warm_process, "end_descendants", lambda: None)  # noqa: B010
