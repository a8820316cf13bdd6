"""What a metadata server says about its host's maintenance, and what is new about it."""

import json
from datetime import datetime
from enum import Enum
from typing import Any

from iris_ray.actors.host.metadata_client import Answer
from iris_ray.model.notices import HostNotice, NoticeKind

DENIALS = 2
"""How many answers in a row must say that an announced maintenance is no longer planned, before that is believed."""


class CalledOff(Enum):
    """An announced maintenance is no longer planned, or not for the near future."""

    CALLED_OFF = "called off"


class MaintenanceNews:
    """Finds in a series of answers what changes: a new maintenance, another date, or none any more.

    Args:
        lead_s: how many seconds before its beginning a maintenance is told. One that is put off beyond that is called
            off for now.
        announced: the notice of a maintenance that was told earlier, or None.
    """

    def __init__(self, lead_s: float, announced: HostNotice | None = None) -> None:
        self._lead_s = lead_s
        self._told = announced
        self._denials = 0

    def heard(self, answer: Answer, now: float) -> HostNotice | CalledOff | None:
        """Take the next answer, and return what is new: a notice, that the last one is called off, or nothing.

        Args:
            answer: what the server says about ``upcoming-maintenance?alt=json``.
            now: seconds since the epoch.
        """
        planned = maintenance_notice(answer.body) if answer.status == 200 else None
        if planned is not None and self._is_near(planned, now):
            is_new, self._told, self._denials = planned != self._told, planned, 0
            return planned if is_new else None
        if self._told is None or (planned is None and not denies_maintenance(answer)):
            self._denials = 0
            return None
        self._denials += 1
        if self._denials < DENIALS:
            return None
        self._told, self._denials = None, 0
        return CalledOff.CALLED_OFF

    def heard_nothing(self) -> None:
        """The server did not answer; so the answers before and after are not in a row."""
        self._denials = 0

    def _is_near(self, planned: HostNotice, now: float) -> bool:
        return planned.deadline is None or planned.deadline - now <= self._lead_s


def maintenance_notice(body: str) -> HostNotice | None:
    """Return the notice in the body of ``upcoming-maintenance?alt=json``; None if nothing is planned.

    A server says in several ways that nothing is planned: an object with an ``error``, an empty object, the text NONE.
    The documentation spells the fields in two ways: ``window_start_time`` for the metadata server and
    ``windowStartTime`` for the API.
    """
    try:
        fields: Any = json.loads(body)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    start = fields.get("window_start_time") or fields.get("windowStartTime")
    if not isinstance(start, str):
        return None
    kind = fields.get("maintenance_type") or fields.get("maintenanceType") or fields.get("type") or "of no type"
    try:
        deadline = datetime.fromisoformat(start).timestamp()
    except ValueError:
        deadline = None
    reason = f"the metadata server of the host announces maintenance ({kind}) for {start}"
    return HostNotice(NoticeKind.MAINTENANCE, reason, deadline)


def denies_maintenance(answer: Answer) -> bool:
    """Return whether a metadata server says that no maintenance is planned; a server that can't say denies nothing.

    Usually it says so with a 503 and an object that has an ``error``. A server that is not available answers 503, too,
    but without such an object.
    """
    if answer.status == 404:
        return True
    if answer.status not in (200, 503):
        return False
    try:
        said: Any = json.loads(answer.body)
    except ValueError:
        return answer.body == "NONE"
    return said == "NONE" or (isinstance(said, dict) and not ({"window_start_time", "windowStartTime"} & said.keys()))
