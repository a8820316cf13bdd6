"""How much room the directories of jobs have."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from iris_ray.checkpoint import local_files
from iris_ray.checkpoint.local_files import room_in


def test_tenth_of_disk_and_memory_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=1000, available=300)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(local_files, "CGROUP", tmp_path)
    disk: Any = SimpleNamespace(f_bavail=900, f_blocks=1000, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    monkeypatch.setattr(local_files, "MEMORY", Path("/proc"))
    assert room_in(tmp_path) == 800, "on disk"
    monkeypatch.setattr(local_files, "MEMORY", tmp_path)
    assert room_in(tmp_path) == 200, "in memory"
    (tmp_path / "memory.max").write_text("max\n")
    assert room_in(tmp_path) == 200
    for name, text in (("max", "500"), ("current", "420"), ("stat", "anon 300\ninactive_file 100\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert room_in(tmp_path) == 130, "in a container"
    memory.available = 90
    assert room_in(tmp_path) == -10
