"""The service ``evidence``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service("evidence", host="iris_ray.evidence.host:EvidenceOnHost")
