"""A model that is a program: a server of OpenAI's API that a slot starts, watches and asks."""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, ProxyHandler, build_opener

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import VARIABLES, Check, Holds, Seconds, is_name, is_texts, require_fields
from iris_ray.processes.identity import stat_of
from iris_ray.processes.tree import ProcessTree, end_processes
from iris_ray.slots.actors.runner_agent import OWNER, owner_of_this_process
from iris_ray.slots.actors.slot_processes import SHARE, SHARE_BYTES

HEALTH_ANSWER_S: Final = 10.0
"""How long the program may take to say that it is healthy."""
LOOK_S: Final = 0.2
"""The interval between two questions while the program loads."""
END_S: Final = 4.0
"""How long the program may take to end after SIGTERM before its process tree is killed."""
LOST_S: Final = 5.0
"""How long a request whose connection broke waits for the end of the program, and so for another slot."""
MOST_LINES: Final = 20
"""The limit for lines of the program's output in the reason of a failed load."""
LONGEST_LINE: Final = 2**12
"""The limit for characters of a line. A longer one is split."""
MOST_SAID: Final = 3_000
"""The limit for characters of the output in that reason."""
PATHS: Final = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
"""The path of a request, by the field that the request has."""


_CHECKS: Mapping[str, Check] = {
    "command": Holds(lambda value: is_name(value) or (is_texts(value) and bool(value)), "a command line"),
    "health": Holds(lambda value: is_name(value) and value.startswith("/"), 'a path, such as "/health"'),
    "load_s": Seconds(above=True),
    "environment": VARIABLES,
}


@dataclass(frozen=True, slots=True)
class ServedCommand:
    """A program that serves a model as OpenAI's API: vLLM, llama.cpp's server, or one of your own.

    Args:
        command: its command line. It must have ``{port}``, the port at which it has to listen on 127.0.0.1. It may have
            ``{model}``, the model's name; ``{devices}``, the number of its devices; ``{memory}``, its bytes on each
            (the most, if they differ; all that slots may use of a TPU chip); ``{share}``, the part that this is of each
            whole GPU (the least), which suits vLLM's ``--gpu-memory-utilization``. On CPUs and TPU chips, and on hosts
            whose NVIDIA driver can't be asked, as without nvidia-ml-py, it is the part of the memory that slots may
            use. Other braces are doubled.
        health: the path that answers with a status of 2xx once it can serve, and while it is well.
        memory: bytes on each device, by the number of devices. `SlotClient.register` may get others; it must get them
            if this is None.
        load_s: seconds that it may take until it is healthy.
        environment: further environment variables.

    Raises:
        InvalidSlotError: a value makes no sense.

    Example:
        >>> vllm = ServedCommand("vllm serve org/model --port {port} --served-model-name {model}", memory={1: 70 * GB})
        >>> client.register(vllm, "model", concurrency=256)
    """

    command: str | Sequence[str]
    health: str = "/health"
    memory: Mapping[int, int | Sequence[int]] | None = None
    load_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_fields("ServedCommand: ", self, _CHECKS, InvalidSlotError)
        try:
            said = self.words(port=1, model="m", devices=1, memory=1, share=1.0)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise InvalidSlotError(
                f"ServedCommand: command can't be filled in ({type(error).__name__}: {error}); it may have {{port}},"
                " {model}, {devices}, {memory} and {share}, and other braces doubled"
            ) from None
        if said == self.words(port=2, model="m", devices=1, memory=1, share=1.0):
            raise InvalidSlotError("ServedCommand: command has no {port}; it has to listen where its slot asks it")

    def words(self, **values: Any) -> list[str]:
        """Return the words of the command with these values in place of the names in braces."""
        words = shlex.split(self.command) if isinstance(self.command, str) else self.command
        return [word.format(**values) for word in words]


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """A program's answer, or a piece of it.

    Attributes:
        status: the HTTP status.
        content_type: such as "application/json".
        body: the answer's bytes.
        location: the target of a redirect; a path if that is at the program itself. Redirects are not followed.
    """

    status: int
    content_type: str
    body: bytes
    location: str | None = None

    def json(self) -> Any:
        """Return the value of a JSON answer."""
        return json.loads(self.body)


