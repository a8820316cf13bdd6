"""A program as a model, in this process instead of a slot's."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from iris_ray.errors import InvalidSlotError
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.slots.actors.model_call import ModelCall, StoppedError
from iris_ray.slots.actors.runner_agent import RunnerAgent
from iris_ray.slots.actors.slot_actor import LoadedModel
from iris_ray.slots.client import served_command
from iris_ray.slots.client.served_command import ProgramAnswer, ServedCommand, ServedProgram
from tests.support import served_program
from tests.support.gangs import alive
from tests.support.waiting import wait_until

NOT_HTTP = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        server.accept()[0].sendall(b"SSH-2.0 and so on")
"""
REDIRECTS = """
import http.server, sys

class Redirects(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        to = "http://127.0.0.1:%s/v1" % sys.argv[1 if b"itself" in asked else 2]
        self.send_response(307)
        self.send_header("Location", to)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"there")

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Redirects).serve_forever()
"""
PROGRAM = [sys.executable, served_program.__file__, "--port", "{port}"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def model(trace: Path) -> Iterator[LoadedModel]:
    loaded = LoadedModel()
    loaded._model = ServedProgram(ServedCommand([*PROGRAM, "--load", "0.3", "--trace", str(trace)]), "m")
    loaded._model.load()
    yield loaded
    loaded.unload()


def pids(trace: Path) -> list[int]:
    return [int(pid) for pid in trace.read_text().splitlines()[0].split()[1:]]


def test_program_answers_whole_and_in_pieces(model: LoadedModel) -> None:
    whole = model.answer({"model": "m", "prompt": "a b"}, ModelCall(model.loop))
    assert isinstance(whole, ProgramAnswer)
    assert (whole.status, whole.content_type) == (200, "application/json")
    assert whole.json()["choices"][0]["text"] == "A B"
    pieces = list(model.pieces({"model": "m", "prompt": "a b", "stream": True}, ModelCall(model.loop)))
    assert {piece.content_type for piece in pieces} == {"text/event-stream"}
    assert b"".join(piece.body for piece in pieces).endswith(b"data: [DONE]\n\n")
    refused = model.answer({"model": "m", "prompt": "bad"}, ModelCall(model.loop))
    assert (refused.status, refused.json()["error"]["message"]) == (400, "no such word")
    (busy,) = model.pieces({"model": "m", "prompt": "busy", "stream": True}, ModelCall(model.loop))
    assert (busy.status, busy.body) == (503, b"")


@pytest.fixture
def elsewhere() -> Iterator[tuple[int, list[str]]]:
    """A server that is not the program: its port, and what it was asked."""
    asked: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            leads = {"/moved": "/well", "/away": f"http://localhost:{server.server_port}/well"}
            self.send_response(307 if self.path in leads else 200)
            if self.path in leads:
                self.send_header("Location", leads[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, asked
        server.shutdown()


def test_redirect_of_a_program_is_passed_on_and_not_followed(elsewhere: tuple[int, list[str]]) -> None:
    port, asked = elsewhere
    loaded = LoadedModel()
    loaded._model = ServedProgram(ServedCommand([sys.executable, "-c", REDIRECTS, "{port}", str(port)]), "m")
    loaded._model.load()
    try:
        there = f"http://127.0.0.1:{port}/v1"
        whole = loaded.answer({"prompt": "a"}, ModelCall(loaded.loop))
        assert whole == ProgramAnswer(307, "text/html", b"there", there)
        (piece,) = loaded.pieces({"prompt": "a", "stream": True}, ModelCall(loaded.loop))
        assert piece == whole
        assert loaded.answer({"prompt": "itself"}, ModelCall(loaded.loop)).location == "/v1"
    finally:
        loaded.unload()
    assert asked == []


@pytest.mark.parametrize(("health", "leads"), [("/moved", "/well"), ("/away", "http://localhost:{port}/well")])
def test_redirect_is_no_sign_of_health(elsewhere: tuple[int, list[str]], health: str, leads: str) -> None:
    port, asked = elsewhere
    program = ServedProgram(ServedCommand("serve {port}", health=health), "m")
    program._url = f"http://127.0.0.1:{port}"
    assert not program.health()
    assert asked == [f"GET {health}"]
    assert program._unhealthy == f"{health} answered 307, a redirect to {leads.format(port=port)}"


def test_stopped_call_leaves_the_program(model: LoadedModel, trace: Path) -> None:
    call = ModelCall(model.loop)
    pieces = model.pieces({"model": "m", "prompt": "wait", "stream": True}, call)
    assert next(pieces).status == 200
    threading.Timer(0.2, call.stop).start()
    with pytest.raises(StoppedError):
        list(pieces)
    wait_until(lambda: "the caller has gone" in trace.read_text())


def test_program_gets_its_environment_and_its_output_is_the_slots(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IRIS_SLOT_MEMORY_SHARE", "0.25")  # it has this process's variables, too
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which can't lead back to this host
    share = ["sh", "-c", 'echo "share $IRIS_SLOT_MEMORY_SHARE {share} {share:.3f}"; exec "$@"', "sh"]
    program = ServedProgram(ServedCommand([*share, *PROGRAM], environment={"SAY": "I speak"}), "m")
    program.load()
    try:
        said = ""

        def is_said() -> bool:
            nonlocal said
            said += capfd.readouterr().out
            return "share 0.25 0.25 0.250\nI speak\n" in said

        wait_until(is_said)
    finally:
        asyncio.run(program.unload())


def test_slot_of_a_program_that_lives_but_is_unwell_ends(trace: Path) -> None:
    code = f"""
import time
from ray import cloudpickle
from iris_ray.slots.actors import slot_actor
from iris_ray.slots.actors.model_call import ModelCall
from iris_ray.slots.client.served_command import ServedCommand, ServedProgram
slot_actor.HEALTH_S = 0.05
served = ServedCommand({[*PROGRAM, "--trace", str(trace)]!r})
slot = slot_actor.LoadedModel()
assert slot.load(cloudpickle.dumps((ServedProgram, {{"served": served, "model": "m"}}))) is None
time.sleep(1)
print("was well", flush=True)
slot.answer({{"model": "m", "prompt": "unwell"}}, ModelCall(slot.loop))
time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    for pid in pids(trace):
        psutil.Process(pid).kill()  # as the agent does
    assert "was well" in done.stdout
    assert done.returncode == 1
    assert "the model was not well 3 times in a row: health() returned False; its slot ends" in done.stderr


def test_end_is_sigterm_then_the_whole_tree(model: LoadedModel, trace: Path) -> None:
    model.unload()
    assert trace.read_text().splitlines()[-1] == "SIGTERM"
    wait_until(lambda: not any(map(alive, pids(trace))))


def test_agent_ends_what_a_gone_slot_has_started(trace: Path) -> None:
    code = f"""
import os
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.slots.client.served_command import ServedCommand, ServedProgram
ServedProgram(ServedCommand({[*PROGRAM, "--trace", str(trace)]!r}), "m").load()
print(ProcessIdentity.of_this_process().started, flush=True)
os._exit(9)
"""

    async def gone() -> bool:
        slot = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        said, _ = await slot.communicate()
        assert all(map(alive, pids(trace)))
        process = ProcessIdentity(slot.pid, int(said.split()[-1]))
        return await RunnerAgent.wait_gone(made, process, 20.0)

    made: Any = object.__new__(RunnerAgent)
    assert asyncio.run(gone())
    assert not any(map(alive, pids(trace)))


@pytest.mark.parametrize(
    ("command", "load_s", "why"),
    [
        ([*PROGRAM, "--fail", "no weights"], 30.0, "ended with 1 before it was healthy; its last words: no weights"),
        ([*PROGRAM, "--load", "60"], 0.5, "was not healthy within 0.5 s: /health"),
        (
            [sys.executable, "-c", NOT_HTTP, "{port}"],
            1.0,
            "was not healthy within 1 s: /health did not answer",
        ),
        ([*PROGRAM, "--fail", "x" * 10**5], 30.0, f"its last words: x{{{served_command.MOST_SAID}}}$"),
        ("no-such-program-at-all {port}", 1.0, "can't be started: No such file or directory; is it installed"),
    ],
    ids=["ends", "late", "not HTTP", "says much", "missing"],
)
def test_failed_load_says_why(command: Any, load_s: float, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        ServedProgram(ServedCommand(command, load_s=load_s), "m").load()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"command": ""}, "command is ''"),
        ({"command": "serve --port 80"}, "has no {port}"),
        ({"command": "serve {port} {gpus}"}, "can't be filled in"),
        ({"command": "serve {port} {model.size}"}, "can't be filled in"),
        ({"command": "serve {port} {memory[0]}"}, "can't be filled in"),
        ({"command": "serve {port}", "health": "health"}, "give a path"),
        ({"command": "serve {port}", "load_s": 0}, "load_s is 0"),
        ({"command": "serve {port}", "environment": {"A": 1}}, "environment must be a mapping"),
    ],
    ids=str,
)
def test_senseless_command_is_refused_at_once(wrong: Any, why: str) -> None:
    with pytest.raises(InvalidSlotError, match=why):
        ServedCommand(**wrong)


def test_request_without_a_route_is_refused(model: LoadedModel) -> None:
    with pytest.raises(InvalidSlotError, match="messages, prompt, input"):
        model.answer({"model": "m"}, ModelCall(model.loop))
