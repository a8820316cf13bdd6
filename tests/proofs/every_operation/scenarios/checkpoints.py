"""Checkpoints in memory: a program on two slices saves steps, copies its shards to the other slice, and loses a slice.

The faults meet the first of two processes: its own files, and what it asks of the other one's host. Both hosts serve
their files on loopback.
"""

import contextlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.checkpoint import peer_files, store
from iris_ray.checkpoint import steps as steps_module
from iris_ray.checkpoint.boxes import whole, within
from iris_ray.checkpoint.host import FileService
from iris_ray.checkpoint.peer_files import PeerFiles
from iris_ray.checkpoint.steps import GangSteps
from iris_ray.checkpoint.store import DirectoryFiles
from iris_ray.errors import CheckpointTooLargeError
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario
from tests.support.state_gangs import Attempt, Killed, Layout, content

LAYOUTS = [Layout((8, 4), 0, None), Layout((6,), None, None)]
"""Of the first array each slice has a half of its own; both have the whole second one."""
STEPS = 4
JOB, TOKEN, ADDRESS = "train", "5ec2e7", "127.0.0.9"
_thread = threading.local()


def checkpoints() -> Scenario:
    return Scenario(
        "checkpoints",
        lambda place: None,
        _act,
        _judge,
        (OSError, CheckpointTooLargeError),
        {"a refused copy counts": _believe_copies, "the record comes first": _record_first},
    )


def _directories(place: Path, host: int) -> LocalDirectories:
    (place / f"host-{host}").mkdir(exist_ok=True)
    return LocalDirectories(place / f"host-{host}", None)


def _count_first_process(operations: Operations) -> None:
    """Count what the thread of the first process does, and its work in the background."""
    count, in_background = operations.do, steps_module._in_background

    def do(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (count if getattr(_thread, "counts", False) else _plainly)(name, function, *args, **kwargs)

    def started(function: Callable[[], None]) -> Future[None]:
        counts = getattr(_thread, "counts", False)

        def run() -> None:
            _thread.counts = counts
            function()

        return in_background(run)

    operations.do = do  # type: ignore[method-assign]
    steps_module._in_background = started


def _plainly(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _act(place: Path, said: Said, operations: Operations) -> None:
    _count_first_process(operations)
    peer_files.START_S = 1.0
    directories = [_directories(place, host) for host in range(2)]
    hosts = [one.take(JOB, TOKEN) for one in directories]
    services = [FileService(ADDRESS, one, lambda _: 1 << 20, 2.0) for one in directories]

    def seen(index: int, host: int) -> Any:
        return DirectoryFiles(hosts[host]) if index == host else PeerFiles(services[host].address, TOKEN, 2.0)

    attempt = Attempt(LAYOUTS, hosts, 2, 1, seen)
    errors: list[BaseException] = []

    def process(index: int) -> None:
        _thread.counts = index == 0
        steps = attempt.steps[index]
        try:
            for step in range(1, STEPS + 1):
                steps.save(step, attempt.leaves(index, content(LAYOUTS, 1, step)))
                steps.finish()
                if index == 0:
                    said("saved", step, steps.is_whole, steps.outlives_a_slice)
        except Killed:
            pass
        except BaseException as error:
            errors.append(error)
        _thread.counts = False
        attempt.service.end() if errors else None

    try:
        attempt.on_all(process)
    finally:
        for service in services:
            service.stop()
        for steps in attempt.steps:
            with contextlib.suppress(Killed, OSError, CheckpointTooLargeError):
                steps.finish()
        for one in directories:
            os.close(one._kept or -1)  # as the end of its process does
        store._known.clear()
    if errors:
        raise errors[0]


def _restored(place: Path, lost: int | None) -> int | None:
    """Return the step that the next attempt restores without a slice. Its bytes must be those that were saved."""
    after = place / f"without-{lost}"
    for host in range(2):
        if host != lost:
            shutil.copytree(place / f"host-{host}", after / f"host-{host}")
    (after / "host-0").mkdir(parents=True, exist_ok=True)
    attempt = Attempt(LAYOUTS, [_directories(after, host).take(JOB, TOKEN) for host in range(2)], 2, attempt=2)
    restored = [found for found in attempt.restore() if found is not None]
    attempt.on_all(lambda index: attempt.steps[index].finish())
    shutil.rmtree(after)
    if not restored:
        return None
    assert len(restored) == 2
    steps = {step for step, _ in restored}
    assert len(steps) == 1
    for _, leaves in restored:
        for array, boxes in zip(content(LAYOUTS, 1, *steps), leaves[1:], strict=True):
            for box, found in boxes.items():
                np.testing.assert_array_equal(found, array[within(box, whole(array.shape))])
    return steps.pop()


def _judge(place: Path, said: list[list[Any]]) -> None:
    kept = max((step for _, step, is_whole, _ in said if is_whole), default=0)
    outlives = max((step for _, step, _, outlives in said if outlives), default=0)
    for lost, least in ((None, kept), (0, outlives), (1, outlives)):
        found = _restored(place, lost)
        assert (found or 0) >= least, f"step {least} was saved, and {found} is restored without slice {lost}"
    unfinished = [path for path in place.rglob("*") if path.name.endswith(".new")]
    hosts = Counter(path.relative_to(place).parts[0] for path in unfinished)
    assert all(count == 1 for count in hosts.values()), unfinished  # both hosts write when their process is killed


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _believe_copies() -> None:
    copied = GangSteps._copy

    def copy(steps: GangSteps, *args: Any) -> None:
        with contextlib.suppress(OSError):
            copied(steps, *args)

    GangSteps._copy = copy  # type: ignore[method-assign, assignment]


def _record_first() -> None:
    begin = store.StepFiles.begin

    def begun(files: store.StepFiles, size: int) -> Any:
        files._settled = None
        files._forget = lambda slot: None  # type: ignore[method-assign]
        return begin(files, size)

    store.StepFiles.begin = begun  # type: ignore[method-assign, assignment]
