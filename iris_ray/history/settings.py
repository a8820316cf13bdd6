"""The cluster settings of the history."""

import re
from typing import Final

from iris_ray.model.cluster_settings import OFF, ON, ClusterSetting, count_or_off


def _place(text: str) -> str:
    if text not in (ON, OFF) and not text.startswith("/"):
        raise ValueError(f"give {ON}, {OFF}, or a directory on the head that begins with /")
    return text


def _copies(text: str) -> str:
    if text != OFF and not text.startswith("/") and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+(/\S*)?", text) is None:
        raise ValueError(
            f"give {OFF}, a directory on the head that begins with /, or a URL such as gs://bucket/history"
        )
    return text.rstrip("/") or "/"


def _positive(text: str) -> int:
    found = count_or_off(text)
    if found is None:
        raise ValueError("give a whole number, 1 or more")
    return found


HISTORY = ClusterSetting(
    "history",
    ON,
    f"{ON}, {OFF}, or a directory on the head",
    "Whether the Controller keeps a history, and where; on: next to its records, or in the head's directory.",
    _place,
)
HISTORY_DAYS = ClusterSetting(
    "history_days", "400", "days", "How long the history keeps jobs, events and samples.", _positive
)
HISTORY_MB = ClusterSetting(
    "history_mb",
    "1024",
    "megabytes",
    "Largest size of the history; beyond it, the oldest entries are removed.",
    _positive,
)
HISTORY_PARQUET = ClusterSetting(
    "history_parquet",
    OFF,
    f"a directory, SCHEME://BUCKET/PATH, or {OFF}",
    "Where the Controller copies the history every hour, as one Parquet file per table and month.",
    _copies,
)

SETTINGS: Final = (HISTORY, HISTORY_DAYS, HISTORY_MB, HISTORY_PARQUET)
