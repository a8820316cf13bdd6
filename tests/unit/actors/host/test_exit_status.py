"""How a task's process ended, and why."""

import os
import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from iris_ray.actors.host.exit_status import (
    LOOKS_KEPT,
    ProcessExit,
    RecentOomKills,
    diagnose,
    exit_code_of,
    in_words,
    oom_kills,
)
from iris_ray.model.outcomes import EndKind

# -- diagnosis --------------------------------------------------------------------------------------------------------


KILLED, ABORTED = -9, -6


def found(
    code: int | None, *, had_started: bool = True, memory_was_short: bool = False, stopped_for: str | None = None
) -> ProcessExit:
    return ProcessExit(5.0, had_started, memory_was_short, code, stopped_for)


@pytest.mark.parametrize(
    ("code", "how", "exit_code"),
    [(3, "exited with code 3", 3), (ABORTED, "was killed by SIGABRT", 134), (KILLED, "was killed by SIGKILL", 137)],
)
def test_diagnosis_names_what_the_kernel_says(code: int, how: str, exit_code: int) -> None:
    end = diagnose(found(code))
    assert (end.kind, end.ended_at, end.error) == (EndKind.CRASHED, 5.0, f"the task process {how}")
    assert end.exit_code == exit_code


def test_diagnosis_without_kernel_message_is_a_crash() -> None:
    assert diagnose(found(None)).kind is EndKind.CRASHED


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KILLED, EndKind.OUT_OF_MEMORY),
        (None, EndKind.OUT_OF_MEMORY),  # before Linux 6.15 every end looks like this
        (ABORTED, EndKind.CRASHED),  # the kernel kills for memory by SIGKILL alone
        (1, EndKind.CRASHED),
    ],
)
def test_diagnosis_blames_memory_only_for_possible_kernel_kills(code: int | None, kind: EndKind) -> None:
    assert diagnose(found(code, memory_was_short=True)).kind is kind


@pytest.mark.parametrize("code", [None, KILLED])
@pytest.mark.parametrize("memory_was_short", [True, False])
def test_diagnosis_of_process_not_begun_blames_no_user_code(code: int | None, memory_was_short: bool) -> None:
    end = diagnose(found(code, had_started=False, memory_was_short=memory_was_short))
    assert end.kind is EndKind.NEVER_STARTED


@pytest.mark.parametrize("had_started", [True, False])
def test_diagnosis_of_stopped_process_gives_our_reason(had_started: bool) -> None:
    end = diagnose(found(KILLED, had_started=had_started, memory_was_short=True, stopped_for="another task ended"))
    assert (end.kind, end.error) == (EndKind.STOPPED, "another task ended")


def test_diagnosis_of_fork_killed_with_its_zygote_blames_no_user_code() -> None:
    killed = replace(found(KILLED), zygote_ended=True)
    assert (diagnose(killed).kind, diagnose(killed).exit_code) == (EndKind.ZYGOTE_ENDED, 137)
    assert diagnose(replace(killed, memory_was_short=True)).kind is EndKind.OUT_OF_MEMORY
    assert diagnose(replace(killed, had_started=False)).kind is EndKind.NEVER_STARTED
    assert diagnose(replace(killed, stopped_for="cancelled")).kind is EndKind.STOPPED


# -- kills by the kernel ----------------------------------------------------------------------------------------------


def test_oom_kills_of_all_files_are_added_up(tmp_path: Path) -> None:
    vmstat, events = tmp_path / "vmstat", tmp_path / "memory.events"
    vmstat.write_text("nr_free_pages 77\noom_kill 3\nnuma_hit 12\n")
    events.write_text("low 0\nhigh 9\nmax 8\noom 5\noom_kill 2\noom_group_kill 1\n")
    assert oom_kills((vmstat, events)) == 5
    assert oom_kills((vmstat,)) == 3
    vmstat.write_text("nr_free_pages 77\noom_kill 4\n")
    assert oom_kills((vmstat, events)) == 6


def test_oom_kills_are_none_where_kernel_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("nr_free_pages 77\n")
    (tmp_path / "empty").touch()
    assert oom_kills((tmp_path / "old", tmp_path / "empty", tmp_path / "missing", tmp_path)) == 0
    assert oom_kills(()) == 0


def test_oom_kills_of_this_machine_are_readable() -> None:
    assert oom_kills() >= 0


def test_old_oom_kill_explains_no_later_end() -> None:
    """A task may run for weeks, and somebody sends it SIGKILL in the end."""
    counts = [3]
    recent = RecentOomKills(lambda: counts[0])
    assert not recent.found()
    counts[0] = 4
    for _ in range(LOOKS_KEPT - 1):
        recent.look()
        assert recent.found()
    recent.look()
    assert not recent.found()


# -- a process that is not our child ----------------------------------------------------------------------------------


TELLS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)


@pytest.mark.parametrize(
    ("script", "code", "how"),
    [
        ("exit 0", 0, "exited with code 0"),
        ("exit 3", 3, "exited with code 3"),
        ("kill -KILL $$", -9, "was killed by SIGKILL"),
        ("kill -SEGV $$", -11, "was killed by SIGSEGV"),
        ("kill -ABRT $$", -6, "was killed by SIGABRT"),
        ("kill -40 $$", -40, "was killed by signal 40"),
    ],
)
def test_exit_status_is_known_to_process_other_than_parent(script: str, code: int, how: str) -> None:
    assert in_words(code) == how
    process = subprocess.Popen(["sh", "-c", f"ulimit -c 0; read wait; {script}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert exit_code_of(pidfd) is None  # it still runs
        process.communicate(b"\n", timeout=10)
        assert exit_code_of(pidfd) == (code if TELLS else None)
    finally:
        os.close(pidfd)
