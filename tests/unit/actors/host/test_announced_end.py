"""The end of a machine is announced there, and its host hears of it."""

import os
from pathlib import Path

from iris_ray.actors.host.announced_end import announce, announced
from iris_ray.model.notices import HostNotice, NoticeKind


def test_host_hears_only_the_end_of_its_own_node(tmp_path: Path) -> None:
    announce(tmp_path, "a", "the pod ends", 12.5)
    assert announced(tmp_path, "a") == HostNotice(NoticeKind.PREEMPTION, "the pod ends", 12.5)
    assert announced(tmp_path, "b") is None  # Ray started there anew


def test_damaged_announcement_is_none(tmp_path: Path) -> None:
    announce(tmp_path, "a", "the pod ends", 12.5)
    (found,) = tmp_path.iterdir()
    found.write_text("[]")
    assert announced(tmp_path, "a") is None


def test_end_of_host_where_no_task_ever_ran_is_no_error(tmp_path: Path) -> None:
    announce(tmp_path / "missing", "a", "the pod ends", 12.5)
    assert os.listdir(tmp_path) == []
