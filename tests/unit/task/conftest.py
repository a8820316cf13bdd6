"""A process that plays a task."""

import os
from pathlib import Path

import pytest

from iris_ray.actors.protocol.task_files import TaskFiles


@pytest.fixture
def files(own_host: Path, monkeypatch: pytest.MonkeyPatch) -> TaskFiles:
    """This process is a task."""
    files = TaskFiles.of_process(own_host, os.getpid())
    monkeypatch.setenv(TaskFiles.VARIABLE, files.prefix)
    return files
