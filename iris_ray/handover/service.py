"""The service ``handover``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "handover",
    controller="iris_ray.handover.controller:HandoverInController",
    pool="iris_ray.handover.pool:HandoverInPool",
    commands={
        "cluster controller export": Command(
            "iris_ray.handover.cli:export", "Write what outlives the cluster into a file."
        ),
        "cluster controller import": Command(
            "iris_ray.handover.cli:import_", "Take over what another cluster has exported."
        ),
    },
)
