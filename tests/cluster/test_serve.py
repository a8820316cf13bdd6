"""``iris-ray serve`` as people run it: a file of models, changed while they are asked."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from iris_ray.testing import SimulatedCluster
from tests.support import served_program
from tests.support.command_line import command_line, environment

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
            assert asking.result() > 1
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
