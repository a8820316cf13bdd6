"""One run of a program on all hosts of a held job: connections to their warm processes, output as it comes."""

import contextlib
import json
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from iris_ray.actors.host.task_environment import split_by_start
from iris_ray.dev.code_directory import CodeDirectory, CodeFile, as_wire
from iris_ray.dev.held_job import Held, HeldHost, find, remembered, wait_for_hosts
from iris_ray.dev.warm_process import ERR, FILE, INPUT, OUT
from iris_ray.errors import SessionError, TaskMovedError
from iris_ray.framing import FACTS, Connection, ConnectionLost, Frame

if TYPE_CHECKING:
    from iris_ray.remote.laptop_end import TunnelInThread
    from iris_ray.terminal import LiveLine

CONNECT_S = 3.0
TOGETHER_S = 5.0
"""The time in which programs must end by themselves after another host's program has failed, or Ctrl-C; seconds."""
GONE_S = 15.0
"""The time in which a host must say that it has ended a run; seconds."""
MOST_THREADS = 64
MOST_PIECES = 64
"""The limit for pieces of output that wait to be shown; beyond it, the programs wait."""

T = TypeVar("T")


class HostPiece(NamedTuple):
    """Output of one host, or a note.

    Attributes:
        host: the host.
        data: some output.
        is_err: whether it is of stderr.
        note: a message for the person, in place of output.
    """

    host: HeldHost
    data: bytes = b""
    is_err: bool = False
    note: str = ""


class Sent(NamedTuple):
    """The part of a directory that was sent.

    Attributes:
        files: the number of files that differed on some host.
        size: their size in bytes.
    """

    files: int
    size: int


def _reach(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), CONNECT_S)


