"""Runs a scenario once for each operation and fault, and judges what is left.

Each run is a process of its own, forked from one that has imported everything. First a process acts: it does what the
scenario says, with one fault, and reports what was acknowledged as done. Then another process, without a fault, comes
back to the same directory and judges by those reports: what was acknowledged is there, whole; what was not is there
whole or not at all. A process that acts and survives must leave no descriptor, thread or child process behind.
"""

import contextlib
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.proofs.every_operation.operations import KILLED, Fault, Operations, faults_of

FAILED = 1
"""The exit code of a process that has found something."""
LONGEST_S = 30.0
"""A process that takes longer hangs."""
SETTLE_S = 10.0
"""Threads and child processes of the scenario have this time to end."""


class Said:
    """Reports of what was acknowledged. They outlive the process that makes them, and no fault concerns them.

    Args:
        file: takes the reports.
        operations: may end the process after a report.
    """

    def __init__(self, file: Path, operations: Operations) -> None:
        self._operations = operations
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._write = os.write

    def __call__(self, *words: Any) -> None:
        """Report something, as JSON values."""
        self._write(self._file, (json.dumps(words) + "\n").encode())
        self._operations.has_reported()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that a user asks for, and what must hold afterwards whatever fails.

    Attributes:
        name: of the scenario.
        prepare: makes what is there before, in a directory; no fault happens.
        act: does it, and reports what it begins and what was acknowledged.
        judge: comes back to the directory, and raises AssertionError if anything acknowledged is not there.
        errors: what `act` may raise.
        defects: changes that break the code on purpose, by name; each must be found.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path, Said, Operations], None]
    judge: Callable[[Path, list[list[Any]]], None]
    errors: tuple[type[Exception], ...]
    defects: dict[str, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A run that went wrong.

    Attributes:
        at: the number of the operation.
        operation: its name.
        fault: what happened there.
        why: what was wrong.
    """

    at: int
    operation: str
    fault: Fault
    why: str


@dataclass(slots=True)
class Report:
    """The runs of one scenario.

    Attributes:
        operations: how often it does each kind of operation.
        runs: how many faults were tried.
        findings: what went wrong.
    """

    operations: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    findings: list[Finding] = field(default_factory=list)


def report_of(
    scenario: Scenario, share: float = 1.0, seed: int = 0, defect: str | None = None, first: bool = False
) -> Report:
    """Run a scenario with every fault.

    Args:
        scenario: what is done.
        share: the part of all faults that are tried, chosen at random.
        seed: chooses them.
        defect: the name of a defect that is put in, or None.
        first: whether to end with the first finding.
    """
    names, problem = _run(scenario, None, Fault.REFUSED, defect)
    if names is None:
        return Report(findings=[Finding(-1, "none", Fault.REFUSED, problem or "no operation")])
    report = Report(Counter(names))
    if problem:
        report.findings.append(Finding(-1, "none", Fault.REFUSED, problem))
    cases = [(at, fault) for at, name in enumerate(names) for fault in faults_of(name)]
    if share < 1 or first:
        cases = random.Random(seed).sample(cases, round(len(cases) * share))
    for at, fault in cases:
        if first and report.findings:
            break
        report.runs += 1
        _, problem = _run(scenario, at, fault, defect)
        if problem:
            report.findings.append(Finding(at, names[at], fault, problem))
    return report


def _run(scenario: Scenario, at: int | None, fault: Fault, defect: str | None) -> tuple[list[str] | None, str | None]:
    """Return the names of the operations, and what went wrong, or None."""
    memory = "/dev/shm"  # disks take long to keep what is synced, and no fault is about that
    top = Path(tempfile.mkdtemp(prefix="iris-ray-fault-", dir=memory if os.access(memory, os.W_OK) else None))
    place, said, names = top / "place", top / "said", top / "names"
    try:
        place.mkdir()
        scenario.prepare(place)
        why = _forked(lambda: _act(scenario, place, said, names, at, fault, defect), top / "why")
        reports = [json.loads(line) for line in said.read_text().splitlines()]
        why = why or _forked(lambda: scenario.judge(place, reports), top / "why")
        return (json.loads(names.read_text()) if names.exists() else None), why
    finally:
        shutil.rmtree(top)


def _act(
    scenario: Scenario, place: Path, said: Path, names: Path, at: int | None, fault: Fault, defect: str | None
) -> None:
    if defect is not None:
        scenario.defects[defect]()
    operations = Operations(at, fault)
    report = Said(said, operations)
    before = _held()
    with operations.installed(), contextlib.suppress(*scenario.errors):
        scenario.act(place, report, operations)
    names.write_text(json.dumps(operations.names))
    deadline = time.monotonic() + SETTLE_S
    while left := {kind: found - before[kind] for kind, found in _held().items() if found - before[kind]}:
        gc.collect()
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.01)


def _held() -> dict[str, set[str]]:
    """Return what this process holds: descriptors, threads, child processes."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    listing = f"/proc/{os.getpid()}/fd"
    return {
        "descriptors": {one for one in descriptors if not one.endswith(listing)},
        "threads": {thread.name for thread in threading.enumerate()},
        "children": set(children),
    }


def _forked(work: Callable[[], None], why: Path) -> str | None:
    """Do work in a process of its own. Return what went wrong, or None."""
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            os.setpgid(0, 0)
            signal.alarm(int(LONGEST_S))
            logging.disable()
            work()
            code = 0
        except BaseException:
            with contextlib.suppress(BaseException):
                why.write_text(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # children that a killed process has left
    code = os.waitstatus_to_exitcode(status)
    if code in (0, KILLED):
        return None
    if code == -signal.SIGALRM:
        return f"it took longer than {LONGEST_S:g} s"
    return why.read_text() if code == FAILED and why.exists() else f"the process ended with {code}"
