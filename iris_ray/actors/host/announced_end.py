"""The announced end of a machine: it needs neither Ray nor a Controller, and the tasks there hear of it at once.

The announcement is a file in iris_ray's directory there, which each TPUHostActor reads.
"""

import contextlib
import json
from pathlib import Path

from iris_ray.actors.protocol.task_files import write_whole
from iris_ray.model.notices import HostNotice, NoticeKind

LOOK_S = 0.25
"""Seconds between two looks for an announcement."""


def in_rays_directory(temp_dir: str, uid: int) -> Path:
    """Return iris_ray's directory on a host whose operator has not chosen another one.

    Args:
        temp_dir: Ray's own directory on this node.
        uid: the user who runs Ray.
    """
    return Path(temp_dir) / f"iris_ray-{uid}"


def announce(directory: Path, node_id: str, reason: str, deadline: float) -> None:
    """Announce the end of a node to the tasks on it.

    Args:
        directory: iris_ray's directory there. If it does not exist, no task has ever run there.
        node_id: Ray's node id. A node that Ray starts there later has another one, and is not meant.
        reason: why, for people.
        deadline: when the node ends, in seconds since the epoch.

    Raises:
        OSError: the directory can't be written.
    """
    with contextlib.suppress(FileNotFoundError):
        write_whole(_file(directory, node_id), json.dumps({"reason": reason, "deadline": deadline}).encode())


def announced(directory: Path, node_id: str) -> HostNotice | None:
    """Return the announcement of a node's end; None if there is none, or the disk can't read it for now."""
    try:
        found = json.loads(_file(directory, node_id).read_text())
        return HostNotice(NoticeKind.PREEMPTION, str(found["reason"]), float(found["deadline"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file(directory: Path, node_id: str) -> Path:
    return directory / f"end-{node_id}.json"
