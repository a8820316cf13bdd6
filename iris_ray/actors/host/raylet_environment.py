"""The environment of the raylet that has started this process: what the machine or the pod says about itself."""

import psutil

RAYLET = "raylet"


def raylet_environment() -> dict[str, str]:
    """Return the raylet's variables; none if this process was not started by a raylet, or may not read them."""
    try:
        above = psutil.Process().parents()  # `uv run` may stand between
        return next((each.environ() for each in above if each.name() == RAYLET), {})
    except (psutil.Error, OSError):
        return {}
