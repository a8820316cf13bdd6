"""How a task ended, from what is known about its process."""

import pytest

from iris_ray.actors.host.exit_diagnosis import ProcessExit, diagnose
from iris_ray.model.outcomes import EndKind

KILLED, ABORTED = "was killed by SIGKILL", "was killed by SIGABRT"


def found(
    how: str | None, *, had_started: bool = True, memory_was_short: bool = False, stopped_for: str | None = None
) -> ProcessExit:
    return ProcessExit(5.0, had_started, memory_was_short, how, stopped_for)


@pytest.mark.parametrize("how", ["exited with code 3", ABORTED, KILLED])
def test_diagnose_names_what_the_kernel_says(how: str) -> None:
    end = diagnose(found(how))
    assert (end.kind, end.ended_at, end.error) == (EndKind.CRASHED, 5.0, f"the task process {how}")


def test_diagnose_without_a_word_of_the_kernel_is_a_crash() -> None:
    assert diagnose(found(None)).kind is EndKind.CRASHED


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (KILLED, EndKind.OUT_OF_MEMORY),
        (None, EndKind.OUT_OF_MEMORY),  # before Linux 6.15 every end looks like this
        (ABORTED, EndKind.CRASHED),  # the kernel kills for memory by SIGKILL alone
        ("exited with code 1", EndKind.CRASHED),
    ],
)
def test_diagnose_blames_memory_only_for_an_end_that_the_kernel_may_have_caused(how: str | None, kind: EndKind) -> None:
    assert diagnose(found(how, memory_was_short=True)).kind is kind


@pytest.mark.parametrize("how", [None, KILLED])
@pytest.mark.parametrize("memory_was_short", [True, False])
def test_diagnose_of_a_process_that_had_not_begun_blames_no_user_code(how: str | None, memory_was_short: bool) -> None:
    end = diagnose(found(how, had_started=False, memory_was_short=memory_was_short))
    assert end.kind is EndKind.NEVER_STARTED


@pytest.mark.parametrize("had_started", [True, False])
def test_diagnose_of_a_process_that_was_stopped_gives_our_reason(had_started: bool) -> None:
    end = diagnose(found(KILLED, had_started=had_started, memory_was_short=True, stopped_for="another task ended"))
    assert (end.kind, end.error) == (EndKind.STOPPED, "another task ended")
