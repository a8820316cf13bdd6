"""The HTTP server of the emulator."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from aiohttp import web

from iris_ray.testing.compute_server.zone import ComputeRefusal, ComputeZone, Json, shown
from iris_ray.testing.servers import FaultyApi, ServerThread

Method = Callable[[re.Match[str], Json], Json]


class ComputeApi:
    """Answers requests about a zone. Every method may raise `ComputeRefusal`; the caller holds the zone's lock."""

    def __init__(self, zone: ComputeZone) -> None:
        self._zone = zone
        self._operations: dict[str, Json] = {}
        self._done_at: dict[str, float] = {}
        self._by_request_id: dict[str, tuple[str, Json]] = {}
        in_zone, in_region = f"/compute/v1/{zone.path}", f"/compute/v1/projects/{zone.project}/regions/{zone.region}"
        groups, name = f"{in_zone}/instanceGroupManagers", "/([^/]+)"
        self._methods: dict[str, tuple[str, str, Method]] = {
            "machineTypes.get": ("GET", f"{in_zone}/machineTypes{name}", self._machine_type),
            "reservations.get": ("GET", f"{in_zone}/reservations{name}", self._reservation),
            "resourcePolicies.insert": ("POST", f"{in_region}/resourcePolicies", self._add_policy),
            "regionInstanceTemplates.insert": ("POST", f"{in_region}/instanceTemplates", self._add_template),
            "instanceGroupManagers.list": ("GET", groups, self._list_groups),
            "instanceGroupManagers.insert": ("POST", groups, self._add_group),
            "instanceGroupManagers.delete": ("DELETE", groups + name, self._delete),
            "instanceGroupManagers.listManagedInstances": (
                "POST", f"{groups}{name}/listManagedInstances", self._list_vms,
            ),
            "instanceGroupManagerResizeRequests.insert": ("POST", f"{groups}{name}/resizeRequests", self._resize),
            "zoneOperations.get": ("GET", f"{in_zone}/operations{name}", self._operation),
            "regionOperations.get": ("GET", f"{in_region}/operations{name}", self._operation),
        }  # fmt: skip

    def find(self, verb: str, path: str) -> tuple[str, Callable[[Json], Json]]:
        """Return the name of the method for a request, and the method."""
        for name, (its_verb, pattern, method) in self._methods.items():
            if its_verb == verb and (found := re.fullmatch(pattern + "/?", path)):
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


@dataclass
class ComputeServer(FaultyApi[int], ComputeZone):
    """One zone of the Compute Engine API, on a port of its own on loopback; a context manager.

    The faults of a test have HTTP statuses as their codes.
    """

    _thread: ServerThread | None = None

    def __enter__(self) -> Self:
        api = ComputeApi(self)

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.json() if request.can_read_body else {}
            request_id = request.query.get("requestId", "")
            try:
                reply = await asyncio.to_thread(self._answer, api, request.method, request.path, request_id, body)
            except ComputeRefusal as refusal:
                said = {"code": refusal.status, "message": str(refusal), "errors": [{"message": str(refusal)}]}
                return web.json_response({"error": said}, status=refusal.status)
            return web.json_response(reply)

        self._thread = ServerThread("compute-server")
        self.address = self._thread.listen(answer, "127.0.0.1")
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._thread is not None
        self._thread.close()

    def _answer(self, api: ComputeApi, verb: str, path: str, request_id: str, body: Json) -> Json:
        with self.lock:
            name, method = api.find(verb, path)
            fault = self.take_fault(name, body)
        if fault is not None:
            time.sleep(fault.delay_s)
            if fault.code is not None:
                raise ComputeRefusal(fault.code, f"{name}: a test asked for {fault.code}")
        with self.lock:
            return api.once(request_id, f"{verb} {path} {body.get('name', '')}", lambda: method(body))
