"""The environment of the raylet that has started this process: what the machine or the pod says about itself."""

import psutil

RAYLET = "raylet"


def raylet_environment() -> dict[str, str]:
    """Return the raylet's variables; none if this process was not started by a raylet, or may not read them."""
    try:
        parent = psutil.Process().parent()
        return parent.environ() if parent is not None and parent.name() == RAYLET else {}
    except (psutil.Error, OSError):
        return {}
