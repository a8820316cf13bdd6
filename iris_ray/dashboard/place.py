"""Where the cluster's dashboard is, for those who would like a link to it."""

import json
import socket

from iris_ray.actors.wire.ray_internals import ClusterStore

_KEY = "dashboard/url"


def announce(url: str) -> None:
    """Have others know that a dashboard serves at this URL, as this machine knows it."""
    ClusterStore().put(_KEY, json.dumps([socket.gethostname(), url]).encode())


def withdraw(url: str) -> None:
    """Take `announce` back, unless another dashboard has announced itself since."""
    if (found := _announced()) is not None and found[1] == url:
        ClusterStore().delete(_KEY)


def link_to(page: str = "") -> str | None:
    """Return the address of a page, with the machine on which it is one if that is another; None without a dashboard.

    A dashboard that was killed leaves its address behind.
    """
    found = _announced()
    if found is None:
        return None
    machine, url = found
    return f"{url}/#/{page}" + ("" if machine == socket.gethostname() else f" (on {machine})")


def _announced() -> tuple[str, str] | None:
    stored = ClusterStore().get(_KEY)
    return None if stored is None else tuple(json.loads(stored))
