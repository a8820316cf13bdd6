"""What the service of notifications answers to the dashboard."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.notify.calls import NotifyCalls

SHOWN = 200


def notifications(source: ControllerConnection, _: Mapping[str, str], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the latest notifications, and whether there may be more.

    Args:
        source: the Controller.
        query: ``job``: only of this job.
    """
    found = source.ask(NotifyCalls.list_notifications, query.get("job") or None, SHOWN)
    return {"rows": [asdict(one) for one in found], "cut": len(found) == SHOWN}