class HeldRun:
    """A run; use it in a ``with`` statement, at whose end no process of it is left.

    Args:
        held: the job. All its hosts take part.
        reach: connects to an address.

    Attributes:
        lost: the host that was lost or is given back, in words; empty if none was.
        refused: the host that could not make the run or go on with it, and why; empty if none was.

    Raises:
        ConnectionError: a host can't be reached, or has become another job's.
    """

    def __init__(self, held: Held, reach: Callable[[str, int], socket.socket] = _reach) -> None:
        self._held = held
        self._reach = reach
        self._codes: dict[HeldHost, int | None] = {}
        self._said: queue.Queue[tuple[HeldHost, bytes, Any]] = queue.Queue(MOST_PIECES)
        self._end_at = float("inf")
        self._is_over = False
        self.lost = self.refused = ""
        self._connections: dict[HeldHost, Connection] = {}
        try:
            self._everywhere(self._connect, held.hosts)
        except OSError as error:
            self.__exit__(None, None, None)
            raise ConnectionError(f"{held.job_id}: a host does not answer: {error}") from error

    @property
    def hosts(self) -> tuple[HeldHost, ...]:
        return self._held.hosts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        for connection in self._connections.values():
            connection.end()

    def start(
        self, code: CodeDirectory, words: Sequence[str], env: Mapping[str, str], told: Callable[[Sent], object]
    ) -> None:
        """Send the files that a host lacks, and start a program in the directory on all hosts at the same time.

        Args:
            code: the directory.
            words: the program and its arguments.
            env: variables besides those of the task.
            told: is called with the part that was sent, before the program starts.

        Raises:
            SessionError: a host refuses, or is lost; then the program has started nowhere.
        """
        asked = {
            "files": as_wire(list(code.files.values())),
            "words": list(words),
            "env": dict(env),
            "warm": not split_by_start(env, ("jax",))[0],  # a variable that acts when a process starts
        }
        by_digest = {file.digest: file for file in code.files.values() if file.link is None}

        def send(host: HeldHost) -> set[str]:
            connection = self._connections[host]
            connection.say(**asked)
            missing = self._answer(host)["missing"]
            for digest in missing:
                connection.send(Frame(FILE, data=_content(code, by_digest[digest])))
            self._answer(host)
            return {*missing}

        sent = set[str]().union(*self._everywhere(self._or_lost(send), self._held.hosts))
        told(Sent(len(sent), sum(by_digest[digest].size for digest in sent)))
        for host in self._held.hosts:
            self._or_lost(lambda host: self._connections[host].say(go=True))(host)
        for host in self._held.hosts:
            threading.Thread(target=self._listen, args=(host,), name="iris_ray.held_run", daemon=True).start()

    def pieces(self) -> Iterator[HostPiece]:
        """Yield output and notes of the hosts, until no process of the run is left.

        Raises:
            TaskMovedError: a host was lost, or is given back; the message says which, and what to do.
            SessionError: a host could not go on with the run; the message says which, and why.
        """
        while len(self._codes) < len(self._connections):
            try:
                host, kind, said = self._said.get(timeout=max(0.0, min(1.0, self._end_at - time.monotonic())))
            except queue.Empty:
                self._end_if_due()
                continue
            if kind in (OUT, ERR):
                yield HostPiece(host, said, kind == ERR)
            elif "notice" in said:
                yield HostPiece(host, note=f"is to go: {said['notice']}")
            elif "over" in said:
                self.lost = f"{host.label} is given back: {said['over']}"
            else:
                self._codes[host] = said.get("exit_code")
                if said.get("lost"):
                    self.lost = self.lost or f"{host.label} is lost"
                if "error" in said:
                    self.refused = self.refused or f"{host.label}: {said['error']}"
                if self._codes[host] != 0:
                    self._end_at = min(self._end_at, time.monotonic() + (0.0 if self.lost else TOGETHER_S))
                if self._codes[host] and len(self._codes) < len(self._connections):
                    yield HostPiece(host, note=f"has ended with code {self._codes[host]}; so do the others")
        if self.lost:
            raise TaskMovedError(
                f"{self.lost}, and the run has ended with it on all hosts. Its files there are gone. Run it again,"
                f" which waits for other hosts and sends everything there: iris-ray dev run {self._held.name} -- …"
            )
        if self.refused:
            raise SessionError(f"{self.refused}; the run has ended on all hosts; run it again")

    @property
    def exit_code(self) -> int:
        """The exit code after the end: that of the first program that failed; 137 if one was killed from here."""
        failed = [code for code in self._codes.values() if code != 0]  # in the order of their ends
        return next((code for code in failed if code is not None), 137) if failed else 0

    def signal(self, number: int) -> None:
        """Send a signal to the programs."""
        self._tell_all(lambda connection: connection.say(signal=int(number)))

    def interrupt(self) -> None:
        """Interrupt the programs, as Ctrl-C does, and have them killed after `TOGETHER_S`."""
        self._end_at = min(self._end_at, time.monotonic() + TOGETHER_S)
        self.signal(signal.SIGINT)

    def write(self, data: bytes) -> None:
        """Give bytes to the stdin of each program; no bytes mean its end."""
        self._tell_all(lambda connection: connection.send(Frame(INPUT, data=data)))

    def end(self) -> None:
        """Have the hosts kill the run's processes. `pieces` goes on until they have."""
        for connection in self._connections.values():
            connection.end_sending()
        self._end_at = float("inf")
        timer = threading.Timer(GONE_S, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        for host in self._held.hosts:
            if host not in self._codes:
                self._said.put((host, FACTS, {"lost": True}))

    def _end_if_due(self) -> None:
        if time.monotonic() >= self._end_at:
            self.end()

    def _tell_all(self, tell: Callable[[Connection], object]) -> None:
        for host, connection in self._connections.items():
            if host not in self._codes:
                try:
                    tell(connection)
                except OSError:
                    continue  # its listener notices the loss

    def _listen(self, host: HeldHost) -> None:
        connection = self._connections[host]
        while True:
            try:
                frame = connection.receive()
                kind, said = frame.kind, frame.facts if frame.kind == FACTS else frame.data
            except ConnectionLost:
                kind, said = FACTS, {"exit_code": None, "lost": True}
            while not self._is_over:
                with contextlib.suppress(queue.Full):
                    self._said.put((host, kind, said), timeout=1.0)
                    break
            if self._is_over or (kind == FACTS and "exit_code" in said):
                return

    def _answer(self, host: HeldHost) -> dict[str, Any]:
        answer = self._connections[host].hear()
        if "error" in answer:
            raise SessionError(f"{host.label}: {answer['error']}")
        return answer

    def _or_lost(self, ask: Callable[[HeldHost], T]) -> Callable[[HeldHost], T]:
        def asked(host: HeldHost) -> T:
            try:
                return ask(host)
            except ConnectionLost as error:
                raise TaskMovedError(
                    f"{host.label} is lost ({error}); run it again: iris-ray dev run"
                    f" {self._held.name} -- …, which waits for other hosts"
                ) from None

        return asked

    def _connect(self, host: HeldHost) -> None:
        self._connections[host] = Connection(self._reach(host.address, host.port))
        self._connections[host].prove(host.token, calls=True)

    def _everywhere(self, ask: Callable[[HeldHost], T], hosts: Sequence[HeldHost]) -> list[T]:
        if len(hosts) == 1:
            return [ask(hosts[0])]
        with ThreadPoolExecutor(min(MOST_THREADS, len(hosts))) as threads:
            return list(threads.map(ask, hosts))


def _content(code: CodeDirectory, file: CodeFile) -> bytes:
    try:
        return code.content(file)
    except OSError as error:
        raise SessionError(f"{file.path!r} has changed meanwhile ({error.strerror}); run it again") from None


def try_remembered(name: str, cluster: str) -> HeldRun | None:
    """Begin a run on the hosts of the run before, without asking anybody; None if that is not possible any more."""
    if (known := remembered(name, cluster)) is None:
        return None
    try:
        return HeldRun(known)
    except ConnectionError:
        return None


def begin(name: str, cluster: str, line: "LiveLine") -> HeldRun:
    """Begin a run; wait for the hosts if they are not there yet, or are no more. This process is in the cluster.

    Args:
        name, cluster: as in `Held`.
        line: shows the reason of a wait.

    Raises:
        UnknownNameError: this user holds nothing of that name.
        TaskNotRunningError: the job has ended meanwhile.
        SessionError: the hosts do not answer, and the job does not get others.
    """
    job_id = find(name).job_id
    unreachable: Held | None = None
    while True:
        held = wait_for_hosts(name, cluster, job_id, line, unreachable)
        try:
            return HeldRun(held)
        except ConnectionError as error:
            if held == unreachable:
                raise SessionError(
                    f"{error}. This machine must reach the hosts of the cluster at any port: see docs/ports.md, or give"
                    " the dashboard's address"
                ) from None
            unreachable = held


def begin_through(tunnel: "TunnelInThread", name: str, cluster: str) -> HeldRun:
    """Begin a run on hosts that only the head can reach, once they wait for it.

    Args:
        tunnel: to the head.
        name, cluster: as in `Held`.

    Raises:
        SessionError: this user holds nothing of that name, or the hosts do not answer; the message says why.
    """
    facts = json.loads(tunnel.output_of("dev", HOSTS, name))
    held = Held(name, cluster, facts["job_id"], tuple(HeldHost(**host) for host in facts["hosts"]))
    try:
        return HeldRun(held, tunnel.connect)
    except ConnectionError as error:
        raise SessionError(f"{error}; try again in a moment: the job gets others if they are lost") from None


HOSTS = "hosts"
"""The command below ``dev`` by which the head says where held hosts are. It has tokens, and is not for people."""
