"""The client of the Kubernetes API, as a pod of KubeRay's may use it: by its service account and its cluster's name.

KubeRay gives the head's pod the account of Ray's autoscaler, which may read the cluster's pods, and read and patch the
RayCluster (its ``rbac.go``, 1.7). All containers of a pod share the account, so the Controller can do the same. Ray's
own client reads the same variables (``ray.autoscaler._private.kuberay.node_provider``, Ray 2.60), but it is private,
and older ones know no other certificates than the pod's. Calls block.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import requests

from iris_ray.errors import ProviderDeniedError, ProviderError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts the token, the certificate and the namespace of the pod's account."""
ANSWER_S = 5.0
"""Seconds within which the API has to answer."""
DENIALS = HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN
JSON_PATCH = "application/json-patch+json"


@dataclass(slots=True)
class KubernetesApi:
    """The API as the pod of one Ray cluster may use it.

    Attributes:
        address: ``https://HOST:PORT``.
        namespace: of the cluster.
        cluster: the name of the RayCluster.
        certificate: the file that proves the server; None: the account's.
        client: the files of a client's certificate and key, which some distributions want instead of a token.
    """

    address: str
    namespace: str
    cluster: str
    certificate: str | None = None
    client: tuple[str, str] | None = None

    @staticmethod
    def of_this_pod(environ: Mapping[str, str] | None = None) -> "KubernetesApi | None":
        """Return the API that this pod may ask; None if this process runs in no pod of KubeRay's.

        Args:
            environ: the environment of the Ray container; None: this process's.
        """
        environ = os.environ if environ is None else environ
        host, cluster = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("RAY_CLUSTER_NAME")
        namespace = environ.get("RAY_CLUSTER_NAMESPACE") or _text(ACCOUNT / "namespace")  # KubeRay before 1.7 sets none
        if not (host and cluster and namespace):
            return None
        host = f"[{host}]" if ":" in host else host
        certificate, key = environ.get("RAY_KUBERAY_CLIENT_CERT_PATH"), environ.get("RAY_KUBERAY_CLIENT_KEY_PATH")
        return KubernetesApi(
            f"https://{host}:{environ.get('KUBERNETES_SERVICE_PORT_HTTPS', '443')}",
            namespace,
            cluster,
            environ.get("RAY_KUBERAY_CA_CERT_PATH"),
            (certificate, key) if certificate and key else None,
        )

    def ray_cluster(self) -> dict[str, Any]:
        """Return the RayCluster."""
        return self._ask("GET", self._ray_cluster)

    def patch_ray_cluster(self, patch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Apply a JSON patch to the RayCluster. Return the patched RayCluster."""
        return self._ask("PATCH", self._ray_cluster, json=list(patch), headers={"Content-Type": JSON_PATCH})

    def pods(self, phase: str) -> list[dict[str, Any]]:
        """Return the pods of the Ray cluster that are in a phase: Pending, Running, Succeeded or Failed."""
        selectors = {"labelSelector": f"ray.io/cluster={self.cluster}", "fieldSelector": f"status.phase={phase}"}
        return self._list("pods", selectors)

    def pod_events(self, reason: str) -> list[dict[str, Any]]:
        """Return the recent events of a reason about pods of the namespace. KubeRay's own role doesn't allow it."""
        return self._list("events", {"fieldSelector": f"involvedObject.kind=Pod,reason={reason}"})

    # -- its parts -------------------------------------------------------------------------------------------------

    @property
    def _ray_cluster(self) -> str:
        return f"/apis/ray.io/v1/namespaces/{quote(self.namespace)}/rayclusters/{quote(self.cluster)}"

    def _list(self, kind: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        answer = self._ask("GET", f"/api/v1/namespaces/{quote(self.namespace)}/{kind}", params=query)
        return list(answer.get("items") or ())

    def _ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, **options: Any) -> dict[str, Any]:
        """Return the API's answer.

        Raises:
            ProviderDeniedError: the account may not do that.
            ProviderError: the API refuses for another reason; or there is no answer, and its cause is the error.
        """
        what = f"{method} {path.rpartition('/namespaces/')[2]}"
        token = None if self.client else _text(ACCOUNT / "token")  # Kubernetes renews the file
        headers = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        proof = self.certificate or str(ACCOUNT / "ca.crt")
        try:
            answer = requests.request(
                method,
                self.address + path,
                headers=headers,
                timeout=ANSWER_S,
                verify=proof,
                cert=self.client,
                **options,
            )
            said = answer.json() if answer.content else {}
        except (requests.RequestException, ValueError, OSError) as error:
            raise ProviderError(f"the Kubernetes API can't be asked ({what}): {error}") from error
        if answer.status_code < HTTPStatus.BAD_REQUEST and isinstance(said, dict):
            return said
        message = said.get("message") if isinstance(said, dict) else None
        refusal = f"the Kubernetes API refuses {what}: {answer.status_code} {message or answer.reason}"
        raise (ProviderDeniedError if answer.status_code in DENIALS else ProviderError)(refusal)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
