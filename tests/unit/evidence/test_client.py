"""What a bug report has of the evidence that hosts keep: the Controller and the readers are real."""

import pytest

from iris_ray.evidence import client
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
from tests.support.controller_in_process import ControllerInProcess


@pytest.fixture
def job(world: ControllerInProcess) -> str:
    """A job of two tasks that both have left evidence. Task 1 has failed first."""
    job = world.start("train-1a2b3c4d")
    for task in world.tasks_of(job, 1):
        of = TaskAttemptId(job, task.info.task_index, 1)
        directory = OutputDirectory.of(outputs_directory(task.host.directory), of)
        directory.create()
        directory.write("iris-ray", "stacks.txt", b"main of %d\n" % of.task_index + b"another thread\n" * 5000)
        directory.write("iris-ray", "libtpu.txt", b"old\n" * 5000 + b"last of %d\n" % of.task_index)
        directory.write("iris-ray", "of the program\n== doctor", b"forged")
    world.fail(job, 1)
    return job


def test_report_begins_with_the_task_that_failed_first(
    world: ControllerInProcess, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_TASKS", 1)
    report = world.iris("bug-report", job, "-o", "-").stdout
    assert "== task 1, attempt 1: libtpu.txt" in report
    assert "last of 1" in report
    assert "task 0, attempt 1" not in report


def test_report_has_the_begin_of_the_stacks_and_only_files_of_iris_ray(world: ControllerInProcess, job: str) -> None:
    report = world.iris("bug-report", job, "-o", "-").stdout
    assert "main of 1" in report, "a task's own process comes first"
    assert "forged" not in report
    assert report.count("another thread") < 5000


def test_report_says_if_a_program_has_written_too_much_there(
    world: ControllerInProcess, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_STREAM_BYTES", 100)
    report = world.iris("bug-report", job, "-o", "-").stdout
    assert f"iris-ray cp --output {job}/1:iris-ray . --attempt 1 fetches them" in report


def test_report_says_whose_host_is_gone(world: ControllerInProcess, job: str) -> None:
    (task,) = (one for one in world.tasks_of(job, 1) if one.info.task_index == 0)
    slice_name, number = task.info.slice_name, task.info.worker_id
    world.kill_host(slice_name, number)
    world.wait_for_no_host(slice_name, number)
    report = world.iris("bug-report", job, "-o", "-").stdout
    assert "== task 0, attempt 1: files about its end\n\nits host is gone" in report
    assert "last of 1" in report


def test_report_of_another_user_has_no_evidence(world: ControllerInProcess, job: str) -> None:
    world.iris("cluster", "settings", "set", "operators=otto", user="otto")
    report = world.iris("bug-report", job, "-o", "-", user="eve").stdout
    assert "== files about tasks that crashed or hung" in report
    assert "last of 1" not in report
    assert "main of 1" not in report
    assert "last of 1" in world.iris("bug-report", job, "-o", "-", user="otto").stdout
