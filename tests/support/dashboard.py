"""A dashboard of a Ray cluster that takes and tells jobs, over HTTP, and runs none."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ray


@dataclass
class Dashboard:
    """What the dashboard knows, and what it was asked.

    Attributes:
        ray_version: of its cluster; None: it is no dashboard.
        refusal: the status with which it refuses every request, such as 401; None: it serves.
        jobs: what was submitted, by id.
        logs: what each job has printed.
        hidden: jobs that somebody else submits at the same moment: they are not there until they are in the way.
        odd: what it answers to requests whose path begins so, in place of anything else.
        packages: the directories that were sent, as zip files.
        changes: each request that was to change something, such as ``"POST /api/jobs/"``.
    """

    ray_version: str | None = ray.__version__
    refusal: int | None = None
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    odd: dict[str, Any] = field(default_factory=dict)
    packages: list[bytes] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if method != "GET":
            self.changes.append(f"{method} {path}")
        if self.refusal is not None:
            return self.refusal, "Unauthorized"
        for beginning, odd in self.odd.items():
            if path.startswith(beginning):
                return 200, odd
        if self.ray_version is None:
            return 200, "<html>hello</html>"
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": self.ray_version, "ray_commit": "", "session_name": ""}
        if path.startswith("/api/packages/"):
            if method == "GET":
                return 404, ""
            self.packages.append(body)
            return 200, ""
        name, _, what = path.removeprefix("/api/jobs/").partition("/")
        if method == "POST" and not name:
            return self._submit(json.loads(body))
        if name not in self.jobs:
            return 404, f"Job {name} does not exist"
        if what == "logs":
            return 200, {"logs": self.logs.get(name, "")}
        if what == "stop":
            return 200, {"stopped": True}
        return 200, {
            "type": "SUBMISSION",
            "submission_id": name,
            "status": "RUNNING",
            "entrypoint": "",
            "message": "runs",
        }

    def _submit(self, job: dict[str, Any]) -> tuple[int, Any]:
        name = job["submission_id"]
        if name in self.jobs or name in self.hidden:
            self.jobs.setdefault(name, {})
            return 500, f"Traceback …\nValueError: Job with submission_id {name} already exists. Please use another."
        self.jobs[name] = job
        return 200, {"job_id": name, "submission_id": name}


@contextlib.contextmanager
def served(dashboard: Dashboard) -> Iterator[str]:
    """Serve a dashboard within the block; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = dashboard.answer(self.command, self.path, body)
            content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _any

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
