"""``iris-ray serve`` as people run it: a file of models, changed while they are asked; attacked, and its hosts lost."""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from iris_ray import SlotClient
from iris_ray.http_server import MOST_BODIES, MOST_CONNECTIONS
from iris_ray.slots.cli import GRACE_S
from iris_ray.testing import SimulatedCluster
from tests.support import served_program
from tests.support.command_line import command_line, environment
from tests.support.processes import host_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof
SECRET = "sk-" + "a" * 20
FILE = f"""
name = "serve"
port = 0
[[hosts]]
memory_gb = 1
[models.words]
command = "{sys.executable} {served_program.__file__} --port {{port}}"
memory_gb = 0.4
replicas = 1
aliases = ["gpt"]
[keys.alice]
secret = "{SECRET}"
"""


ON_TWO_HOSTS = FILE.replace("[[hosts]]\nmemory_gb = 1", '[[hosts]]\ntpu_type = "v4-16"\nmemory_gb = 16').replace(
    "memory_gb = 0.4\nreplicas = 1", "memory_gb = { 4 = 10 }\nconcurrency = 8\nreplicas = 2"
)
attacks: Any = importlib.import_module("benchmarks.slots_front")
MOST_DESCRIPTORS = MOST_CONNECTIONS + 300
"""Of the server: its connections, and what Ray has."""
MOST_GROWTH = MOST_BODIES + 256 * 2**20
"""By how many bytes the server may grow: the bodies of requests, and what is made of them."""


@contextmanager
def serving(cluster: SimulatedCluster, path: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    command = command_line("serve", str(path))
    variables = environment(cluster)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path.parent), variables.get("PYTHONPATH", ""))))
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": variables}
    with subprocess.Popen(command, **how) as process:
        try:
            assert process.stdout is not None
            yield process, next(found[1] for line in process.stdout if (found := re.search(r"at (http\S+/v1);", line)))
        finally:
            process.kill()


def test_file_is_served_changed_without_loss_and_ended(cluster: SimulatedCluster, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FILE)
    with serving(cluster, path) as (process, url), openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0) as user:
        assert process.stdout is not None

        def ask(model: str) -> Any:
            """Return the pid of the program, which it adds to its answer."""
            return user.completions.create(model=model, prompt="a").to_dict()["pid"]

        pids = {ask("gpt")}
        deadline = time.monotonic() + 60
        with ThreadPoolExecutor(1) as pool:

            def keep_asking() -> int:
                asked = 0
                while len(pids) == 1 and time.monotonic() < deadline:
                    pids.add(ask("words"))
                    asked += 1
                return asked

            asking = pool.submit(keep_asking)
            path.write_text(FILE.replace("{port}", "{port} --load 0.5").replace("gpt", "gpt-2"))
            process.send_signal(signal.SIGHUP)
            assert "words is changed" in next(line for line in process.stdout if "changed" in line)
            assert asking.result() >= 1
        assert len(pids) == 2, "another program answers, and no request was lost"
        assert [model.id for model in user.models.list()] == ["words", "gpt-2"]
        (tmp_path / "broken_model.py").write_text("def f(:")
        path.write_text(f"{FILE}[models.broken]\nclass = 'broken_model:X'\nmemory_gb = 0.1\n".replace("0.4", "0.3"))
        process.send_signal(signal.SIGHUP)
        assert "[models.broken]: class 'broken_model:X'" in next(line for line in process.stdout if "broken" in line)
        assert user.completions.create(model="words", prompt="a").choices[0].text == "A"
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(lambda: list(user.completions.create(model="words", prompt="a wait", stream=True)))
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="closing"):
                last.result()
            assert process.wait(60) == 0


def test_lost_slot_manager_is_replaced_meanwhile_callers_come_back(cluster: SimulatedCluster, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(FILE)
    with serving(cluster, path) as (process, url), openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0) as user:

        def pid() -> Any:
            try:
                return user.completions.create(model="gpt", prompt="a").to_dict()["pid"]
            except openai.InternalServerError as error:
                if (error.status_code, error.response.headers["Retry-After"]) != (503, "10"):
                    raise
            time.sleep(0.1)
            return None

        first = pid()
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended meanwhile
                if "SlotManager" in " ".join(each.cmdline()):
                    each.kill()
        assert wait_until(pid, 120) != first
        path.write_text(FILE.replace("gpt", "gpt-2"))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: [model.id for model in user.models.list()] == ["words", "gpt-2"])
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_after_sigterm_requests_finish_and_programs_end(cluster: SimulatedCluster, tmp_path: Path) -> None:
    path, trace = tmp_path / "models.toml", tmp_path / "trace"
    path.write_text(FILE.replace("{port}", f"{{port}} --trace {trace}"))
    with serving(cluster, path) as (process, url), openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0) as user:
        stream = iter(user.completions.create(model="words", prompt="a pause b", stream=True))
        pieces = [next(stream).choices[0].text]
        process.send_signal(signal.SIGTERM)
        pieces += [piece.choices[0].text for piece in stream]
        assert pieces == ["a", *["pause"] * 20, "b"]
        assert process.wait(GRACE_S) == 0
    (pids,) = [line.split()[1:] for line in trace.read_text().splitlines() if line.startswith("pids")]
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids))


