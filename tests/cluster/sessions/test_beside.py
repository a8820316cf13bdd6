"""Commands, terminals and ports beside the tasks of a real gang; whatever ends them leaves no process."""

import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import ray

from iris_ray import IrisClient, run_on_pod_ray
from iris_ray.cli.conventions import FAILED, INTERRUPTED
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import command_line, environment, iris
from tests.support.gangs import Trace, actor_pid, alive, all_jobs
from tests.support.waiting import wait_until

WAIT_S = 120.0


def daemon(file: Path) -> str:
    """A command that starts what leaves its parent, its session and its variables, tells its pid, and waits."""
    return f"env -i setsid sh -c 'echo $$ > {file}; exec sleep 600' & sleep 600"


def pid_in(file: Path) -> int:
    return int(wait_until(lambda: file.exists() and file.read_text(), WAIT_S))


@pytest.fixture
def job(cluster: SimulatedCluster, tmp_path: Path) -> Iterator[tuple[str, Trace]]:
    """A gang of two tasks that run, with one more attempt if one fails."""
    trace = Trace(tmp_path)
    gang = ray.remote(max_calls=1, runtime_env={"env_vars": {"MINE": "of the user"}})(trace.gang())
    results = run_on_pod_ray.remote(gang, "v4-16", max_retries_failure=3, keep_warm=20)
    (first, _) = trace.wait_for_tasks(2)
    yield first["job"], trace
    trace.finish()
    ray.get(results, timeout=WAIT_S)


@pytest.mark.parametrize("everywhere", [False, True])
def test_exec_has_tasks_environment_on_its_host(
    cluster: SimulatedCluster, job: tuple[str, Trace], everywhere: bool
) -> None:
    name, trace = job
    script = "import os; print(os.environ['MINE'], os.environ['IRIS_TASK_INDEX'], os.getcwd(), os.getppid())"
    if not everywhere:
        done = iris(cluster, "exec", f"{name}/1", "--", "python", "-c", script)
        pid = trace.starts(1)[1]["pid"]
        assert done.stdout.split()[:4] == ["of", "the", "user", "1"]
        assert done.stdout.split()[4] == os.readlink(f"/proc/{pid}/cwd")
        return
    done = iris(
        cluster, "exec", name, "--all-tasks", "--", "sh", "-c", 'echo "$MINE"; exit $IRIS_TASK_INDEX', code=FAILED
    )
    assert sorted(line.partition("| ")[2] for line in done.stdout.splitlines()) == ["of the user"] * 2
    assert len({line.partition("| ")[0] for line in done.stdout.splitlines()}) == 2
    answer = IrisClient().exec(name, ["cat"], input=b"from Python")
    assert (answer.returncode, answer.stdout) == (0, b"from Python")


@pytest.mark.parametrize("ends", ["client", pytest.param("session", marks=pytest.mark.proof), "attempt", "host actor"])
def test_no_process_outlives_its_session(
    cluster: SimulatedCluster, job: tuple[str, Trace], tmp_path: Path, ends: str
) -> None:
    name, trace = job
    file = tmp_path / "daemon"
    words = command_line("exec", name, "--", "sh", "-c", daemon(file))
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment(cluster)) as command:
        left = pid_in(file)
        first = trace.starts(1)[0]
        match ends:
            case "client":
                command.kill()
            case "session":
                os.kill(actor_pid(cluster, first["slice"], 0, "HostSession"), signal.SIGKILL)
            case "attempt":
                os.kill(trace.starts(1)[1]["pid"], signal.SIGKILL)  # of the other task
            case "host actor":
                os.kill(actor_pid(cluster, first["slice"], 0, "TPUHostActor"), signal.SIGKILL)
        wait_until(lambda: not alive(left), WAIT_S)
        _, said = command.communicate(timeout=WAIT_S)
    if ends in ("attempt", "host actor"):
        assert f"attempt 1 of task 0 of {name}" in said, f"exit code {command.returncode}"
        trace.wait_for_tasks(2, attempt=2)
    else:
        assert len(trace.starts()) == 2, "the job has not noticed"
    if ends != "client":
        assert command.returncode == FAILED


@pytest.mark.proof
def test_ctrl_c_ends_exec_and_leaves_job_alone(
    cluster: SimulatedCluster, job: tuple[str, Trace], tmp_path: Path
) -> None:
    name, trace = job
    file = tmp_path / "daemon"
    words = command_line("exec", name, "--", "sh", "-c", daemon(file))
    with subprocess.Popen(words, env=environment(cluster)) as command:
        left = pid_in(file)
        command.send_signal(signal.SIGINT)
        assert command.wait(WAIT_S) == INTERRUPTED
    assert not alive(left)
    assert len(trace.starts()) == 2
    (status,) = (one for one in all_jobs() if one.job_id == name)
    assert (status.failures, status.preemptions, status.attempt) == (0, 0, 1)


