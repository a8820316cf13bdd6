"""The service of secrets, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "secrets",
    controller="iris_ray.secrets.controller:SecretsInController",
    pool="iris_ray.secrets.pool:SecretsInPool",
    admits=("stored_secrets",),
    commands={
        "cluster secrets": Command(
            "iris_ray.secrets.cli:secrets", "API keys and the like for all jobs: set, list and remove them."
        )
    },
)
