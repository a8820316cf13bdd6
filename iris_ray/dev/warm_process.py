"""The process that waits on a held host with modules imported, and forks for each run: user code starts at once.

It has one thread and no connection to Ray, so the fork is safe. The fork is a run's keeper: it takes what the person's
process sends, starts the program in a fork of its own, and passes output, input and signals on. When the
program ends, or the connection closes, it ends the program's whole tree.
"""

import contextlib
import fcntl
import importlib
import itertools
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import process
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from iris_ray.actors.protocol.services import call_hooks, installed_services, module_of
from iris_ray.actors.protocol.task_files import TaskFiles, survive_notices
from iris_ray.dev.code_copy import CodeCopy
from iris_ray.dev.code_directory import CodeFile
from iris_ray.fair_limits import BACKLOG
from iris_ray.framing import Connection, ConnectionLost, Door, Frame
from iris_ray.processes.subtree import (
    as_shells_say,
    end_descendants,
    end_with_parent,
    read_of_process,
    reap,
    take_orphans,
)
from iris_ray.terminal import show_each_line

FREE_S, FREE_POLL_S = 2.0, 0.02
"""The time in which the run before, which is being ended, must be gone."""
LOOK_S = 0.5
"""The interval between two checks whether the run has to end; seconds."""
CHUNK_BYTES = 1 << 16

OUT, ERR, INPUT, FILE = b"o", b"e", b"i", b"f"
"""The kinds of frames besides facts."""

Program = Callable[[], None]


class HeldDirectory:
    """The directory of one held host: the copy of the code, and files by which its processes communicate.

    Args:
        path: exists, and is this attempt's own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def taken(self) -> Iterator[bool]:
        """Take the host for a run within the block. Yield whether it was free."""
        with open(self.path / "run", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    @property
    def used(self) -> Path:
        """A file whose time is that of the latest beginning or end of a run."""
        return self.path / "used"

    @property
    def over(self) -> Path:
        """A file with the reason, once the host is given back."""
        return self.path / "over"


def serve(listener: socket.socket, token: str, directory: HeldDirectory) -> Program:
    """Fork for each connection that proves the token, for ever. Return the program to run, in a run's process only."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    door = Door(listener, token, Connection)
    while True:
        connection = door.next()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads of preloaded modules do not matter
                is_run = os.fork() == 0
        except OSError as error:  # at the host's limit of processes
            is_run = False
            with contextlib.suppress(ConnectionLost):
                connection.say(error=f"the host can't start a process now: {error.strerror}")
        if is_run:
            door.close()
            return _keep(connection, directory)
        connection.close()


