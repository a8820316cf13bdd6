"""A model that is a program, on real slots behind the HTTP front: it is started, asked, lost and ended."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from iris_ray import SlotClient, SlotHosts
from iris_ray.slots import HttpFront, ServedCommand
from iris_ray.testing import SimulatedCluster
from tests.support import llama_server, served_program
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof
MB = 2**20


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def slots(cluster: SimulatedCluster, trace: Path) -> Iterator[SlotClient]:
    command = [sys.executable, served_program.__file__, "--port", "{port}", "--load", "0.5", "--trace", str(trace)]
    with SlotClient([SlotHosts(memory=500 * MB)]) as client:
        client.register(ServedCommand(command, memory={1: 400 * MB}, load_s=60.0), "words")
        client.register(ServedCommand([*command, "--fail", "no weights"], memory={1: 400 * MB}, load_s=60.0), "broken")
        yield client


def pids(trace: Path) -> list[list[str]]:
    return [line.split()[1:] for line in trace.read_text().splitlines() if line.startswith("pids")]


def alive(numbers: list[str]) -> list[int]:
    found = [psutil.Process(int(each)) for each in numbers if psutil.pid_exists(int(each))]
    return [each.pid for each in found if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.way_in
def test_program_serves_dies_returns_and_leaves_nothing(slots: SlotClient, trace: Path) -> None:
    with HttpFront(slots) as front, openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as user:
        assert user.completions.create(model="words", prompt="a b").choices[0].text == "A B"
        assert "memory 419430400 share 0.8000" in trace.read_text()
        stream = user.completions.create(model="words", prompt="a wait", stream=True)
        assert next(iter(stream)).choices[0].text == "a"
        stream.close()
        wait_until(lambda: "the caller has gone" in trace.read_text())
        with pytest.raises(openai.APIStatusError):  # it crashes each slot, until it may not run again
            user.completions.create(model="words", prompt="die")
        assert user.completions.create(model="words", prompt="again").choices[0].text == "AGAIN"
        assert len(pids(trace)) >= 2
        (row,) = [row for row in slots.status().slots if row.model == "words"]
        slots.evict(row.slot_id)
        wait_until(lambda: "SIGTERM" in trace.read_text())
        wait_until(lambda: not any(map(alive, pids(trace))))


def test_program_that_does_not_start_says_why(slots: SlotClient) -> None:
    future = slots.submit("broken", {"prompt": "a"})
    wait_until(lambda: any("no weights" in row.waits_for for row in slots.status().models))
    future.cancel()


@pytest.mark.way_in
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="pip install -e '.[llama]': llama.cpp's server"
)
def test_llama_cpp_serves_openais_client(cluster: SimulatedCluster, tmp_path: Path) -> None:
    llama_server.write_tiny_model(tmp_path / "tiny.gguf")
    command = [sys.executable, llama_server.__file__, "--port", "{port}", "--alias", "{model}"]
    llama = ServedCommand([*command, "--model", str(tmp_path / "tiny.gguf")], memory={1: 400 * MB}, load_s=60.0)
    with SlotClient([SlotHosts(memory=500 * MB)]) as client, HttpFront(client, aliases={"gpt": "tiny"}) as front:
        client.register(llama, "tiny", concurrency=2)
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as user:
            whole = user.completions.create(model="gpt", prompt="hello", max_tokens=8)
            assert (whole.model, whole.choices[0].finish_reason) == ("tiny", "length")
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 8
            how: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            *_, last = user.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})
            assert last.usage.completion_tokens == 5
            with pytest.raises(openai.BadRequestError):  # llama.cpp's own words
                user.chat.completions.create(
                    **{**how, "messages": [{"role": "user"}], "max_tokens": 1, "temperature": "hot"}
                )
