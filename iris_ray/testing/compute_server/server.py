"""The HTTP server of the emulator."""

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, urlsplit

from iris_ray.testing.api_faults import ApiFault, FaultyApi
from iris_ray.testing.compute_server.zone import ComputeRefusal, ComputeZone, Json, shown

Method = Callable[[re.Match[str], Json], Json]


class ComputeApi:
    """Answers requests about a zone. Every method may raise `ComputeRefusal`; the caller holds the zone's lock."""

    def __init__(self, zone: ComputeZone) -> None:
        self._zone = zone
        self._operations: dict[str, Json] = {}
        self._done_at: dict[str, float] = {}
        self._by_request_id: dict[str, tuple[str, Json]] = {}
        in_zone, in_region = f"/compute/v1/{zone.path}", f"/compute/v1/projects/{zone.project}/regions/{zone.region}"
        self._methods: list[tuple[str, re.Pattern[str], str, Method]] = [
            (verb, re.compile(path + r"/?"), name, method)
            for verb, path, name, method in (
                ("GET", f"{in_zone}/machineTypes/([^/]+)", "machineTypes.get", self._machine_type),
                ("GET", f"{in_zone}/reservations/([^/]+)", "reservations.get", self._reservation),
                ("POST", f"{in_region}/resourcePolicies", "resourcePolicies.insert", self._add_policy),
                ("POST", f"{in_region}/instanceTemplates", "regionInstanceTemplates.insert", self._add_template),
                ("GET", f"{in_zone}/instanceGroupManagers", "instanceGroupManagers.list", self._list_groups),
                ("POST", f"{in_zone}/instanceGroupManagers", "instanceGroupManagers.insert", self._add_group),
                ("DELETE", f"{in_zone}/instanceGroupManagers/([^/]+)", "instanceGroupManagers.delete", self._delete),
                (
                    "POST",
                    f"{in_zone}/instanceGroupManagers/([^/]+)/listManagedInstances",
                    "instanceGroupManagers.listManagedInstances",
                    self._list_vms,
                ),
                (
                    "POST",
                    f"{in_zone}/instanceGroupManagers/([^/]+)/resizeRequests",
                    "instanceGroupManagerResizeRequests.insert",
                    self._resize,
                ),
                ("GET", f"{in_zone}/operations/([^/]+)", "zoneOperations.get", self._operation),
                ("GET", f"{in_region}/operations/([^/]+)", "regionOperations.get", self._operation),
            )
        ]

    def find(self, verb: str, path: str) -> tuple[str, Callable[[Json], Json]]:
        """Return the name of the method for a request, and the method."""
        for its_verb, pattern, name, method in self._methods:
            if its_verb == verb and (found := pattern.fullmatch(path)):
                return name, partial(method, found)
        raise ComputeRefusal(403, f"Required permission for {verb} {path}, or it does not exist")

    def once(self, request_id: str, name: str, answer: Callable[[], Json]) -> Json:
        """Answer a request; one with an id that is known gets the operation of the earlier one."""
        if not request_id:
            return answer()
        about, operation = self._by_request_id.get(request_id, (name, None))
        if about != name:
            raise ComputeRefusal(400, f"Invalid value for field 'requestId': {request_id} was used for {about}")
        if operation is None:
            operation = answer()
            self._by_request_id[request_id] = name, operation
        return operation

    def _machine_type(self, path: re.Match[str], _: Json) -> Json:
        if path[1] not in self._zone.machine_types:
            raise ComputeRefusal(404, f"The resource '{self._zone.path}/machineTypes/{path[1]}' was not found")
        return {"name": path[1]}

    def _reservation(self, path: re.Match[str], _: Json) -> Json:
        if path[1] not in self._zone.reservations:
            raise ComputeRefusal(404, f"The resource '{self._zone.path}/reservations/{path[1]}' was not found")
        return {"name": path[1], "status": "READY"}

    def _add_policy(self, _: re.Match[str], body: Json) -> Json:
        self._zone.add_policy(body)
        return self._done("insert", body["name"], region=self._zone.region)

    def _add_template(self, _: re.Match[str], body: Json) -> Json:
        self._zone.add_template(body)
        return self._done("insert", body["name"], region=self._zone.region)

    def _list_groups(self, _: re.Match[str], __: Json) -> Json:
        return {"items": [shown(group) for group in self._zone.groups.values()]}

    def _add_group(self, _: re.Match[str], body: Json) -> Json:
        self._zone.add_group(body)
        return self._done("insert", body["name"], zone=self._zone.zone)

    def _delete(self, path: re.Match[str], _: Json) -> Json:
        group = self._zone.group(path[1])
        group.is_going = True
        for vm in group.vms.values():
            vm.action = "DELETING"
        return self._done("delete", path[1], zone=self._zone.zone)

    def _list_vms(self, path: re.Match[str], _: Json) -> Json:
        return {"managedInstances": [vm.as_json(self._zone.path) for vm in self._zone.group(path[1]).vms.values()]}

    def _resize(self, path: re.Match[str], _: Json) -> Json:
        self._zone.group(path[1])
        raise ComputeRefusal(400, "Creating resize requests for managed instance group with TPU is not allowed")

    def _operation(self, path: re.Match[str], _: Json) -> Json:
        if path[1] not in self._operations:
            raise ComputeRefusal(404, f"The operation '{path[1]}' was not found")
        return self._shown(path[1])

    def _done(self, kind: str, target: str, **place: str) -> Json:
        name = f"operation-{len(self._operations)}"
        self._done_at[name] = time.monotonic() + self._zone.operation_s
        failure, self._zone.operation_fails = self._zone.operation_fails, None
        self._operations[name] = {
            "name": name, "operationType": kind, "targetLink": target, "status": "DONE", "progress": 100, **place,
        }  # fmt: skip
        if failure is not None:
            code, message = failure
            self._operations[name] |= {
                "httpErrorStatusCode": 403,
                "httpErrorMessage": "FORBIDDEN",
                "error": {"errors": [{"code": code, "message": message}]},
            }
        return self._shown(name)

    def _shown(self, name: str) -> Json:
        is_done = time.monotonic() >= self._done_at[name]
        return self._operations[name] if is_done else self._operations[name] | {"status": "RUNNING", "progress": 0}


