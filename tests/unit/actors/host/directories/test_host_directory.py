"""Where iris_ray keeps its files on a host."""

import stat
from pathlib import Path

import pytest

from iris_ray.actors.host.directories.host_directory import host_directory


def test_host_directory_is_private_and_configurable(tmp_path: Path) -> None:
    configured = host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "x" / "y")})
    assert configured == tmp_path / "x" / "y"
    assert stat.S_IMODE(configured.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_host_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PermissionError, match="can be written to by other users; remove it, or set IRIS_RAY_HOST_DIR"):
        host_directory({"IRIS_RAY_HOST_DIR": str(path)})


def test_host_directory_that_an_operator_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "link")}) == tmp_path / "link"
