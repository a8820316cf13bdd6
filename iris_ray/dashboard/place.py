"""Records the address of the cluster's dashboard, so that commands can print links to it."""

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
        machine: the name of the machine on which the URL works.
        ray_job: the dashboard's Ray job. A killed dashboard leaves its address behind; Ray knows that its job ended.
    """

    machine: str
    url: str
    ray_job: str


def announce(url: str) -> None:
    """Record that a dashboard serves at this URL on this machine."""
    place = _Place(socket.gethostname(), url, ray.get_runtime_context().get_job_id())
    ClusterStore().put(_KEY, json.dumps(asdict(place)).encode())


def withdraw() -> None:
    """Delete the record of `announce`, unless another dashboard, perhaps with the same URL, has replaced it."""
    if (found := _announced()) is not None and found.ray_job == ray.get_runtime_context().get_job_id():
        ClusterStore().delete(_KEY)


def link_to(page: str = "") -> str | None:
    """Return the address of a page, with the machine's name if it is another one; None without a dashboard."""
    found = _announced()
    if found is None or not driver_lives(found.ray_job):
        return None
    return f"{found.url}/#/{quote(page)}" + ("" if found.machine == socket.gethostname() else f" (on {found.machine})")


def _announced() -> _Place | None:
    try:
        return _Place(**json.loads(ClusterStore().get(_KEY) or b""))
    except (TypeError, ValueError):  # there is none; or a program has written something else there
        return None