def test_models_of_a_group_take_turns_and_idle_ones_end(cluster: SimulatedCluster, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    one = FILE.replace("replicas = 1\naliases", 'group = "one of both"\nidle_s = 2\naliases')
    (model,) = re.findall(r"(?s)\[models.words\]\n(.*)\naliases", one)
    path.write_text(f"{one}[models.other]\n{model}".replace("memory_gb = 0.4", "memory_gb = 0.1"))
    with serving(cluster, path) as (_, url), openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0) as user:
        client = SlotClient.connect("serve")
        for name in ("words", "other", "words"):
            assert user.completions.create(model=name, prompt="a").choices[0].text == "A"
            assert len({row.model for row in client.status().slots if row.state == "ready"}) == 1
        wait_until(lambda: not client.status().slots, 60)


class Users:
    """Four users of OpenAI's client, who ask until the test is over."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.answered = 0
        self.wrong: list[object] = []
        self.pids: set[int] = set()

    def __enter__(self) -> "Users":
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def ask_more(self, count: int) -> None:
        """Wait for so many more answers."""
        most = self.answered + count
        wait_until(lambda: self.answered >= most or bool(self.wrong), 120)

    def _ask(self) -> None:
        with openai.OpenAI(base_url=self._url, api_key=SECRET, max_retries=0) as user:
            while not self._over.wait(0.05):
                try:
                    answer = user.completions.create(model="gpt", prompt="a b")
                    self.pids.add(answer.to_dict()["pid"])  # type: ignore[arg-type]
                    if answer.choices[0].text != "A B":
                        self.wrong.append(answer)
                except openai.OpenAIError as error:
                    self.wrong.append(error)
                self.answered += 1


class Watch:
    """Notes the most memory and descriptors that a process has."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.began = self.memory()
        self.most_memory = self.most_descriptors = 0

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def memory(self) -> int:
        resident = Path(f"/proc/{self._pid}/statm").read_text().split()[1]
        return int(resident) * os.sysconf("SC_PAGE_SIZE")

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.most_memory = max(self.most_memory, self.memory())
            self.most_descriptors = max(self.most_descriptors, len(os.listdir(f"/proc/{self._pid}/fd")))


def answer_to(port: int, attack: str) -> bytes:
    """Attack once, and return all that comes until the server closes the connection; it has to."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        try:
            connection.sendall(attacks.ATTACKS[attack][0]())
            while data := connection.recv(2**16):
                got += data
        except ConnectionError:
            pass
    return got


@pytest.mark.way_in
def test_callers_are_answered_through_attack_and_lost_hosts(cluster: SimulatedCluster, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(ON_TWO_HOSTS)
    with serving(cluster, path) as (process, url), ThreadPoolExecutor(len(attacks.ATTACKS)) as pool:
        client, port = SlotClient.connect("serve"), int(url.split(":")[2].partition("/")[0])
        wait_until(lambda: len(ready(client)) == 2, 60)
        with Users(url) as users:
            users.ask_more(20)
            with Watch(process.pid) as watch, attacks.attacked(port, list(attacks.ATTACKS)):
                users.ask_more(20)
                answers = {name: pool.submit(answer_to, port, name) for name in attacks.ATTACKS}
                first, second = ready(client)
                os.kill(first, signal.SIGKILL)
                wait_until(lambda: len(users.pids) == 3, 60)
                cluster.kill_host(*host_of(cluster, second))
                wait_until(lambda: len(users.pids) == 4, 60)
                users.ask_more(20)
                found = {name: answer.result() for name, answer in answers.items()}
            users.ask_more(20)
        assert users.wrong == []
        for name, answer in found.items():
            assert not answer or re.match(rb"HTTP/1.1 (4\d\d|503) ", answer), f"{name}: {answer[:200]!r}"
        assert 0 < watch.most_descriptors <= MOST_DESCRIPTORS
        assert watch.most_memory - watch.began <= MOST_GROWTH
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def ready(client: SlotClient) -> list[int]:
    """The processes of slots that are ready."""
    return [row.pid for row in client.status().slots if row.state == "ready" and row.pid]
