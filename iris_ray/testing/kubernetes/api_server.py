"""The Kubernetes API over HTTPS, on loopback: what Ray's autoscaler, the Controller and hooks in pods ask of it.

Source: https://kubernetes.io/docs/reference/using-api/api-concepts/ (paths, selectors, versions, patches, Status). What
Ray asks is in ray/autoscaler/_private/kuberay/node_provider.py and ray/autoscaler/v2/instance_manager/cloud_providers/
of Ray 2.60. There are no watches, no deletions, and no patches but JSON's of RayClusters: Ray needs others only to
resize pods in place and to end idle clusters. Everybody who is let in may do what KubeRay's role for the head's service
account allows, and what the roles in the cluster's file add. The certificates are made with `cryptography`.
"""

import datetime
import ipaddress
import json
import re
import secrets
import ssl
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from iris_ray.testing.kubernetes.objects import (
    EVENTS,
    PODS,
    RAYCLUSTERS,
    Manifest,
    ObjectStore,
    selector_matches,
)
from iris_ray.testing.kubernetes.patches import PatchError, json_patch
from iris_ray.testing.kubernetes.raycluster_file import RefusedSpec, check_groups, with_defaults
from iris_ray.testing.servers import ServerThread

ADDRESS: Final = "127.0.0.1"
JSON_PATCH: Final = "application/json-patch+json"
AUTOSCALER_ROLE: Final = frozenset(
    {
        *((PODS, verb) for verb in ("get", "list", "watch", "patch")),
        *((RAYCLUSTERS, verb) for verb in ("get", "patch")),
    }
)
"""What KubeRay's role for the head's service account allows (BuildRole in rbac.go), as pairs of resource and verb."""

_PATH: Final = re.compile(
    r"/(?:api/v1|(?P<ray>apis/ray\.io/v1))(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<kind>pods|events|rayclusters)(?:/(?P<name>[^/]+))?"
)
_LISTS: Final = {PODS: "PodList", EVENTS: "EventList", RAYCLUSTERS: "RayClusterList"}
_FIELDS: Final = ("metadata.name", "metadata.namespace", "spec.nodeName", "status.phase")
_FIELDS_OF_EVENTS: Final = (
    "metadata.name",
    "involvedObject.name",
    "involvedObject.kind",
    "involvedObject.uid",
    "reason",
    "type",
)


class ApiError(Exception):
    """A refused request."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Manifest:
        """Return the Status object that says so."""
        answer = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**answer, "message": str(self), "reason": self.reason, "code": self.code}


class KubernetesObjects:
    """Answers requests. All methods need the store's lock, and may raise `ApiError`."""

    def __init__(self, store: ObjectStore, permissions: Collection[tuple[str, str]]) -> None:
        self._store, self._permissions = store, permissions

    def answer(self, method: str, path: str, query: Mapping[str, str], content_type: str, body: Any) -> Manifest:
        """Answer one request with an object, a list or a Status."""
        found = _PATH.fullmatch(path)
        if found is None or bool(found["ray"]) != (found["kind"] == RAYCLUSTERS):
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        kind, name = found["kind"], found["name"]
        verb = {"GET": "get" if name else "list", "PATCH": "patch"}.get(method, method.lower())
        if (kind, verb) not in self._permissions:
            raise ApiError(403, "Forbidden", f"{kind} is forbidden: the head's service account cannot {verb} {kind}")
        if query.get("watch") in ("1", "true"):
            raise ApiError(400, "BadRequest", "this emulator has no watches")
        if name is None and verb == "list":
            return self._list(kind, found["namespace"], query)
        manifest = self._store.get(kind, name or "") if kind != EVENTS else None
        if manifest is None or found["namespace"] not in (None, self._store.namespace):
            raise ApiError(404, "NotFound", f'{kind} "{name}" not found')
        if verb == "patch":
            return self._patch(kind, manifest, content_type, body)
        return manifest

    def _list(self, kind: str, namespace: str | None, query: Mapping[str, str]) -> Manifest:
        version = query.get("resourceVersion") or "0"
        if not version.isdigit():
            raise ApiError(400, "BadRequest", f"Invalid value: {version!r}: a resourceVersion is a number")
        if int(version) > self._store.version:
            raise ApiError(504, "Timeout", f"Too large resource version: {version}, current: {self._store.version}")
        items = self._store.all(kind) if namespace in (None, self._store.namespace) else []
        labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
        known = _FIELDS_OF_EVENTS if kind == EVENTS else _FIELDS
        found = [
            item
            for item in items
            if selector_matches(labels, item["metadata"].get("labels") or {})
            and selector_matches(fields, {name: _field(item, name) for name in known})
        ]
        version = "ray.io/v1" if kind == RAYCLUSTERS else "v1"
        metadata = {"resourceVersion": str(self._store.version)}
        return {"kind": _LISTS[kind], "apiVersion": version, "metadata": metadata, "items": found}

    def _patch(self, kind: str, manifest: Manifest, content_type: str, body: Any) -> Manifest:
        if kind != RAYCLUSTERS or content_type != JSON_PATCH:
            raise ApiError(
                415, "UnsupportedMediaType", f"this emulator takes JSON patches of rayclusters, not {content_type}"
            )
        try:
            patched: Manifest = json_patch(manifest, body)
        except PatchError as error:  # NewGenericServerResponse for applyJSPatch in apiserver's patch.go
            message = "the server rejected our request due to an error in our request"
            raise ApiError(422, "Invalid", f"{message}: {error}") from error
        patched = changed_raycluster(manifest, patched)
        self._store.put(kind, patched)
        return patched