class ServedProgram:
    """The model of a slot whose requests a program answers.

    Args:
        served: the program.
        model: the model's name.
    """

    def __init__(self, served: ServedCommand, model: str) -> None:
        self._served = served
        self._model = model
        self._said: deque[str] = deque(maxlen=MOST_LINES)
        self._ending = False
        self._unhealthy = "it did not answer"
        self._session: Any = None

    def load(self) -> None:
        """Start the program, and wait until it is healthy.

        Raises:
            RuntimeError: it ended, or was not healthy in time; the message has the end of its output.
        """
        self._url, self._process = self._start()
        stat = stat_of(self._process.pid)
        assert stat is not None, "nobody has waited for its end yet"
        self._tree = ProcessTree(stat.identity)
        threading.Thread(target=self._copy_output, name="program's output", daemon=True).start()
        import aiohttp  # noqa: F401 — it takes 0.1 s, for which the first request would wait

        give_up_at = time.monotonic() + self._served.load_s
        while not self.health():
            if self._process.poll() is not None:
                time.sleep(LOOK_S)  # for the rest of its output
                raise RuntimeError(self._words(f"ended with {self._process.returncode} before it was healthy"))
            if time.monotonic() > give_up_at:
                self._end()
                why = f"was not healthy within {self._served.load_s:g} s: {self._unhealthy}"
                raise RuntimeError(self._words(why))
            time.sleep(LOOK_S)
        threading.Thread(target=self._watch, name="program's end", daemon=True).start()

    def health(self) -> bool:
        """Return whether the program says that it is well. A redirect does not."""
        direct = build_opener(ProxyHandler({}), _NoRedirects)  # a proxy would not lead back to this host
        path = self._served.health
        try:
            with direct.open(self._url + path, timeout=HEALTH_ANSWER_S) as answer:
                return 200 <= int(answer.status) < 300
        except HTTPError as error:
            with error:
                leads = f", a redirect to {error.headers['Location']}" if 300 <= error.code < 400 else ""
                self._unhealthy = f"{path} answered {error.code}{leads}"
        except (OSError, HTTPException) as error:  # also an answer that is not HTTP
            self._unhealthy = f"{path} did not answer ({type(error).__name__})"
        return False

    async def unload(self) -> None:
        """End the program: with SIGTERM, then its whole process tree."""
        if self._session is not None:
            await self._session.close()
        await asyncio.to_thread(self._end)

    def __call__(self, request: Any) -> Any:
        """Have the program answer a request of OpenAI's API.

        Returns:
            `ProgramAnswer`, or a generator of its pieces for ``"stream": true``.
        """
        path = next((path for name, path in PATHS.items() if isinstance(request, dict) and name in request), None)
        if path is None:
            raise InvalidSlotError(f"the request has none of {', '.join(PATHS)}; give a request of OpenAI's API")
        streams = request.get("stream") is True
        return self._answers(path, request, whole=False) if streams else self._whole(path, request)

    async def _whole(self, path: str, request: Any) -> ProgramAnswer:
        async with aclosing(self._answers(path, request, whole=True)) as answers:
            return await anext(answers)

    async def _answers(self, path: str, request: Any, whole: bool) -> AsyncGenerator[ProgramAnswer, None]:
        import aiohttp

        if self._session is None:  # all calls share one event loop
            no_limit = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(timeout=no_limit, connector=aiohttp.TCPConnector(limit=0))
        try:
            # a redirect could send the request to any host; the caller gets it, as from a reverse proxy
            async with self._session.post(self._url + path, json=request, allow_redirects=False) as answer:
                location = answer.headers.get("Location")
                if location is not None and f"{location}/".startswith(f"{self._url}/"):
                    location = location.removeprefix(self._url) or "/"
                head = answer.status, answer.content_type
                if whole:
                    yield ProgramAnswer(*head, await answer.read(), location)
                    return
                data = b""
                async for data in answer.content.iter_any():
                    yield ProgramAnswer(*head, data, location)
                if not data:  # its status alone says something
                    yield ProgramAnswer(*head, data, location)
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(LOST_S)  # the program ends; then this process does, and the request runs again
            raise

    def _start(self) -> tuple[str, "subprocess.Popen[str]"]:
        with closing(socket.create_server(("127.0.0.1", 0))) as found:
            port = found.getsockname()[1]
        shares = os.environ.get(SHARE_BYTES, "0").split(",")
        share = float(os.environ.get(SHARE, "1"))
        words = self._served.words(
            port=port, model=self._model, devices=len(shares), memory=max(map(int, shares)), share=share
        )
        environment = {**os.environ, OWNER: owner_of_this_process(), **self._served.environment}
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's worker blocks some, and children inherit that
        try:
            made = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise RuntimeError(
                f"{words[0]} can't be started: {error.strerror}; is it installed on this host?"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return f"http://127.0.0.1:{port}", made

    def _end(self) -> None:
        self._ending = True
        self._tree.update()  # while its descendants still have their parents
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        end_processes(self._tree.known, self._tree.search)
        self._process.wait()

    def _copy_output(self) -> None:
        assert self._process.stdout is not None, "it was opened as a pipe"
        with self._process.stdout as lines:
            while line := lines.readline(LONGEST_LINE):
                self._said.append(line)
                print(line, end="", flush=True)

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._ending:
            print(self._words(f"ended with {code}; so does its slot"), file=sys.stderr, flush=True)
            os._exit(1)

    def _words(self, what: str) -> str:
        said = "".join(self._said).strip()[-MOST_SAID:]
        return f"the program of {self._model} {what}" + (f"; its last words: {said}" if said else "; it said nothing")


class _NoRedirects(HTTPRedirectHandler):
    """Leaves a redirect an error."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request that follows it."""