def _keep(connection: Connection, directory: HeldDirectory) -> Program:
    """Be the keeper of one run: end this process with it. Return the program to run, in its process only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in module_of("sessions", "keeper").DEFAULTS:
        signal.signal(number, signal.SIG_IGN)  # it ends after its tree, not before
    take_orphans()
    with contextlib.suppress(ConnectionLost):  # the person's process is gone
        try:
            return _Run(connection, directory).begin()
        except OSError as error:
            connection.say(error=f"the host can't make the run now: {error.strerror}", exit_code=None)
    os._exit(0)


class _Run:
    def __init__(self, connection: Connection, directory: HeldDirectory) -> None:
        self._person = connection
        self._directory = directory
        self._files = TaskFiles.of_this_task()

    def begin(self) -> Program:
        """Do all of a run and end this process; in the process of its program, return the program."""
        asked = self._person.hear()
        deadline = time.monotonic() + FREE_S
        while True:
            with self._directory.taken() as is_ours:
                if is_ours:
                    if (program := self._begin(asked)) is not None:
                        return program
                    os._exit(0)
            if time.monotonic() > deadline:
                self._person.say(error="another run goes on here; end it, or wait for its end")
                os._exit(0)
            time.sleep(FREE_POLL_S)

    def _begin(self, asked: dict[str, Any]) -> Program | None:
        try:
            copy = self._receive(asked)
        except (ValueError, OSError) as error:
            self._person.say(error=f"the directory can't be written there: {error}")
            return None
        self._person.say(ready=True)
        if not self._person.hear().get("go"):
            return None
        self._directory.used.touch()
        streams = [os.pipe() for _ in range(3)]
        keeper, root = os.getpid(), os.fork()
        if root == 0:
            end_with_parent(keeper)
            module_of("sessions", "keeper").settle()
            return self._become(asked, copy, streams)
        (theirs, into), (out, its_out), (err, its_err) = streams
        for descriptor in (theirs, its_out, its_err):
            os.close(descriptor)
        self._pump(root, into, {out: OUT, err: ERR})
        self._directory.used.touch()
        return None

    def _receive(self, asked: dict[str, Any]) -> CodeCopy:
        copy = CodeCopy(self._directory.path)
        wanted = [CodeFile(path, digest, 0, executable, link) for path, digest, executable, link in asked["files"]]
        missing = copy.missing(wanted)
        self._person.say(missing=missing)
        contents = {}
        for digest in missing:
            frame = self._person.receive()
            if frame.kind != FILE:
                raise ConnectionLost(f"a frame of kind {frame.kind!r} came in place of a file")
            contents[digest] = frame.data
        copy.update(wanted, contents)
        return copy

    def _pump(self, root: int, into: int, outputs: dict[int, bytes]) -> None:
        """Pass bytes and signals on until the program's tree is gone, and tell its exit code, or why it was ended."""
        code: int | None = None
        trouble = {}
        try:
            code = self._pump_until_end(root, into, outputs)
        except ConnectionLost:  # so is the run
            pass
        except OSError as error:
            trouble["error"] = f"the host can't watch the program: {error.strerror}"
        end_descendants()
        for descriptor, kind in outputs.items():
            while self._pass_on(descriptor, kind):
                pass
        self._person.say(exit_code=None if code is None else as_shells_say(code), **trouble)

    def _pump_until_end(self, root: int, into: int, outputs: dict[int, bytes]) -> int | None:
        """Return the exit code of the program as the kernel says it; None if the run ends before.

        Raises:
            ConnectionLost: the other end is gone, or has ended the run.
        """
        pidfd, poll = os.pidfd_open(root), select.poll()
        given = _Input(into, poll)
        for descriptor in (self._person.fileno(), pidfd, *outputs):
            poll.register(descriptor, select.POLLIN)
        look_at, told = 0.0, False
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(LOOK_S * 1000)}
            for descriptor in ready & outputs.keys():
                if not self._pass_on(descriptor, outputs[descriptor]):
                    poll.unregister(descriptor)
            if self._person.fileno() in ready:
                frame = self._person.receive()
                if frame.kind == INPUT:
                    given.add(frame.data)
                elif "signal" in (said := frame.facts):
                    with contextlib.suppress(OSError):  # it has ended, or there is no such signal
                        os.killpg(root, int(said["signal"]))
            given.write()
            if root in (codes := reap()):
                return codes[root]
            if (now := time.monotonic()) >= look_at:
                look_at = now + LOOK_S
                self._person.require_other_end()
                if self._is_over():
                    return None
                told = told or self._tell_notice(root)

    def _pass_on(self, descriptor: int, kind: bytes) -> bool:
        """Pass output on, and return whether there was any."""
        if data := os.read(descriptor, CHUNK_BYTES):
            self._person.send(Frame(kind, data=data))
        return bool(data)

    def _is_over(self) -> bool:
        """Return whether the host is given back, and say so."""
        try:
            why = self._directory.over.read_text()
        except OSError:
            return False
        self._person.say(over=why)
        return True

    def _tell_notice(self, root: int) -> bool:
        """Tell of the task's notice once there is one. Return whether all who must know do."""
        notice = None if self._files is None else self._files.read_notice()
        if notice is None:
            return False
        try:
            is_told = _catches(root, signal.SIGTERM)
        except OSError:  # such as too many open files on the host: the next look tries again
            return False
        self._person.say(notice=notice.reason)
        if is_told:
            os.kill(root, signal.SIGTERM)
        return True

    def _become(self, asked: dict[str, Any], copy: CodeCopy, streams: Sequence[tuple[int, int]]) -> Program:
        """Make this process the run's. Return a Python program; execute any other program in its place."""
        (stdin, _), (_, stdout), (_, stderr) = streams
        for stream, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, stream)
        for descriptor in itertools.chain(*streams):
            os.close(descriptor)
        self._person.close()
        words = asked["words"]
        try:
            os.chdir(copy.path)
            os.environ.update(asked["env"])
            program = python_program(words) if asked["warm"] else None
            if _is_absent_python(words[0]):
                note = f"iris-ray: {words[0]} is not on this host; the task's Python runs, {sys.executable}\n"
                os.write(2, note.encode())
                words = [sys.executable, *words[1:]]
            if program is not None:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGPIPE, signal.SIG_IGN)
                if self._files is not None:
                    survive_notices(self._files)
                    call_hooks((service.in_process for service in installed_services()), self._files)
                return program
            os.execvp(words[0], words)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            os.write(2, f"iris-ray: {words[0]!r} can't be started on this host: {why}\n".encode())
            os._exit(127)


