"""A server of OpenAI's completions and chat, for tests of models that are programs: python served_program.py --port N

It repeats words. ``die`` ends it, ``wait`` makes it wait for a minute or until the caller goes, ``pause`` for two
seconds, and ``unwell`` has its health fail. It prints the environment variable ``SAY``. It appends to the file of
``--trace`` what happens to it, and has a child that SIGTERM does not end.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STARTED = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    """Answers as the prompt says."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its headers, often for 40 ms
    load_s = 0.0
    trace: Path | None = None
    unwell = False

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Say whether it is well."""
        is_well = time.monotonic() > STARTED + self.load_s and not Handler.unwell
        self._send(200 if is_well else 503, b"{}")

    def do_POST(self) -> None:
        """Repeat words."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["prompt"] if "prompt" in asked else asked["messages"][-1]["content"]
        note(f"asked {text}")
        if text == "die":
            print("I die", flush=True)
            os._exit(3)
        if text == "busy":
            self._send(503, b"")
            return
        if text == "bad":
            self._send(400, json.dumps({"error": {"message": "no such word", "type": "x"}}).encode())
            return
        Handler.unwell = Handler.unwell or text == "unwell"
        if not asked.get("stream"):
            choice = {"index": 0, "text": text.upper(), "finish_reason": "stop", "logprobs": None}
            whole = {"id": "x", "object": "text_completion", "created": 0, "model": asked["model"], "choices": [choice]}
            self._send(200, json.dumps({**whole, "pid": os.getpid()}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for word in text.split():
                times = {"wait": 600, "pause": 20}.get(word, 1)
                for _ in range(times):
                    choice = {"index": 0, "text": word, "finish_reason": None, "logprobs": None}
                    piece = {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
                    self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
                    time.sleep(0.1 if times > 1 else 0.0)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            note("the caller has gone")
        self.close_connection = True

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def note(what: str) -> None:
    """Append a line to the trace."""
    if Handler.trace is not None:
        with Handler.trace.open("a") as file:
            file.write(what + "\n")


def end(*_: Any) -> None:
    """Note SIGTERM, and end."""
    note("SIGTERM")
    os._exit(0)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    if arguments.fail:
        sys.exit(arguments.fail)
    Handler.load_s, Handler.trace = arguments.load, arguments.trace
    signal.signal(signal.SIGTERM, end)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", ignores], start_new_session=True)
    print(os.environ.get("SAY", "starts"), flush=True)
    note(f"pids {os.getpid()} {child.pid}")
    note(f"memory {os.environ.get('IRIS_SLOT_MEMORY')} share {os.environ.get('IRIS_SLOT_MEMORY_SHARE')}")
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
