"""How long a task holds its host: nobody uses it any more, or it was held long enough."""

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from iris_ray.actors.calls import controller_connection
from iris_ray.dev import held_job
from iris_ray.dev.code_directory import CodeDirectory
from iris_ray.dev.held_job import Held, HeldHost, hold
from iris_ray.dev.held_run import HeldRun
from iris_ray.endpoints import task as endpoints
from iris_ray.errors import TaskMovedError
from iris_ray.task import job_info
from tests.support.waiting import wait_until

LONG_S = 1000.0
HELD_BEFORE = held_job._held_before


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

    def ended(self) -> BaseException | None:
        """Wait for the end of the task, and return its error."""
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.error

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
    monkeypatch.setattr(held_job, "_held_before", lambda *_: 0.0)
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
    assert task.ended() is None
    assert "the slice is given back: nothing has run on it for 0.0166667 minutes" in capsys.readouterr().out


def test_host_that_was_held_long_enough_is_given_back_with_its_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Holding(monkeypatch, most_s=4.0)  # the start of the process that waits counts
    with task.begin(here, "sleep", "600") as run, pytest.raises(TaskMovedError, match="it was held for"):
        list(run.pieces())
    assert task.ended() is None


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_wrong_clock_of_a_host_changes_no_holding_time(
    here: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """The job has had its slices for two of five seconds before this attempt, by the clock of the Controller."""
    now = time.time() - ahead
    attempts = [
        SimpleNamespace(started_at=now - 2.0),
        SimpleNamespace(started_at=None),
        SimpleNamespace(started_at=now),
    ]
    answers = [SimpleNamespace(started_at=at, attempts=attempts) for at in (None, now)]
    controller = SimpleNamespace(ask=lambda *_: answers.pop(0))
    monkeypatch.setattr(controller_connection, "ControllerConnection", lambda: controller)
    monkeypatch.setattr(held_job, "_held_before", HELD_BEFORE)
    began = time.monotonic()
    assert Holding(monkeypatch, most_s=5.0).ended() is None
    assert 2.9 < time.monotonic() - began < 20.0
    assert answers == []


@pytest.mark.parametrize("ends", ["given back", "killed"])
@pytest.mark.usefixtures("here")
def test_code_of_an_attempt_stays_on_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    (tmp_path / "dev-0").mkdir()
    (tmp_path / "dev-0" / "of an attempt that was killed").touch()
    task = Holding(monkeypatch, most_s=LONG_S if ends == "killed" else 0.1)
    if ends == "killed":
        assert task.held()
        (warm,) = (one for one in psutil.Process().children() if "iris_ray.dev.warm_process" in one.cmdline())
        assert {*os.listdir(tmp_path / "dev-0")} <= {"used", "run"}
        warm.kill()
    assert isinstance(task.ended(), RuntimeError) == (ends == "killed")
    assert os.listdir(tmp_path) == ["here"]


@pytest.mark.usefixtures("here")
def test_full_disk_does_not_keep_a_host_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert Holding(monkeypatch, idle_s=0.1).ended() is None
