"""The service ``docker``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service("docker", ends_owned="iris_ray.docker.host:end_container")
