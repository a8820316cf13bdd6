"""The directory of a simulated cluster."""

import gc
import os
import warnings

import psutil
import pytest

from iris_ray.testing import workspace as module
from iris_ray.testing.workspace import Workspace
from tests.support.waiting import wait_until


def test_slow_janitor_is_reaped_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_JANITOR_TIMEOUT_S", 0.1)
    one = Workspace()
    root, janitor, held = one.root, one._janitor.pid, os.dup(one._lifeline)
    try:
        one.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del one
            gc.collect()
        assert root.exists()
    finally:
        os.close(held)
    wait_until(lambda: not root.exists())
    wait_until(lambda: not psutil.pid_exists(janitor))
