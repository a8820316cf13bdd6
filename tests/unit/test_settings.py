"""The variables that a user may set: how each is read, and that nothing else reads any."""

import ast
import re
from pathlib import Path

import pytest

import iris_ray
from iris_ray import settings

NAME = re.compile(r"_?IRIS_[A-Z_]+")
PACKAGE = Path(iris_ray.__file__).parent
OURS = {
    *("IRIS_TASK_ID", "IRIS_TASK_RESOURCES", "IRIS_RAY_TASK_TOKEN", "IRIS_RAY_TASK_FILES", "IRIS_RAY_LOCAL_RUN"),
    *("IRIS_OUTPUT_DIR", "IRIS_SLOT_PROCESS", "IRIS_SLOT_MEMORY", "IRIS_SLOT_MEMORY_SHARE"),
    "_IRIS_RAY_COMPLETE",  # click's
}
"""Variables that iris_ray gives to its own processes."""
ALONE = {("testing/process_supervisor.py", settings.HOST_DIR.name)}
"""Scripts that import nothing of iris_ray."""


def test_no_other_module_names_a_variable_of_the_users() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    }
    others = {(path, name) for path, name in found if path != "settings.py" and name not in OURS}
    assert others == ALONE


def test_variable_that_is_not_set_or_empty_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
        assert variable.read() is None
        assert variable.read({variable.name: ""}) is None


def test_variable_is_read_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.USER.name, "ann")
    assert settings.USER.read() == "ann"
    assert settings.HOST_DIR.read({settings.HOST_DIR.name: "/mnt/disk"}) == Path("/mnt/disk")
    assert [settings.DEBUG.read({settings.DEBUG.name: text}) for text in ("1", "0")] == [True, False]
