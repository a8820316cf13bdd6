"""How long a task holds its host: nobody uses it any more, or it was held long enough."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from iris_ray.dev import held_job
from iris_ray.dev.code_directory import CodeDirectory
from iris_ray.dev.held_job import Held, HeldHost, hold
from iris_ray.dev.held_run import HeldRun
from iris_ray.endpoints import task as endpoints
from iris_ray.errors import TaskMovedError
from iris_ray.task import job_info
from tests.support.waiting import wait_until

LONG_S = 1000.0


class Holding:
    """A task that holds this machine, in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle_s: float = LONG_S, most_s: float = LONG_S) -> None:
        self.endpoints: list[str] = []
        self.error: BaseException | None = None
        monkeypatch.setattr(endpoints, "register_endpoint", lambda _, address: self.endpoints.append(address))
        self.thread = threading.Thread(target=self._hold, args=(idle_s, most_s))
        self.thread.start()

    def _hold(self, idle_s: float, most_s: float) -> None:
        try:
            hold(idle_s, most_s, ())
        except BaseException as error:
            self.error = error

    def held(self) -> Held:
        facts = wait_until(lambda: self.endpoints)[0]
        return Held("mine", "", "dev-mine", (HeldHost(**json.loads(facts)),))

    def begin(self, here: Path, *words: str) -> HeldRun:
        run = HeldRun(self.held())
        run.start(CodeDirectory.look(here), words, {}, lambda _: None)
        return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's directory; tasks of this process are told where they are."""
    me = SimpleNamespace(
        local_dir=str(tmp_path), task_index=0, attempt=1, job_id="dev-mine", processes_per_host=1, slice_name="v4-8-0",
        worker_id=0, local_index=0,
    )  # fmt: skip
    monkeypatch.setattr(job_info, "get_job_info", lambda: me)
    monkeypatch.setattr(held_job, "_began_at", lambda *_: time.time())
    monkeypatch.setattr(held_job, "LOOK_S", 0.05)
    path = tmp_path / "here"
    path.mkdir()
    return path


def test_host_that_nobody_uses_is_given_back_and_one_in_use_is_not(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Holding(monkeypatch, idle_s=1.0)
    with task.begin(here, "sleep", "2.5") as run:
        assert not [piece for piece in run.pieces() if piece.note]
        assert run.exit_code == 0
    assert task.thread.is_alive(), "it was in use all the time"
    task.thread.join(30)
    assert not task.thread.is_alive()
    assert task.error is None
    assert "the slice is given back: nothing has run on it for 0.0166667 minutes" in capsys.readouterr().out


def test_host_that_was_held_long_enough_is_given_back_with_its_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Holding(monkeypatch, most_s=1.0)
    with task.begin(here, "sleep", "600") as run, pytest.raises(TaskMovedError, match="it was held for"):
        list(run.pieces())
    task.thread.join(30)
    assert not task.thread.is_alive()
    assert task.error is None
