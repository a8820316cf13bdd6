"""What is only shown about a job stops nobody."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.client import job_progress


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
