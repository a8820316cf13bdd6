"""The service ``hangs``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Service

SERVICE: Final = Service("hangs", pool="iris_ray.hangs.pool:HangsInPool", host="iris_ray.hangs.host:HangsOnHost")
