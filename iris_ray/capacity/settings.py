"""The cluster settings of the capacity."""

import re
from typing import Final

from iris_ray.model.cluster_settings import OFF, ClusterSetting

LOCATION = re.compile(r"projects/[a-z0-9.:-]+/locations/[a-z0-9-]+")
"""A zone of the Cloud TPU API."""
_DEMAND = {"auto": None, "always": True, "never": False}


def _locations(text: str) -> tuple[str, ...]:
    if text == OFF:
        return ()
    places = tuple(place.strip() for place in text.split(","))
    if not all(map(LOCATION.fullmatch, places)):
        raise ValueError(f"give projects/PROJECT/locations/ZONE, or several with commas, or {OFF}")
    return places


def _demand(text: str) -> bool | None:
    if text not in _DEMAND:
        raise ValueError(f"give one of {', '.join(_DEMAND)}")
    return _DEMAND[text]


CLOUD_TPU = ClusterSetting(
    "cloud_tpu",
    OFF,
    f"projects/PROJECT/locations/ZONE, …; or {OFF}",
    "The zones in which the Controller asks Google's Cloud TPU API what became of lost slices.",
    _locations,
)
AUTOSCALER_DEMAND = ClusterSetting(
    "autoscaler_demand",
    "auto",
    ", ".join(_DEMAND),
    "Whether the Controller asks Ray's autoscaler or KubeRay for missing slices; auto: if an autoscaler is running.",
    _demand,
)

SETTINGS: Final = (CLOUD_TPU, AUTOSCALER_DEMAND)