def changed_raycluster(before: Manifest, after: Manifest) -> Manifest:
    """Return a changed RayCluster with its defaults and its generation; raises ApiError if its CRD forbids it."""
    after = with_defaults(after)
    try:
        check_groups(after)
    except RefusedSpec as refusal:
        where = ".".join(map(str, refusal.path))
        name = before["metadata"]["name"]
        raise ApiError(422, "Invalid", f'RayCluster.ray.io "{name}" is invalid: {where}: {refusal}') from refusal
    generation = before["metadata"].get("generation", 1)
    after["metadata"]["generation"] = generation + (after["spec"] != before["spec"])
    return after


def _field(item: Mapping[str, Any], path: str) -> str:
    value: Any = item
    for step in path.split("."):
        value = value.get(step, "") if isinstance(value, Mapping) else ""
    return str(value)


# -- https -------------------------------------------------------------------------------------------------------------


class ApiServer(ServerThread):
    """Serves a `KubernetesObjects` over HTTPS from a thread of its own.

    Attributes:
        port: its port, once it serves.
    """

    def __init__(self, store: ObjectStore, api: KubernetesObjects) -> None:
        super().__init__("kubernetes-api")
        self._store, self._api, self.port = store, api, 0
        self._token = secrets.token_urlsafe(24)

    def start(self, directory: Path) -> None:
        """Begin to serve.

        Args:
            directory: gets the files that a client needs: ``ca.crt``, ``token`` and ``namespace``, as those of a pod's
                service account, and ``tls.crt`` and ``tls.key``, a certificate that is good for clients.
        """
        context = _make_certificate(directory)
        for name, text in {"token": self._token, "namespace": self._store.namespace}.items():
            _write(directory / name, text.encode())
        self.port = int(self.listen(self._handle, ADDRESS, context).rpartition(":")[2])

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._authenticate(request)
            text = await request.text()
            try:
                body = json.loads(text) if text else None
            except ValueError:
                raise ApiError(400, "BadRequest", "the body is not JSON") from None
            query, path = dict(request.query), request.path
            with self._store.lock:
                answer = json.dumps(self._api.answer(request.method, path, query, request.content_type, body))
        except ApiError as error:
            return web.json_response(error.status(), status=error.code)
        return web.Response(text=answer, content_type="application/json")

    def _authenticate(self, request: web.BaseRequest) -> None:
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport is not None else None
        if not certificate and request.headers.get("Authorization") != f"Bearer {self._token}":
            raise ApiError(401, "Unauthorized", "Unauthorized")


def _make_certificate(directory: Path) -> ssl.SSLContext:
    """Write the certificate that is authority, server and client in one; return the server's side of TLS."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(ADDRESS)), x509.DNSName("localhost")]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.KeyUsage(True, False, False, False, False, True, True, False, False), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .sign(key, hashes.SHA256())
    )
    for file in ("ca.crt", "tls.crt"):
        _write(directory / file, certificate.public_bytes(serialization.Encoding.PEM))
    form, open_ = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(directory / "tls.key", key.private_bytes(serialization.Encoding.PEM, form, open_))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(directory / "ca.crt"))
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    return context


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
