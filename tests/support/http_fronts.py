"""An `HttpFront` on a client that stands for slots, and programs that ask it."""

import asyncio
import http.client
import json
import pickle
import socket
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from iris_ray.slots.front import ApiKey, HttpFront

ALICE = ApiKey("alice", "a" * 20)
LARGE = 2**24


class Client:
    """Answers as the prompt says."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.began: list[str] = []
        self.cancelled: list[str] = []

    async def generate(self, model: str, body: dict[str, Any], *, request_id: str, timeout_s: float | None) -> str:
        return "".join([piece async for piece in self.astream(model, body, request_id=request_id, timeout_s=timeout_s)])

    async def astream(
        self, model: str, body: dict[str, Any], *, request_id: str, timeout_s: float | None
    ) -> AsyncGenerator[str, None]:
        self.asked.append(model)
        self.bodies.append(body := pickle.loads(pickle.dumps(body)))  # it travels to the model
        try:
            for word in body["prompt"].split():
                match word:
                    case "reset":
                        raise ConnectionResetError("the model's own database")
                    case "dead":
                        raise RayActorError(error_msg="The actor died.")
                    case "endless":
                        while True:
                            yield "a" * 100_000
                    case "large":
                        yield "a" * LARGE
                    case "wait":
                        self.began.append(request_id)
                        await asyncio.sleep(60.0)
                yield word
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request_id)
            raise

    def status(self) -> Any:
        if self.models:
            return SimpleNamespace(models=[SimpleNamespace(model=name, slots=1, waiting=3) for name in self.models])
        raise RayActorError(error_msg="The actor died.")


def serve(client: Any, **options: Any) -> HttpFront:
    return HttpFront(client, **options)


def post(front: HttpFront, body: bytes, kind: str = "application/json") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


def status_for(
    front: HttpFront, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, str]:
    port = int(front.url.rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, asked("a") if body is None else body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def asked(prompt: str | list[str], **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | more).encode()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def connect(front: HttpFront, sent: bytes) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", int(front.url.rsplit(":", 1)[1])), timeout=30)
    caller.sendall(sent)
    return caller


def head(*more: str) -> bytes:
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


def is_closed(caller: socket.socket) -> bool:
    try:
        while caller.recv(2**16):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True
