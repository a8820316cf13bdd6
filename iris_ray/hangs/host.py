"""A look of a few seconds at the processes of a task whose gang makes no progress."""

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from iris_ray.actors.host.services import HostPart
from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.task_files import LOOK_SIGNAL, STACKS_SIGNAL
from iris_ray.errors import InspectionFailedError, ServiceUnavailableError
from iris_ray.hangs.calls import HangCalls, TaskLook
from iris_ray.processes.identity import stat_of
from iris_ray.processes.subtree import descendants

WATCHED_S = 0.5
"""The shortest time over which the use of CPU is measured."""
STACKS_S = 3.0
"""The time for py-spy. A look without stacks is worth more than one that comes too late."""
TOLD_S, TOLD_POLL_S = 1.0, 0.05
MOST_TOLD_BYTES = 1 << 20
"""The number of bytes that are read of the stacks that a process writes: the last ones, with its main thread."""
MOST_FRAMES = 12

_THREAD = re.compile(r'^Thread .*?(?:"(?P<name>.*)")?$')
_TOLD = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STATES = {b"T": "T", b"t": "T", b"D": "D"}


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
    pids = [pid, *descendants(pid)]
    before, cpu_before = _state_and_cpu_seconds(pids)
    stack = _main_thread(pid)
    if not stack and stacks is not None and ask is not None:
        stack = _told(stacks, ask)
    time.sleep(max(0.0, began + WATCHED_S - time.monotonic()))
    took_s = time.monotonic() - began
    after, cpu_after = _state_and_cpu_seconds(pids)
    used_s = max(0.0, cpu_after - cpu_before)
    return TaskLook(after if after == before else "", used_s / took_s, stack, took_s)


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
            with stacks.open("rb") as file:  # it is the task's own, which may write to it without end
                file.seek(max(begin, file.seek(0, os.SEEK_END) - MOST_TOLD_BYTES))
                before, text = text, file.read(MOST_TOLD_BYTES).decode(errors="replace")
            if text and text == before:
                break
        return told_frames(text)
    except OSError:
        return ()


def _py_spy(arguments: list[str], timeout_s: float) -> str:
    try:
        found: str = module_of("inspection", "host").py_spy(arguments, timeout_s)
    except ServiceUnavailableError as error:
        raise InspectionFailedError(str(error)) from None
    return found


def _main_thread(pid: int) -> tuple[str, ...]:
    try:  # without stopping it: it makes no progress, and a stopped process could not be stopped once more
        return frames_of(_py_spy(["dump", "--nonblocking", "--pid", str(pid)], STACKS_S))
    except InspectionFailedError:
        return ()


def _state_and_cpu_seconds(pids: Iterable[int]) -> tuple[str, float]:
    """Return "T" if a process is stopped, "D" if one waits for a disk or a device, else ""; and the CPU they used."""
    stats = [stat for pid in pids if (stat := stat_of(pid)) is not None]
    return max((_STATES.get(stat.state, "") for stat in stats), default=""), sum(stat.cpu_s for stat in stats)
