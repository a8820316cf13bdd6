"""Where the cluster's dashboard is, for those who would like a link to it."""

import json
import socket
from dataclasses import asdict, dataclass
from urllib.parse import quote

import ray

from iris_ray.actors.calls.ray_internals import ClusterStore, driver_lives

_KEY = "dashboard/place"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a dashboard is.

    Attributes:
        machine: the name of the machine on which the URL is good.
        url: of the dashboard.
        ray_job: the Ray job that it is: one that was killed leaves its address behind, and Ray knows that it ended.
    """

    machine: str
    url: str
    ray_job: str


def announce(url: str) -> None:
    """Have others know that a dashboard serves at this URL, as this machine knows it."""
    place = _Place(socket.gethostname(), url, ray.get_runtime_context().get_job_id())
    ClusterStore().put(_KEY, json.dumps(asdict(place)).encode())


def withdraw() -> None:
    """Take `announce` back, unless another dashboard has announced itself since. Many have the same URL."""
    if (found := _announced()) is not None and found.ray_job == ray.get_runtime_context().get_job_id():
        ClusterStore().delete(_KEY)


def link_to(page: str = "") -> str | None:
    """Return the address of a page, with its machine if that is another than this; None without a dashboard."""
    found = _announced()
    if found is None or not driver_lives(found.ray_job):
        return None
    return f"{found.url}/#/{quote(page)}" + ("" if found.machine == socket.gethostname() else f" (on {found.machine})")


def _announced() -> _Place | None:
    stored = ClusterStore().get(_KEY)
    return None if stored is None else _Place(**json.loads(stored))