class Person:
    """A person before a real terminal, with a command on it."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self.keyboard, self.terminal = pty.openpty()
        self._poll = select.poll()  # select() refuses descriptors beyond 1,023
        self._poll.register(self.keyboard, select.POLLIN)
        self.before = termios.tcgetattr(self.terminal)
        self.resize(24, 80)
        self.seen = b""
        its, env = self.terminal, env | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=env, start_new_session=True)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def waits_for(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while text.encode() not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if self._poll.poll(100):
                self.seen += os.read(self.keyboard, 65536)
        self.seen = self.seen.partition(text.encode())[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keyboard)
        os.close(self.terminal)


@pytest.fixture
def at_terminal(cluster: SimulatedCluster) -> Iterator[Callable[..., Person]]:
    people: list[Person] = []

    def sit_down(*words: str) -> Person:
        people.append(Person(command_line(*words), environment(cluster)))
        return people[-1]

    yield sit_down
    for person in people:
        person.close()


def test_shell_is_a_terminal_like_any_other(
    job: tuple[str, Trace], at_terminal: Callable[..., Person], tmp_path: Path
) -> None:
    name, trace = job
    person = at_terminal("shell", name, "--", "bash", "--norc", "-i")
    person.waits_for("bash-")
    person.type("echo $MINE, $TERM, $((40 + 2)); tty; stty size\n")
    person.waits_for("of the user, xterm-256color, 42")
    person.waits_for("/dev/pts/")
    person.waits_for("24 80")
    person.resize(50, 120)
    person.process.send_signal(signal.SIGWINCH)
    person.type("sleep 0.5; stty size\n")
    person.waits_for("50 120")
    person.type(f"{daemon(tmp_path / 'daemon')}\n")
    left = pid_in(tmp_path / "daemon")
    person.type("\x03")  # Ctrl-C ends the sleep, not the shell
    person.type("echo still $((6 * 7))\n")
    person.waits_for("still 42")
    person.type("exit 7\n")
    assert person.process.wait(WAIT_S) == 7
    assert termios.tcgetattr(person.terminal) == person.before
    assert not alive(left)
    assert len(trace.starts()) == 2


@pytest.mark.proof
def test_terminal_is_restored_when_task_moves(job: tuple[str, Trace], at_terminal: Callable[..., Person]) -> None:
    name, trace = job
    person = at_terminal("shell", name, "--", "bash", "--norc", "-i")
    person.waits_for("bash-")
    os.kill(trace.starts(1)[0]["pid"], signal.SIGKILL)
    person.waits_for("and this session with it")
    assert person.process.wait(WAIT_S) == FAILED
    assert termios.tcgetattr(person.terminal) == person.before
    trace.wait_for_tasks(2, attempt=2)


@pytest.mark.proof
def test_shell_ends_when_its_terminal_is_gone(
    job: tuple[str, Trace], at_terminal: Callable[..., Person], tmp_path: Path
) -> None:
    person = at_terminal("shell", job[0], "--", "bash", "--norc", "-i")
    person.waits_for("bash-")
    person.type(f"{daemon(tmp_path / 'daemon')}\n")
    left = pid_in(tmp_path / "daemon")
    os.close(person.keyboard)
    person.keyboard = os.open(os.devnull, os.O_RDWR)
    assert person.process.wait(WAIT_S) != 0
    assert not alive(left)


@pytest.mark.proof
def test_port_forward_follows_task_to_its_next_attempt(cluster: SimulatedCluster, tmp_path: Path) -> None:
    def serve(facts: dict[str, object]) -> None:
        import http.server
        import threading
        from pathlib import Path

        class Says(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"attempt {facts['attempt']}".encode() * 10_000)

            def log_message(self, *_: object) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Says) if facts["index"] == 0 else None
        if server is not None:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        while not (Path(directory) / "finish").exists():
            time.sleep(0.02)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = str(tmp_path)
    trace = Trace(tmp_path)
    results = run_on_pod_ray.remote(trace.gang(serve), "v4-16", max_retries_failure=3, keep_warm=0)
    first, _ = trace.wait_for_tasks(2)
    words = command_line("port-forward", first["job"], f"0:{port}")
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment(cluster)) as forward:
        assert forward.stderr is not None
        line = forward.stderr.readline()
        address = line.split()[0]
        assert f"is port {port} on the host of task 0 of {first['job']}" in line
        for _ in range(3):
            with urlopen(address, timeout=WAIT_S) as answer:
                assert answer.read() == b"attempt 1" * 10_000
        os.kill(first["pid"], signal.SIGKILL)
        trace.wait_for_tasks(2, attempt=2)
        while "is port" not in (line := forward.stderr.readline()):
            assert line, "it has ended"

        def answers() -> bytes | None:
            try:
                with urlopen(address, timeout=WAIT_S) as answer:
                    return bytes(answer.read())
            except OSError:  # the server is not up yet
                return None

        assert wait_until(answers, WAIT_S) == b"attempt 2" * 10_000
        trace.finish()
        ray.get(results, timeout=WAIT_S)
        assert forward.wait(WAIT_S) == 0
        assert "has ended: succeeded" in forward.stderr.read()
