"""What is shown of a job while somebody waits for it."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.actors.protocol.status import JobStatus
from iris_ray.client import job_progress
from iris_ray.client.job_progress import job_in_words
from iris_ray.model.lifecycle import JobState, TaskState
from tests.unit.cli.test_printing import WAITING, job_status


def test_unprintable_status_does_not_end_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Controller's version may be another one."""

    @contextlib.contextmanager
    def live_line(*_: Any, **__: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(live=True, show=lambda text: None)

    waits = iter([False, False, True])
    monkeypatch.setattr(job_progress, "live_line", live_line)
    monkeypatch.setattr(job_progress, "_StatusWatch", lambda _: SimpleNamespace(latest=object))
    job_progress.wait_visibly("job", lambda _: next(waits))
    assert list(waits) == []


# -- the live line ----------------------------------------------------------------------------------------------------


LOST = "host v4-16-0/1 was lost"
RUNNING = job_status(state=JobState.RUNNING, tasks={TaskState.RUNNING: 4}, groups=("v4-16-0", "v4-16-1"))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (job_status(waiting=WAITING, attempt=0), str(WAITING)),
        (job_status(waiting=WAITING, error=LOST), f"{WAITING}; it restarts after: {LOST}"),
        (
            job_status(tasks={TaskState.ASSIGNED: 3, TaskState.RUNNING: 1}, groups=("v4-32-0",)),
            "starting: 1 of 4 tasks run on v4-32-0",
        ),
        (
            job_status(tasks={TaskState.ASSIGNED: 2}, groups=("v4-16-1",), attempt=2, error=LOST),
            "starting: 0 of 2 tasks run on v4-16-1 (attempt 2, after: host v4-16-0/1 was lost)",
        ),
        (RUNNING, "running · 4 tasks · v4-16-0, v4-16-1"),
        (
            replace(RUNNING, step=120, status="loss 2.31", attempt=3),
            "step 120: loss 2.31 · 4 tasks · v4-16-0, v4-16-1 · attempt 3",
        ),
        (replace(RUNNING, gives_way=("prod takes its hosts", 12.0)), "its hosts are to go: prod takes its hosts"),
        (
            replace(RUNNING, tasks={TaskState.RUNNING: 1, TaskState.SUCCEEDED: 3}),
            "running · 3 of 4 tasks have returned · v4-16-0, v4-16-1",
        ),
        (replace(RUNNING, state=JobState.SUCCEEDED), "has ended: succeeded"),
    ],
)
def test_live_line_shows_state_of_job(status: JobStatus, words: str) -> None:
    assert job_in_words(status) == words
