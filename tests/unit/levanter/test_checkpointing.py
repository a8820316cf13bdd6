"""When a run of Levanter in a gang saves."""

import json
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.levanter.checkpointing import GangCheckpointer, marked_restores, steps_saved
from tests.support.processes import NOTICE
from tests.support.waiting import wait_until

STEPS = 10


@dataclass
class Info:
    """What Levanter hands to its hooks."""

    step: int


@dataclass
class Recording:
    """Levanter's Checkpointer, as far as a gang sees it: it saves what is due, in a thread of its own."""

    save_interval: timedelta | None = timedelta(minutes=15)
    base_path: str = "gs://bucket/run"
    saves: list[tuple[int, str]] = field(default_factory=list)
    waited: int = 0

    def on_step(self, info: Info | None = None, *, tree: Any = None, step: int = 0, force: bool = False) -> None:
        due = self.save_interval is not None and self.save_interval <= timedelta.resolution
        step = info.step if info else step
        if force or (due and step > 0):
            self.save_checkpoint(step, is_temporary=not force)

    def save_checkpoint(self, step: int, is_temporary: bool) -> None:
        self.saves.append((step, "temporary" if is_temporary else "permanent"))

    def wait_until_finished(self) -> None:
        self.waited = len(self.saves)


def in_a_gang(levanter: Recording) -> GangCheckpointer:
    return GangCheckpointer(levanter, STEPS, lambda: None)


def after_step(checkpointer: GangCheckpointer, step: int) -> None:
    """As levanter 1.2 calls it."""
    checkpointer.on_step(Info(step))


def after_step_of_marin(checkpointer: GangCheckpointer, step: int) -> None:
    """As Marin's Levanter calls it."""
    checkpointer.on_step(tree={"step": step}, step=step, force=False)


both_versions = pytest.mark.parametrize("after", [after_step, after_step_of_marin])


@both_versions
def test_every_step_is_a_heartbeat_and_due_saves_happen(
    files: TaskFiles, after: Callable[[GangCheckpointer, int], None]
) -> None:
    levanter = Recording(save_interval=timedelta.resolution)
    checkpointer = in_a_gang(levanter)
    for step in (3, 4):
        after(checkpointer, step)
        assert files.heartbeat.read_text() == str(step)
    assert levanter.saves == [(3, "temporary"), (4, "temporary")]


@both_versions
def test_noticed_step_is_saved_before_task_says_so(
    files: TaskFiles, after: Callable[[GangCheckpointer, int], None]
) -> None:
    levanter, left = Recording(), []
    checkpointer = GangCheckpointer(levanter, STEPS, lambda: left.append((levanter.waited, files.saved.exists())))
    after(checkpointer, 3)
    files.write_notice(NOTICE)
    threading.Thread(target=after, args=(checkpointer, 4), daemon=True).start()
    wait_until(files.saved.exists)
    assert levanter.saves == [(4, "temporary")]
    assert left == [(1, False)], "what is to be done before leaving comes after the save and before the word"


@both_versions
def test_first_step_is_saved_at_a_notice(files: TaskFiles, after: Callable[[GangCheckpointer, int], None]) -> None:
    levanter = Recording()
    files.write_notice(NOTICE)
    checkpointer = in_a_gang(levanter)
    threading.Thread(target=after, args=(checkpointer, 0), daemon=True).start()
    wait_until(files.saved.exists)
    assert [step for step, _ in levanter.saves] == [0]


@both_versions
def test_last_step_is_saved_only_after_everything_else(
    files: TaskFiles, after: Callable[[GangCheckpointer, int], None]
) -> None:
    levanter = Recording(save_interval=timedelta.resolution)
    checkpointer = in_a_gang(levanter)
    after(checkpointer, STEPS - 2)
    after(checkpointer, STEPS - 1)
    files.write_notice(NOTICE)
    after(checkpointer, STEPS - 1)  # Levanter runs its hooks once more
    assert levanter.saves == [(STEPS - 2, "temporary")], "another attempt would take the run for complete"
    assert not files.saved.exists()
    checkpointer.save_last_step()
    assert levanter.saves[1:] == [(STEPS - 1, "permanent")]
    assert levanter.waited == 2


def test_last_step_of_short_data_is_saved_too(files: TaskFiles) -> None:
    levanter = Recording()
    checkpointer = in_a_gang(levanter)
    checkpointer.on_step(Info(4))
    checkpointer.on_step(Info(4))
    checkpointer.save_last_step()
    assert levanter.saves == [(4, "permanent")]


def marked(files: TaskFiles) -> list[set[str]]:
    """What the task has marked before its first step, and since."""
    return [{name for name, seconds in part.items() if seconds > 0} for part in json.loads(files.marked.read_text())]


@both_versions
def test_saves_are_marked_for_goodput(files: TaskFiles, after: Callable[[GangCheckpointer, int], None]) -> None:
    checkpointer = in_a_gang(Recording(save_interval=timedelta.resolution))
    after(checkpointer, 3)
    assert marked(files) == [set(), {"checkpoint_save"}]


def test_only_steps_that_levanter_saves_count_as_saves(files: TaskFiles) -> None:
    levanter = Recording()
    checkpointer = in_a_gang(levanter)
    after_step_of_marin(checkpointer, 3)
    assert not files.last_save.exists()
    levanter.save_interval = timedelta.resolution
    after_step_of_marin(checkpointer, 4)
    assert files.last_save.exists()


def test_restores_are_marked_once_during_the_run(files: TaskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    levanter = types.ModuleType("levanter.checkpoint")

    def load(path: str) -> str:
        return path if path == "gs://run/step-3" else str(levanter.load_checkpoint("gs://run/step-3"))

    monkeypatch.setattr(levanter, "load_checkpoint", load, raising=False)
    monkeypatch.setitem(sys.modules, "levanter.checkpoint", levanter)
    with marked_restores():
        assert levanter.load_checkpoint("gs://run") == "gs://run/step-3"
    assert marked(files) == [{"checkpoint_restore"}, set()]
    assert levanter.load_checkpoint is load


def test_run_without_a_step_saves_nothing_at_its_end() -> None:
    levanter = Recording()
    in_a_gang(levanter).save_last_step()
    assert levanter.saves == []


def test_other_checkpointer_attributes_are_levanters() -> None:
    assert in_a_gang(Recording()).base_path == "gs://bucket/run"


@pytest.mark.parametrize(
    ("saved", "temporary", "steps"),
    [
        ([], [], 0),
        (["step-8"], [], 9),
        (["step-5", "step-12"], [], 13),
        (["step-5"], ["step-7"], 8),
        (["epoch-12"], [], 0),
        (["step-3", "step-12-best"], [], 4),
    ],
)
def test_steps_saved_are_those_of_newest_whole_checkpoint(
    tmp_path: Path, saved: list[str], temporary: list[str], steps: int
) -> None:
    paths = tmp_path / "run[1]", tmp_path / "temporary" / "run"
    for path, names in zip(paths, (saved, temporary), strict=True):
        for name in names:
            (path / name).mkdir(parents=True)
            (path / name / "metadata.json").touch()
    (paths[0] / "step-30").mkdir(parents=True)  # its save did not end
    assert steps_saved(map(str, paths)) == steps
