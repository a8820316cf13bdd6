"""Where iris_ray keeps its files on a host."""

import os
import stat
from pathlib import Path

from iris_ray.actors.host.host_directory import host_directory


def test_host_directory_is_private_and_configurable(tmp_path: Path) -> None:
    configured = host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "x" / "y")})
    assert configured == tmp_path / "x" / "y"
    assert stat.S_IMODE(configured.stat().st_mode) == 0o700


def test_host_directory_by_default_is_one_per_user() -> None:
    assert str(os.getuid()) in host_directory({}).name
