"""``iris-ray cp --output``: the Controller and the readers are real, with real directories."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
from tests.support.controller_in_process import ControllerInProcess

JOB = "train-1a2b3c4d"


def output_of(world: ControllerInProcess, index: int, attempt: int, job: str = JOB) -> Path:
    """Make the output directory of a task that runs."""
    (task,) = (one for one in world.tasks_of(job, attempt) if one.info.task_index == index)
    made = OutputDirectory.of(outputs_directory(task.host.directory), TaskAttemptId(job, index, attempt))
    made.create()
    return made.path


@pytest.fixture
def outputs(world: ControllerInProcess) -> ControllerInProcess:
    """Two tasks with files of their first attempt; task 1 also of the second, which runs."""
    world.start(JOB, max_retries_failure=1)
    for index in (0, 1):
        (output_of(world, index, 1) / "loss.json").write_text(f"of task {index}")
    world.fail(JOB, 0)
    world.wait_for_attempt(JOB, 2)
    traces = output_of(world, 1, 2) / "traces"
    traces.mkdir()
    (traces / "host.pb").write_bytes(b"second")
    output_of(world, 0, 2)
    return world


def test_files_of_all_attempts_are_listed(outputs: ControllerInProcess) -> None:
    found = outputs.json("cp", "--output", JOB)
    assert [(one["task"], one["attempt"], one["path"], one["bytes"]) for one in found] == [
        (0, 1, "loss.json", 9),
        (1, 1, "loss.json", 9),
        (1, 2, "traces/host.pb", 6),
    ]
    table = outputs.iris("cp", "--output", f"{JOB}/1").stdout.splitlines()
    assert [line.split()[0] for line in table] == ["TASK", "1", "1"]
    assert [one["path"] for one in outputs.json("cp", "--output", f"{JOB}/1:traces")] == ["traces/host.pb"]
    assert outputs.json("cp", "--output", JOB, "--attempt", "2") == [found[2]]


def test_files_of_the_latest_attempt_that_left_any_are_copied(outputs: ControllerInProcess, tmp_path: Path) -> None:
    outputs.iris("cp", "--output", f"{JOB}/0", str(tmp_path / "zero"))
    assert (tmp_path / "zero" / "loss.json").read_text() == "of task 0"
    outputs.iris("cp", "--output", f"{JOB}/1", str(tmp_path))
    assert (tmp_path / f"{JOB}-task-1" / "traces" / "host.pb").read_bytes() == b"second"
    copied = outputs.json("cp", "--output", f"{JOB}/1:loss.json", str(tmp_path), "--attempt", "1")
    assert copied == {"source": f"{JOB}/1:loss.json", "target": str(tmp_path / "loss.json"), "bytes": 9}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".iris-ray-cp-")]


def test_files_outlive_the_job(outputs: ControllerInProcess, tmp_path: Path) -> None:
    outputs.succeed(JOB)
    outputs.iris("cp", "--output", f"{JOB}/1:traces", str(tmp_path))
    assert (tmp_path / "traces" / "host.pb").read_bytes() == b"second"


def test_tar_stream_goes_to_stdout(outputs: ControllerInProcess) -> None:
    done = outputs.iris("cp", "--output", f"{JOB}/1", "-")
    with tarfile.open(fileobj=io.BytesIO(done.stdout_bytes)) as files:
        assert files.getnames() == ["copied", "copied/traces/host.pb", "copied/traces"]


def test_hostile_tree_harms_neither_the_reader_nor_the_copy(outputs: ControllerInProcess, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of another job")
    path = output_of(outputs, 0, 2)
    (path / "good").write_text("good")
    (path / "out").symlink_to(secret)
    (path / "up").symlink_to("../../..")
    (path / os.fsdecode(b"\xff\x1b[2Jname")).write_text("x")
    os.mkfifo(path / "fifo")
    done = outputs.iris("cp", "--output", f"{JOB}/0", str(tmp_path / "copy"))
    assert "2 links out of the directory were left out" in done.stderr
    assert {one.name for one in (tmp_path / "copy").iterdir()} == {"good", os.fsdecode(b"\xff\x1b[2Jname")}
    listed = outputs.iris("cp", "--output", f"{JOB}/0", "--attempt", "2").stdout
    assert r"\xff\x1b[2Jname" in listed
    assert "\x1b" not in listed


def test_files_of_another_user_are_refused(outputs: ControllerInProcess, tmp_path: Path) -> None:
    outputs.iris("cluster", "settings", "set", "operators=otto", user="otto")
    for words in ((), (str(tmp_path / "copy"),), ("-",)):
        refused = outputs.iris("cp", "--output", f"{JOB}/1", *words, code=FAILED, user="eve")
        assert "fetch the output files of its tasks" in refused.stderr
    assert not (tmp_path / "copy").exists()
    outputs.iris("cp", "--output", f"{JOB}/1", str(tmp_path / "copy"), user="otto")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((f"{JOB}/2",), "task"),
        ((f"{JOB}/1", "x", "--attempt", "9"), "attempt"),
        (("nothing",), "nothing"),
        ((f"{JOB}/1:../x", "y"), "within the task's output directory"),
        ((f"{JOB}/1:/etc/passwd",), "within the task's output directory"),
        ((f"{JOB}/1:nothing", "y"), "has no nothing in its $IRIS_OUTPUT_DIR"),
        ((f"{JOB}/0", "y", "--attempt", "2:"), "--attempt"),
    ],
)
def test_what_can_not_be_fetched_is_refused(
    outputs: ControllerInProcess, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    words = tuple(str(tmp_path / word) if word in ("x", "y") else word for word in words)
    assert said in outputs.iris("cp", "--output", *words, code=USAGE).stderr
    assert list(tmp_path.glob("[xy]")) == []


def test_attempt_goes_with_output(outputs: ControllerInProcess) -> None:
    assert "--attempt goes with --output" in outputs.iris("cp", f"{JOB}:x", "y", "--attempt", "1", code=USAGE).stderr
    assert "TARGET" in outputs.iris("cp", f"{JOB}:x", code=USAGE).stderr


def test_files_of_a_host_that_is_gone_are_said_to_be_gone(outputs: ControllerInProcess, tmp_path: Path) -> None:
    (task,) = (one for one in outputs.tasks_of(JOB, 2) if one.info.task_index == 1)
    outputs.kill_host(task.info.slice_name, task.info.worker_id)
    outputs.wait_for_no_host(task.info.slice_name, task.info.worker_id)
    refused = outputs.iris("cp", "--output", f"{JOB}/1", str(tmp_path / "x"), "--attempt", "2", code=USAGE)
    assert "its host is gone, and its files with it" in refused.stderr
    done = outputs.iris("cp", "--output", f"{JOB}/1", "--attempt", "2", "--json")
    assert (json.loads(done.stdout), "its host is gone" in done.stderr) == ([], True)


def test_link_to_the_parent_of_the_copy_is_left_out(outputs: ControllerInProcess, tmp_path: Path) -> None:
    """The copy would have a link to the directory that it lies in."""
    path = output_of(outputs, 0, 2)
    (path / "deep").mkdir()
    (path / "deep" / "x").write_text("x")
    for name, target in (("up", ".."), ("beside", "../copied-too"), ("here", "."), ("deep/up", "..")):
        (path / name).symlink_to(target)
    done = outputs.iris("cp", "--output", f"{JOB}/0", str(tmp_path / "copy"))
    assert "2 links out of the directory were left out" in done.stderr
    assert {one.name for one in (tmp_path / "copy").iterdir()} == {"deep", "here"}
    assert (tmp_path / "copy" / "deep" / "up" / "deep" / "x").read_text() == "x"


def test_what_is_left_out_of_a_copy_is_told(outputs: ControllerInProcess, tmp_path: Path) -> None:
    path = output_of(outputs, 0, 2)
    (path / "good").write_text("good")
    os.mkfifo(path / "\x1b[2Jfifo")
    done = outputs.iris("cp", "--output", f"{JOB}/0", str(tmp_path / "copy"))
    assert r"1 of its entries were left out, such as '\x1b[2Jfifo': it is neither a file" in done.stderr
    assert (tmp_path / "copy" / "good").exists()


@pytest.mark.parametrize(("name", "why"), [("fifo", "neither a file"), ("latest", "is a link to 'good'; name")])
def test_file_that_can_not_be_sent_is_refused(
    outputs: ControllerInProcess, tmp_path: Path, name: str, why: str
) -> None:
    path = output_of(outputs, 0, 2)
    (path / "good").write_text("good")
    os.mkfifo(path / "fifo")
    (path / "latest").symlink_to("good")
    refused = outputs.iris("cp", "--output", f"{JOB}/0:{name}", str(tmp_path / "copy"), code=USAGE)
    assert why in refused.stderr
    assert not [one for one in tmp_path.iterdir() if one.name.startswith((".iris-ray-cp-", "copy"))]


def test_one_file_is_listed(outputs: ControllerInProcess) -> None:
    assert [one["path"] for one in outputs.json("cp", "--output", f"{JOB}/1:traces/host.pb")] == ["traces/host.pb"]
