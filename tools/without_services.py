"""Copies this checkout without some services, and checks what is left: ``python -m tools.without_services``.

    python -m tools.without_services kernel build/kernel     a copy without any service, to run the kernel's tests in
    python -m tools.without_services each build/without      a copy without each single service, and its check

A service is taken out as a person would do it: its folder, its line in ``iris_ray/services.py``, its tests, and its
names in ``iris_ray/__init__.pyi``. The check of a copy imports every module that the whole checkout can import, and
compares the commands: just the service's own are gone.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from iris_ray.services import SERVICES

REPOSITORY = Path(__file__).parents[1]
NAMES = tuple(package.removeprefix("iris_ray.") for package in SERVICES)
SIDE_BY_SIDE = 2
LOOK = """
import importlib, json, pkgutil, sys
import iris_ray
found = {"modules": [], "failed": {}, "commands": []}
for module in pkgutil.walk_packages(iris_ray.__path__, "iris_ray.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        found["modules"].append(module.name)
    except Exception as error:
        found["failed"][module.name] = f"{type(error).__name__}: {error}"
try:
    from iris_ray.cli.main import commands
    found["commands"] = sorted(commands())
except Exception as error:
    found["failed"]["the list of commands"] = f"{type(error).__name__}: {error}"
for name in iris_ray.__all__:
    try:
        getattr(iris_ray, name)
    except Exception as error:
        found["failed"]["public names"] = f"{name}: {type(error).__name__}: {error}"
print(json.dumps(found))
"""


def copy_without(services: Collection[str], to: Path) -> None:
    """Copy the files that git tracks, and take services out of the copy."""
    shutil.rmtree(to, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
    gone = tuple(f"{folder}/{name}/" for name in services for folder in ("iris_ray", "tests/unit", "tests/cluster"))
    for path in filter(None, listed.decode().split("\0")):
        if not path.startswith(gone) and (REPOSITORY / path).is_file():
            (to / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / path, to / path)
    take_lines_out(to / "iris_ray" / "services.py", services)
    take_names_out(to / "iris_ray" / "__init__.pyi", services)
    (to / "sitecustomize.py").write_text(ALONE)


ALONE = '''"""Python imports this first. Without it, an editable installation would lend the modules that are gone."""

import sys

sys.meta_path[:] = [one for one in sys.meta_path if "__editable___iris_ray" not in getattr(one, "__module__", "")]
'''


def take_lines_out(listing: Path, services: Collection[str]) -> None:
    """Remove the services' lines from the list."""
    lines = listing.read_text().splitlines(keepends=True)
    out = {f'"iris_ray.{name}",' for name in services}
    listing.write_text("".join(line for line in lines if line.strip() not in out))


def take_names_out(stub: Path, services: Collection[str]) -> None:
    """Remove the public names that come from these services."""
    text = stub.read_text()
    imports = re.compile(rf"^from \.(?:{'|'.join(services)})[\w.]* import (\([^)]*\)|[^\n]*)\n", re.MULTILINE)
    names = {name for found in imports.findall(text) for name in re.findall(r"\w+", found)}
    kept = imports.sub("", text).splitlines(keepends=True)
    stub.write_text("".join(line for line in kept if line.strip().strip('",') not in names))


def look_at(checkout: Path) -> dict[str, object]:
    """Return the modules of a checkout that can be imported, those that can't, and its commands."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", LOOK]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def problems_without(service: str, whole: dict[str, object], to: Path) -> list[str]:
    """Take one service out. Return what is wrong with the rest."""
    copy_without([service], to)
    left = look_at(to)
    inside = f"iris_ray.{service}"
    modules, commands = _strings(whole["modules"]), _strings(whole["commands"])
    lost = {module for module in modules - _strings(left["modules"]) if not f"{module}.".startswith(f"{inside}.")}
    failed = left["failed"]
    assert isinstance(failed, dict)
    found = [f"{module} can't be imported: {failed.get(module)}" for module in sorted(lost)]
    found += [f"{name}: {failed[name]}" for name in ("the list of commands", "public names") if name in failed]
    found += [
        f"the command {words} is gone" for words in commands - _own_commands(service) - _strings(left["commands"])
    ]
    found += [f"the command {words} is left" for words in _own_commands(service) & _strings(left["commands"])]
    shutil.rmtree(to)
    return found


def _strings(found: object) -> set[str]:
    assert isinstance(found, list)
    return set(found)


def _own_commands(service: str) -> set[str]:
    from iris_ray.actors.protocol.services import installed_services

    return {words for one in installed_services() if one.name == service for words in one.commands}


def main() -> int:
    parser = argparse.ArgumentParser(description="Copies this checkout without services.")
    parser.add_argument("what", choices=("kernel", "each"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("services", nargs="*", help="of each, only these")
    chosen = parser.parse_args()
    directory = chosen.directory.absolute()
    if chosen.what == "kernel":
        copy_without(NAMES, directory)
        failed = look_at(directory)["failed"]
        assert isinstance(failed, dict)
        for module, why in failed.items():
            print(f"without any service, {module} can't be imported: {why}")
        print(f"the kernel alone is in {directory}")
        return 1 if failed else 0
    whole, services = look_at(REPOSITORY), chosen.services or NAMES
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        found = dict(
            zip(
                services,
                threads.map(lambda name: problems_without(name, whole, directory / name), services),
                strict=True,
            )
        )
    for service, problems in found.items():
        print(f"without {service}: {'nothing is missing' if not problems else ''}")
        print("".join(f"    {problem}\n" for problem in problems), end="")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
