"""How a task ended, from what is known about its process."""

import pytest

from iris_ray.actors.host.exit_status import ProcessExit, diagnose
from iris_ray.model.outcomes import EndKind

KILLED, ABORTED = -9, -6


def found(
    code: int | None, *, had_started: bool = True, memory_was_short: bool = False, stopped_for: str | None = None
) -> ProcessExit:
    return ProcessExit(5.0, had_started, memory_was_short, code, stopped_for)


@pytest.mark.parametrize(
    ("code", "how", "exit_code"),
    [
        (3, "exited with code 3", 3),
        (ABORTED, "was killed by SIGABRT", 134),
        (KILLED, "was killed by SIGKILL", 137),
    ],
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
