"""A driver that stands for NVIDIA's."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STAND_IN = Path(__file__).parents[2] / "support" / "nvml"


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install the library; the driver is there once the returned function gets the GPUs that it is to report."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delenv("IRIS_TEST_NVML", raising=False)

    def say(*gpus: dict[str, Any]) -> None:
        monkeypatch.setenv("IRIS_TEST_NVML", json.dumps(gpus))

    return say
