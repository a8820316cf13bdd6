"""Rows of users: what they have, what they may have, and what the queue counts."""

from collections.abc import Iterable, Mapping
from typing import Any

from iris_ray.actors.wire.overview import UserShare
from iris_ray.actors.wire.status import LimitStatus
from iris_ray.dashboard.tables import Row
from iris_ray.model.limits import EVERYBODY


def user_rows(limits: Iterable[LimitStatus], shares: Iterable[UserShare]) -> Mapping[str, Row]:
    """Return a row for each user who has something, has had something lately, or has limits."""
    rows: dict[str, dict[str, Any]] = {}
    for share in shares:
        row = rows.setdefault(share.user, _row(share.user))
        row |= {"share": share.now, "counted": share.counted, "chip_hours": round(share.chip_hours, 1)}
    for limit in limits:
        if limit.user != EVERYBODY:
            row = rows.setdefault(limit.user, _row(limit.user))
            row["chips"] += limit.chips
            row["running"] += limit.running_jobs
            row["queued"] += limit.queued_jobs
            row["tasks"] += limit.tasks
            row["bands"].append(_band(limit))
    return rows


def _row(user: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("share", "counted", "chip_hours", "chips", "running", "queued", "tasks"), 0)
    return {"user": user, **nothing, "bands": []}


def _band(limit: LimitStatus) -> Row:
    return {
        "band": limit.band.name.lower(),
        "chips": limit.chips,
        "running": limit.running_jobs,
        "queued": limit.queued_jobs,
        "limits": {name: value for name, value in limit.set_here.items() if value is not None},
    }