@dataclass(slots=True)
class ComputeServer(FaultyApi[int], ComputeZone):
    """One zone of the Compute Engine API, on a port of its own on loopback; a context manager.

    Attributes:
        calls: (method, body) of every call, also of refused ones.
        address: HOST:PORT.
    """

    calls: list[tuple[str, Json]] = field(default_factory=list)
    address: str = ""
    _faults: list[ApiFault[int]] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        zone, api = self, ComputeApi(self)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                url = urlsplit(self.path)
                request_id = parse_qs(url.query).get("requestId", [""])[0]
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(text) if text else {}
                try:
                    status, reply = 200, zone.answer(api, self.command, url.path, request_id, body)
                except ComputeRefusal as refusal:
                    status = refusal.status
                    reply = {"error": {"code": status, "message": str(refusal), "errors": [{"message": str(refusal)}]}}
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _answer

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def answer(self, api: ComputeApi, verb: str, path: str, request_id: str, body: Json) -> Json:
        """Answer one request; raises ComputeRefusal. An injected failure is an HTTP status."""
        with self.lock:
            name, method = api.find(verb, path)
            fault = self.take_fault(name, body)
        if fault is not None:
            time.sleep(fault.delay_s)
            if fault.code is not None:
                raise ComputeRefusal(fault.code, f"{name}: a test asked for {fault.code}")
        with self.lock:
            return api.once(request_id, f"{verb} {path} {body.get('name', '')}", lambda: method(body))
