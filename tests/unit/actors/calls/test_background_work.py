"""Whoever keeps a task beside its calls has `BackgroundTasks` start it, so that its error is logged."""

import ast
from collections.abc import Iterator
from pathlib import Path

import iris_ray

PACKAGE = Path(iris_ray.__file__).parent
ROOMS = (PACKAGE / "actors", PACKAGE / "slots" / "actors")

HANDED_ON = {
    "actors/controller/controller_process.py": "ping raises the error of the start to whoever asks",
    "actors/pool/slice_pool_manager.py": "results raises the error of a job without a caller to whoever asks for them",
    "slots/actors/model_call.py": "the caller of a model gets the error of the call",
}
"""Modules that keep raw tasks and hand their errors on, and how."""


def raw_tasks(source: str) -> Iterator[int]:
    """Yield the lines of statements that put the raw task of a coroutine into an attribute of ``self``."""
    if "ensure_future(" not in source and "create_task(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)):
            text = ast.unparse(node)
            makes_task = "asyncio.ensure_future(" in text or "asyncio.create_task(" in text
            if makes_task and text.startswith("self."):
                yield node.lineno


def test_no_module_starts_raw_asyncio_tasks() -> None:
    keep = {
        str(path.relative_to(PACKAGE)): lines
        for room in ROOMS
        for path in sorted(room.rglob("*.py"))
        if (lines := list(raw_tasks(path.read_text())))
    }
    assert keep.keys() == HANDED_ON.keys(), f"start these by BackgroundTasks: {keep}"


def test_raw_asyncio_tasks_are_found() -> None:
    source = """
self._work = asyncio.ensure_future(work())
self._work: Task = None if idle else asyncio.create_task(work())
self._works["a"] = asyncio.create_task(work())
self._works.append(asyncio.ensure_future(work()))
self._works += [asyncio.ensure_future(work())]
self._work = self._background.start(work())
work = asyncio.ensure_future(work())
"""
    assert list(raw_tasks(source)) == [2, 3, 4, 5, 6]
