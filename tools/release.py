"""Builds, checks and tags a release: ``make release VERSION=0.1.0``; docs/releasing.md has the steps around it."""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
DIST, WORK = REPOSITORY / "dist", REPOSITORY / "build" / "release"
STATED = {
    "iris_ray/__init__.py": r'^__version__ = "{}"$',
    "CITATION.cff": r"^version: {}$",
    "CHANGELOG.md": r"^## \[{}\] - \d{{4}}-\d\d-\d\d$",
}
"""The files that state the version of a release, and how."""
TRY_IT = """
from iris_ray import get_job_info, run_on_pod
print(run_on_pod(lambda: get_job_info().worker_id, "v4-16", mode="simple"))
"""


def disagreeing(version: str) -> list[str]:
    """Return the files that do not state this version."""
    return [
        file
        for file, line in STATED.items()
        if not re.search(line.format(re.escape(version)), (REPOSITORY / file).read_text(), re.MULTILINE)
    ]


def run(*command: str | Path, cwd: Path = REPOSITORY) -> str:
    print("+", *command, flush=True)
    return subprocess.run(list(map(str, command)), cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def environment(name: str, *packages: str | Path) -> Path:
    """Make an environment with these packages, and return the directory of its programs."""
    venv.create(WORK / name, with_pip=True, clear=True)
    programs = WORK / name / "bin"
    run(programs / "pip", "install", "--quiet", *packages)
    return programs


def main(version: str) -> None:
    """Build and check the distributions of a version, then tag the commit."""
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"release what is committed; these files have changes:\n{changed}")
    if files := disagreeing(version):
        sys.exit(f"{', '.join(files)} do not state the version {version}: see docs/releasing.md")
    for directory in (DIST, WORK):
        shutil.rmtree(directory, ignore_errors=True)
    tools = environment("tools", "build", "twine")
    run(tools / "python", "-m", "build", "--outdir", DIST, REPOSITORY)
    run(tools / "twine", "check", "--strict", *DIST.iterdir())
    (wheel,) = DIST.glob("*.whl")
    empty = environment("empty", wheel)
    said = run(empty / "iris-ray", "--version", cwd=WORK)
    if version not in said or run(empty / "python", "-c", TRY_IT, cwd=WORK).strip() != "[0, 1]":
        sys.exit(f"{wheel.name} does not work in an empty environment; it says: {said}")
    run("git", "tag", "--annotate", f"v{version}", "--message", f"iris_ray {version}")
    print(f"v{version} is tagged, and dist/ has what to upload: docs/releasing.md")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("say which version: make release VERSION=0.1.0")
    main(sys.argv[1])
