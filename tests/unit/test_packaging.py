"""The wheel and the sdist hold all that is needed, also where there is no source tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BUILD_SDIST = "import setuptools.build_meta as build; build.build_sdist('dist')"
RUN = """
import iris_ray
from iris_ray import get_job_info, run_on_pod
print(iris_ray.__file__)
print(run_on_pod(lambda: get_job_info().worker_id, "v4-16", mode="simple"))
"""


def run(directory: Path, *command: str) -> str:
    """What a command prints that runs where nothing of ours can be found but by installation."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=400, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
def test_wheel_built_from_sdist_works_without_source_tree(tmp_path: Path) -> None:
    source, own, elsewhere = tmp_path / "source", tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "iris_ray", source / "iris_ray", ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(own, with_pip=True)
    python = str(own / "bin" / "python")
    run(source, python, "-m", "pip", "install", "--quiet", "setuptools>=77")
    run(source, python, "-c", BUILD_SDIST)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    run(elsewhere, python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", str(sdist))
    installed = Path(run(elsewhere, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # What it depends on is there already: the packages of this environment, but not iris_ray itself.
    (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    shutil.rmtree(source)

    assert {path.name for path in (installed / "iris_ray").glob("py.typed")} == {"py.typed"}
    assert (installed / "iris_ray" / "__init__.pyi").exists()
    assert "iris-ray demo" in run(elsewhere, str(own / "bin" / "iris-ray"), "--help")
    where, results = run(elsewhere, python, "-c", RUN).splitlines()
    assert Path(where).is_relative_to(own)
    assert results == "[0, 1]"
    assert sys.executable != python
