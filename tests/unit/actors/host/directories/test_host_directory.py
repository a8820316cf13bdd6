"""Where iris_ray keeps its files on a host."""

import os
import stat
from pathlib import Path

import pytest

from iris_ray.actors.host import directories as module
from iris_ray.actors.host.directories import host_directory


def test_host_directory_is_private_and_configurable(tmp_path: Path) -> None:
    configured = host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "x" / "y")})
    assert configured == tmp_path / "x" / "y"
    assert stat.S_IMODE(configured.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_host_directory_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(PermissionError, match="can be written to by other users; remove it, or set IRIS_RAY_HOST_DIR"):
        host_directory({"IRIS_RAY_HOST_DIR": str(path)})


def test_host_directory_named_by_operator_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert host_directory({"IRIS_RAY_HOST_DIR": str(tmp_path / "link")}) == tmp_path / "link"


@pytest.fixture
def in_rays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where iris_ray keeps its files unless an operator says where; behind a link, as /tmp may be."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "ray").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(module, "temp_dir", lambda: str(tmp_path / "ray"))
    return tmp_path / "ray" / f"iris_ray-{os.getuid()}"


def test_host_directory_ignores_tmpdir_of_jobs(in_rays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert host_directory({"TMPDIR": "/nowhere"}) == in_rays
    assert stat.S_IMODE(in_rays.stat().st_mode) == 0o700


def test_link_in_place_of_host_directory_is_refused(in_rays: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    in_rays.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="is no directory"):
        host_directory({})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_host_directory_of_another_user_is_refused(in_rays: Path) -> None:
    in_rays.mkdir(mode=0o700)
    os.chown(in_rays, 65534, 65534)
    with pytest.raises(PermissionError, match="belongs to another user"):
        host_directory({})
