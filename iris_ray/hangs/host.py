"""A look of a few seconds at the processes of a task whose gang makes no progress."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from iris_ray.actors.host.services import HostPart
from iris_ray.actors.protocol.task_files import LOOK_SIGNAL, STACKS_SIGNAL
from iris_ray.errors import InspectionFailedError
from iris_ray.hangs.calls import HangCalls, TaskLook
from iris_ray.inspection.host import py_spy

WATCHED_S = 0.5
"""The use of CPU is measured for so long at least."""
STACKS_S = 3.0
"""py-spy may take so long. A look without stacks is worth more than one that comes too late."""
TOLD_S, TOLD_POLL_S = 1.0, 0.05
MOST_FRAMES = 12

_THREAD = re.compile(r'^Thread .*?(?:"(?P<name>.*)")?$')
_TOLD = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STATES = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "T", psutil.STATUS_DISK_SLEEP: "D"}


class HangsOnHost(HostPart):
    """See `HangCalls`."""

    calls = (HangCalls,)

    async def look(self, pid: int) -> TaskLook:
        watch = self.host.watches[pid]
        ask = (lambda: watch.signal(LOOK_SIGNAL)) if watch.has_started else None
        return await self.in_thread(look_at, pid, watch.files.stacks, ask)

    async def dump_stacks(self, pid: int) -> None:
        self.host.watches[pid].signal(STACKS_SIGNAL)


def look_at(pid: int, stacks: Path | None = None, ask: Callable[[], None] | None = None) -> TaskLook:
    """Return the activity of a task's process and its descendants. Never raise; leave out what can't be measured.

    Args:
        pid: the process.
        stacks: where it writes its stacks if it is asked. It is asked if py-spy may not look into it.
        ask: asks it; None: it would not understand that.
    """
    began = time.monotonic()
    processes = _tree(pid)
    before, cpu_before = _state(processes), _cpu_seconds(processes)
    stack = _main_thread(pid)
    if not stack and stacks is not None and ask is not None:
        stack = _told(stacks, ask)
    time.sleep(max(0.0, began + WATCHED_S - time.monotonic()))
    took_s = time.monotonic() - began
    used_s, after = _cpu_seconds(processes) - cpu_before, _state(processes)
    return TaskLook(after if after == before else "", max(0.0, used_s) / took_s, stack, took_s)


def frames_of(dump: str) -> tuple[str, ...]:
    """Return the innermost frames of the main thread in a dump of py-spy, the innermost first."""
    threads: dict[str, list[str]] = {}
    frames: list[str] = []
    for line in dump.splitlines():
        if (found := _THREAD.match(line)) is not None:
            frames = threads.setdefault(found["name"] or "", [])
        elif line.startswith("    "):
            frames.append(line.strip())
    main = threads.get("MainThread") or next(iter(threads.values()), [])
    return tuple(main[:MOST_FRAMES])


def told_frames(text: str) -> tuple[str, ...]:
    """Return the innermost frames of the main thread as `faulthandler` writes them, the innermost first."""
    main = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]  # the oldest thread comes last
    return tuple(f"{name} ({path}:{line})" for path, line, name in _TOLD.findall(main))[:MOST_FRAMES]


def _told(stacks: Path, ask: Callable[[], None]) -> tuple[str, ...]:
    """Have the process write its stacks. It does so within milliseconds, unless it is stopped."""
    try:
        begin = stacks.stat().st_size
        ask()
        text, deadline = "", time.monotonic() + TOLD_S
        while time.monotonic() < deadline:
            time.sleep(TOLD_POLL_S)
            before, text = text, stacks.read_bytes()[begin:].decode(errors="replace")
            if text and text == before:
                break
        return told_frames(text)
    except OSError:
        return ()


def _main_thread(pid: int) -> tuple[str, ...]:
    try:  # without stopping it: it makes no progress, and a stopped process could not be stopped once more
        return frames_of(py_spy(["dump", "--nonblocking", "--pid", str(pid)], STACKS_S))
    except InspectionFailedError:
        return ()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _state(processes: Iterable[psutil.Process]) -> str:
    """Return "T" if one of them is stopped, "D" if one waits for a disk or a device, else ""."""
    found = set()
    for process in processes:
        try:
            found.add(_STATES.get(process.status(), ""))
        except psutil.Error:
            continue
    return max(found, default="")


def _cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    used = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
            used += times.user + times.system
        except psutil.Error:
            continue
    return used
