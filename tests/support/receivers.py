"""Receivers of notifications: an HTTP server and an SMTP server on loopback, which keep what they get."""

import base64
import hashlib
import hmac
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Got:
    """A request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def is_signed_with(self, key: bytes) -> bool:
        """Whether the signature is what https://www.standardwebhooks.com wants."""
        signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode() + self.body
        right = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        return self.headers["webhook-signature"] == f"v1,{right}"


@dataclass
class Webhook:
    """An HTTP server.

    Attributes:
        url: its address.
        got: the requests.
        answers: the next answers, as status and headers; 200 if there are none.
        hangs: while it is not set, requests get no answer.
    """

    url: str = ""
    got: list[Got] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    goes_on: threading.Event = field(default_factory=threading.Event)

    @property
    def news(self) -> list[dict[str, Any]]:
        """The notifications in all requests, in order."""
        return [one for got in self.got for one in got.json["notifications"]]

    def events_of(self, job_id: str) -> list[str]:
        return [one["event"] for one in self.news if one["job_id"] == job_id]


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Run an HTTP server within."""
    hook = Webhook()
    hook.goes_on.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            hook.got.append(Got(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            hook.goes_on.wait()
            status, headers = hook.answers.pop(0) if hook.answers else (200, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hook.url = f"http://127.0.0.1:{server.server_port}/services/T0/s3cr3t-path"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hook
    finally:
        hook.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Mailbox:
    """An SMTP server.

    Attributes:
        port: its port on loopback.
        mails: the mails.
        commands: the lines that it got before the data.
        refuses: the answer to RCPT, if that is not 250.
        drips: whether it answers a byte a second, for ever.
    """

    port: int = 0
    mails: list[Message] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    refuses: str = ""
    drips: bool = False


@contextmanager
def mailbox() -> Iterator[Mailbox]:
    """Run an SMTP server within."""
    box = Mailbox()

    class Handler(socketserver.StreamRequestHandler):
        def say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

        def handle(self) -> None:
            with suppress(OSError):
                self.talk()

        def talk(self) -> None:
            while box.drips:
                self.wfile.write(b"2")
                time.sleep(0.2)
            self.say("220 mail")
            while line := self.rfile.readline().decode().rstrip("\r\n"):
                box.commands.append(line)
                word = line.partition(" ")[0].upper()
                if word == "DATA":
                    self.say("354 go on")
                    data = b""
                    while (one := self.rfile.readline()) != b".\r\n":
                        data += one
                    box.mails.append(message_from_bytes(data))
                elif word == "RCPT" and box.refuses:
                    self.say(box.refuses)
                    continue
                elif word == "QUIT":
                    self.say("221 bye")
                    return
                self.say("250 ok")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    server = Server(("127.0.0.1", 0), Handler)
    box.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield box
    finally:
        box.drips = False
        server.shutdown()
        server.server_close()
        thread.join()
