"""The service ``checkpoint``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service(
    "checkpoint",
    host="iris_ray.checkpoint.host:FilesOnHost",
    in_jax="iris_ray.checkpoint.compilation_cache:use_compilation_cache",
)
