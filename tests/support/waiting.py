"""How long a test waits: as long as the machine needs, which may be busy with something else."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CORES = len(os.sched_getaffinity(0))
_LOOK_S = 0.05


def lateness() -> float:
    """How many processes compete for each core at this moment; at least 1."""
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return max(1.0, running / CORES)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Return the condition's first true value.

    Args:
        condition: it is called 20 times a second.
        timeout_s: seconds of an idle machine. A second in which n processes compete for each core counts 1/n seconds.

    Raises:
        AssertionError: the condition never held.
    """
    waited, looked = 0.0, time.monotonic()
    while not (value := condition()):
        assert waited < timeout_s, f"waited {timeout_s:g} s in vain"
        time.sleep(_LOOK_S)
        now = time.monotonic()
        waited, looked = waited + (now - looked) / lateness(), now
    return value
