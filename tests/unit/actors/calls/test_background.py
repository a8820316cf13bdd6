"""Background work is neither collected while it runs nor does its error get lost."""

import ast
import asyncio
import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import iris_ray
from iris_ray.actors.calls.background import BackgroundTasks, repeat
from iris_ray.errors import DeposedError
from tests.support import virtual_time
from tests.support.virtual_time import in_virtual_time


async def fails(error: BaseException) -> None:
    raise error


async def waits_for_ever() -> None:
    await asyncio.Event().wait()


async def test_start_keeps_reference_to_task() -> None:
    background = BackgroundTasks()
    background.start(waits_for_ever(), "waiting")
    await asyncio.sleep(0)
    gc.collect()
    assert [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}] == ["waiting"]
    assert len(background) == 1


async def test_start_returns_a_task_with_the_result() -> None:
    async def seven() -> int:
        return 7

    assert (await BackgroundTasks().start(seven(), "counting")) == 7


async def test_error_is_logged_with_the_work_and_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks()
    kept = background.start(fails(ValueError("x")), "watching job 7")  # noqa: F841, its owner still has it
    await background.all_ended()
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "watching job 7 failed")
    assert record.exc_info is not None
    assert repr(record.exc_info[1]) == "ValueError('x')"


async def test_error_is_logged_and_raised_to_awaiting_caller(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="x"):
        await BackgroundTasks().start(fails(ValueError("x")), "watching job 7")
    assert [record.getMessage() for record in caplog.records] == ["watching job 7 failed"]


async def test_hook_gets_each_error_after_it_was_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[BaseException, int]] = []
    background = BackgroundTasks(on_error=lambda error: seen.append((error, len(caplog.records))))
    background.start(fails(DeposedError("replaced")), "journal")
    await background.all_ended()
    ((error, logged_before),) = seen
    assert isinstance(error, DeposedError)
    assert logged_before == 1


async def test_all_ended_waits_for_work_started_meanwhile() -> None:
    done: list[str] = []
    background = BackgroundTasks()

    async def second() -> None:
        await asyncio.sleep(0)
        done.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        background.start(second(), "second")
        done.append("first")

    background.start(first(), "first")
    await background.all_ended()
    assert done == ["first", "second"]


async def test_cancel_ends_all_running_work() -> None:
    background = BackgroundTasks()
    background.start(waits_for_ever(), "waiting")
    background.repeat(waits_for_ever, "waiting again and again")
    await asyncio.sleep(0)
    background.cancel()
    await background.all_ended()
    assert len(background) == 0


@in_virtual_time
async def test_repeat_continues_after_error_until_step_returns_true(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[float] = []

    async def step() -> bool:
        taken.append(virtual_time.now())
        await asyncio.sleep(1.0)
        if len(taken) == 2:
            raise ValueError("x")
        return len(taken) == 4

    await repeat(step, "watching job 7", pause_s=5.0)
    assert taken == [0.0, 1.0, 7.0, 8.0]
    assert [record.getMessage() for record in caplog.records] == ["watching job 7 failed; going on in 5 s"]
    assert "ValueError: x" in caplog.text


# -- no other module starts tasks -------------------------------------------------------------------------------------


PACKAGE = Path(iris_ray.__file__).parent
ROOMS = (PACKAGE / "actors", PACKAGE / "preflight", PACKAGE / "slots" / "actors")

HANDED_ON = {
    "actors/controller/controller_process.py": "ping raises the error of the start to its caller",
    "actors/pool/slice_pool_manager.py": "results raises the error of a detached job to the client that asks for them",
    "slots/actors/model_call.py": "the caller of a model gets the error of the call",
    "slots/actors/streams.py": "every reader of a stream gets the error of the call",
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
    handed_on = {path for path in HANDED_ON if (PACKAGE / path).exists()}  # a service may be taken out
    assert keep.keys() == handed_on, f"start these by BackgroundTasks: {keep}"


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
