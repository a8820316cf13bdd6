"""The list of services. Take a service out: remove its line here, its folder, and its tests of that name."""

from typing import Final

SERVICES: Final[tuple[str, ...]] = (
    "iris_ray.logs",
    "iris_ray.inspection",
    "iris_ray.goodput",
    "iris_ray.doctor",
    "iris_ray.outputs",
    "iris_ray.evidence",
    "iris_ray.sessions",
    "iris_ray.dev",
    "iris_ray.teams",
    "iris_ray.history",
    "iris_ray.hangs",
    "iris_ray.notify",
    "iris_ray.preflight",
    "iris_ray.capacity",
    "iris_ray.metadata",
    "iris_ray.cleaning",
    "iris_ray.secrets",
    "iris_ray.handover",
    "iris_ray.selftest",
    "iris_ray.checkpoint",
    "iris_ray.outer",
    "iris_ray.docker",
    "iris_ray.remote",
    "iris_ray.local",
    "iris_ray.endpoints",
    "iris_ray.study",
    "iris_ray.slots",
    "iris_ray.levanter",
    "iris_ray.fray",
)
"""Packages. Each has a module ``service`` with a `SERVICE`, see `iris_ray.actors.protocol.services`."""
