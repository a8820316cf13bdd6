"""``iris-ray serve`` as people run it: a file of models, changed while they are asked; attacked, and its hosts lost."""

import importlib
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from iris_ray import SlotClient
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
LEAST_P99_MS = 20.0
"""What the slowest of a hundred answers takes on a busy machine without any attack."""


@contextmanager
def serving(cluster: SimulatedCluster, path: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    command = command_line("serve", str(path))
    how: Any = {"stdout": subprocess.PIPE, "text": True, "env": environment(cluster)}
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
        path.write_text(FILE.replace("memory_gb = 1", "memory_gb = -1"))
        process.send_signal(signal.SIGHUP)
        assert user.completions.create(model="words", prompt="a").choices[0].text == "A"
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(lambda: list(user.completions.create(model="words", prompt="a wait", stream=True)))
            time.sleep(1.0)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="closing"):
                last.result()
            assert process.wait(60) == 0
            assert time.monotonic() - began < 20


class Users:
    """Four users of OpenAI's client, who ask until the test is over."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.took: list[float] = []
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

    def p99_ms(self, seconds: float) -> float:
        """Return the 99th of a hundred of what answers take during so many seconds."""
        before = len(self.took)
        time.sleep(seconds)
        return 1000 * statistics.quantiles(self.took[before:], n=100)[98]

    def _ask(self) -> None:
        with openai.OpenAI(base_url=self._url, api_key=SECRET, max_retries=0) as user:
            while not self._over.wait(0.05):
                began = time.monotonic()
                try:
                    answer = user.completions.create(model="gpt", prompt="a b")
                    self.pids.add(answer.to_dict()["pid"])  # type: ignore[arg-type]
                    if answer.choices[0].text != "A B":
                        self.wrong.append(answer)
                except openai.OpenAIError as error:
                    self.wrong.append(error)
                self.took.append(time.monotonic() - began)


@contextmanager
def attacked(port: int) -> Iterator[None]:
    """Attack a server in all ways that the benchmark knows, at once."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    attacker = spawn.Process(target=attacks.attack, args=(port, list(attacks.ATTACKS), there))
    attacker.start()
    try:
        for _ in attacks.ATTACKS:
            here.recv()
        yield
    finally:
        attacker.kill()
        attacker.join()


@pytest.mark.proof
def test_everybody_is_answered_while_server_is_attacked_and_slot_and_host_die(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    path = tmp_path / "models.toml"
    path.write_text(ON_TWO_HOSTS)
    with serving(cluster, path) as (process, url):
        client = SlotClient.connect("serve")
        wait_until(lambda: len(ready(client)) == 2, 60)
        with Users(url) as users:
            users.p99_ms(2.0)
            quiet = users.p99_ms(5.0)
            with attacked(int(url.split(":")[2].partition("/")[0])):
                under_attack = users.p99_ms(10.0)
                first, second = ready(client)
                os.kill(first, signal.SIGKILL)
                wait_until(lambda: len(users.pids) == 3, 60)
                cluster.kill_host(*host_of(cluster, second))
                wait_until(lambda: len(users.pids) == 4, 60)
            assert users.p99_ms(2.0)
        assert users.wrong == []
        assert len(users.took) > 200
        assert under_attack <= 3 * max(quiet, LEAST_P99_MS), f"{quiet:.1f} ms, and {under_attack:.1f} ms under attack"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def ready(client: SlotClient) -> list[int]:
    """The processes of slots that are ready."""
    return [row.pid for row in client.status().slots if row.state == "ready" and row.pid]