class _Input:
    """Input that a program has yet to read from its stdin, a pipe. A poll ends when more can be written."""

    def __init__(self, into: int, poll: "select.poll") -> None:
        os.set_blocking(into, False)
        self._into: int | None = into
        self._poll = poll
        self._rest = bytearray()
        self._ends = False

    def add(self, data: bytes) -> None:
        """Add bytes; none mean the end."""
        self._rest += data
        self._ends = self._ends or not data

    def write(self) -> None:
        """Write as much as the pipe takes now."""
        if self._into is None:
            return
        with contextlib.suppress(KeyError):
            self._poll.unregister(self._into)
        try:
            while self._rest:
                del self._rest[: os.write(self._into, self._rest)]
        except BlockingIOError:
            self._poll.register(self._into, select.POLLOUT)
            return
        except OSError:  # nobody reads it
            self._ends = True
        if self._ends:
            os.close(self._into)
            self._into = None


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; raise OSError if that can't be told now."""
    lines = read_of_process(pid, "status").splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith(b"SigCgt")), 0)
    return bool(caught >> (number - 1) & 1)


# -- Python programs ---------------------------------------------------------------------------------------------------


PYTHONS = "python", "python3"
"""The names by which a program asks for the task's interpreter."""


def _is_absent_python(word: str) -> bool:
    """Return whether a word is the path of an interpreter that this host lacks, such as that of a laptop."""
    return "/" in word and os.path.basename(word) in PYTHONS and not os.path.exists(word)


def python_program(words: Sequence[str]) -> Program | None:
    """Return the program of ``python SCRIPT``, ``-m MODULE`` or ``-c CODE`` for a forked process; None for others.

    A path before ``python`` is that of another interpreter, or does not exist on this host, and then this one runs.
    """
    folder, name = os.path.split(words[0])
    if name not in PYTHONS or (
        folder and os.path.exists(words[0]) and not os.path.samefile(folder, os.path.dirname(sys.executable))
    ):
        return None
    rest = list(words[1:])
    if rest[:1] == ["-u"]:
        del rest[0]
    match rest:
        case ["-m", module, *arguments]:
            return lambda: _as_main(["-m", *arguments], "", lambda: runpy.run_module(module, None, "__main__", True))
        case ["-c", code, *arguments]:
            return lambda: _as_main(["-c", *arguments], "", lambda: _execute(code.encode(), "<string>"))
        case [script, *arguments] if not script.startswith("-"):
            folder = str(Path(script).resolve().parent)
            return lambda: _as_main([script, *arguments], folder, lambda: _execute(_text_of(script), script))
    return None


def _text_of(script: str) -> bytes:
    try:
        return Path(script).read_bytes()
    except OSError as error:
        print(f"python: can't open file {script!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _execute(text: bytes, file: str) -> None:
    main = types.ModuleType("__main__")
    if file != "<string>":
        main.__file__ = file
    sys.modules["__main__"] = main
    exec(compile(text, file, "exec", dont_inherit=True), main.__dict__)


def _as_main(arguments: list[str], folder: str, run: Callable[[], object]) -> NoReturn:
    """Run a program as the interpreter would: its arguments, its folder, its streams, and how its errors are told."""
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # spawned processes look for their script there
    sys.argv = arguments
    sys.path.insert(0, folder)
    show_each_line()
    random.seed()
    if (of_numpy := sys.modules.get("numpy.random")) is not None:
        of_numpy.seed()  # else each run would draw the same numbers
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        users = error.with_traceback(_users_part(error.__traceback__))
        sys.excepthook(type(users), users, users.__traceback__)
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    sys.exit(0)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and (trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>")):
        trace = trace.tb_next
    return trace


def main() -> None:
    """Import modules, listen, print the port, and serve, as a line of JSON on stdin asks."""
    end_with_parent()
    wanted = json.loads(sys.stdin.readline())
    answer = os.dup(1)
    os.dup2(2, 1)  # modules may print when they are imported
    problems = []
    for module in wanted["preload"]:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            problems.append(f"{module} can't be imported ahead: {type(error).__name__}: {error}")
    listener = socket.create_server((wanted["address"], 0), backlog=BACKLOG)
    with open(answer, "w") as told:
        print(json.dumps({"port": listener.getsockname()[1], "problems": problems}), file=told)
    serve(listener, wanted["token"], HeldDirectory(Path(wanted["directory"])))()


if __name__ == "__main__":
    main()
