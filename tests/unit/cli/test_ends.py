"""``iris-ray wait`` and ``cancel`` of several jobs, with the real Controller."""

import os
import signal
import threading
import time

import pytest

from iris_ray.actors.calls import controller_connection
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.conventions import FAILED, INTERRUPTED, OK, TIMED_OUT, USAGE
from iris_ray.model.lifecycle import JobState
from tests.support.command_line import Terminal
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until


def test_wait_ends_when_all_jobs_have_succeeded(world: ControllerInProcess) -> None:
    first, second = world.start("prepare-1a2b3c4d"), world.start("train-5e6f7a8b")

    def ends() -> None:
        world.succeed(first)
        time.sleep(0.3)
        world.succeed(second)

    with world.meanwhile(ends):
        done = world.iris("wait", second, first, second)
    assert done.stdout.splitlines() == [f"{second}: succeeded", f"{first}: succeeded"]


def test_wait_tells_failures_by_its_code(world: ControllerInProcess) -> None:
    good, bad = world.start("good-1a2b3c4d"), world.start("bad-5e6f7a8b")
    world.succeed(good)
    world.fail(bad, 1)
    assert f"{bad}: failed: " in world.iris("wait", good, bad, code=FAILED).stdout
    ends = world.json("wait", good, bad, code=FAILED)
    assert [(one["job_id"], one["state"], one["finished"]) for one in ends] == [
        (good, "SUCCEEDED", True), (bad, "FAILED", True)
    ]  # fmt: skip
    assert "code 3" in ends[1]["error"]
    assert ends[0]["error"] is None


def test_wait_for_any_ends_with_the_first(world: ControllerInProcess) -> None:
    ended, runs = world.start("ended-1a2b3c4d"), world.start("runs-5e6f7a8b")
    world.succeed(ended)
    assert world.iris("wait", "--any", runs, ended).stdout.splitlines() == [f"{runs}: running", f"{ended}: succeeded"]


def test_wait_gives_up_after_its_timeout(world: ControllerInProcess) -> None:
    job = world.start("train-1a2b3c4d")
    done = world.iris("wait", job, "--timeout", "0.2", code=TIMED_OUT, quotes=True)
    assert done.stdout == f"{job}: running\n"
    assert "not over after 0.2s; the jobs go on" in done.stderr
    assert world.state(job) is JobState.RUNNING
    assert "did you mean" in world.iris("wait", job[:-1], code=USAGE).stderr


def test_wait_goes_on_with_the_next_controller(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_connection, "RESTART_S", 0.2)
    job, person = world.start("train-1a2b3c4d"), Terminal()
    before = world.ray.calls["job_status"]

    def ends() -> None:
        wait_until(lambda: world.ray.calls["job_status"] > before + 1)
        world.replace_controller(lambda: "iris-ray: waiting for the Controller" in person.printed)
        world.succeed(job)

    with world.meanwhile(ends):
        assert world.on_terminal("wait", job, person=person) == OK
    assert person.printed.count("waiting for the Controller") == 1


def test_wait_is_patient_from_its_first_question_on(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_connection, "RESTART_S", 0.2)
    job, person = world.start("train-1a2b3c4d"), Terminal()
    world.succeed(job)
    found: list[ControllerConnection] = []

    def connected(*_: object) -> ControllerConnection:
        found.append(ControllerConnection())
        world.ray.kill(world.controller())
        return found[-1]

    monkeypatch.setattr("iris_ray.cli.ends.ControllerConnection", connected)

    def comes_back() -> None:
        wait_until(lambda: "iris-ray: waiting for the Controller" in person.printed)
        world.start_controller()

    with world.meanwhile(comes_back):
        assert world.on_terminal("wait", job, person=person) == OK


def test_timeout_of_wait_holds_without_controller(world: ControllerInProcess) -> None:
    job, ended = world.start("train-1a2b3c4d"), threading.Event()
    before, began = world.ray.calls["job_status"], time.monotonic()

    def stop() -> None:
        wait_until(lambda: world.ray.calls["job_status"] > before + 1)
        world.replace_controller(ended.is_set)

    with world.meanwhile(stop):
        done = world.iris("wait", job, "--timeout", "2", code=TIMED_OUT, quotes=True)
        took_s = time.monotonic() - began
        ended.set()
    assert "not over after 2s; the jobs go on" in done.stderr
    assert took_s < 15.0


def test_timeout_of_wait_holds_while_controller_stands_still(world: ControllerInProcess) -> None:
    job = world.start("train-1a2b3c4d")
    before, began = world.ray.calls["job_status"], time.monotonic()

    def stop() -> None:
        wait_until(lambda: world.ray.calls["job_status"] > before + 1)
        world.freeze_controller()

    with world.meanwhile(stop):
        assert "the jobs go on" in world.iris("wait", job, "--timeout", "2", code=TIMED_OUT, quotes=True).stderr
    assert time.monotonic() - began < 15.0


def test_ctrl_c_ends_wait_and_leaves_job_alone(world: ControllerInProcess) -> None:
    job = world.start("train-1a2b3c4d")

    def press() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    with world.meanwhile(press):
        world.iris("wait", job, code=INTERRUPTED)
    assert world.state(job) is JobState.RUNNING


def test_several_jobs_are_cancelled_at_once(world: ControllerInProcess) -> None:
    ended, runs = world.start("ended-1a2b3c4d"), world.start("runs-5e6f7a8b", slices=(2,))
    world.succeed(ended)
    waits = world.submit("waits-9c0d1e2f", slices=(9,))
    assert "did you mean" in world.iris("cancel", runs, waits[:-1], code=USAGE).stderr
    assert world.state(runs) is JobState.RUNNING, "it was cancelled although another id is unknown"
    found = world.json("cancel", runs, ended, waits, runs)
    assert [(one["job_id"], one["cancelled"], one["state_before"]) for one in found] == [
        (runs, True, "RUNNING"), (ended, False, "SUCCEEDED"), (waits, True, "PENDING")
    ]  # fmt: skip
    assert world.state(runs) is world.state(waits) is JobState.KILLED


def test_nothing_is_cancelled_if_one_job_is_somebody_elses(world: ControllerInProcess) -> None:
    world.iris("cluster", "settings", "set", "operators=olga", user="olga")
    mine, bobs = world.start("mine-1a2b3c4d"), world.start("bobs-5e6f7a8b", user="bob")
    refused = world.iris("cancel", mine, bobs, "--yes", code=FAILED)
    assert f"{bobs} belongs to bob: only bob and operators may cancel it" in refused.stderr
    assert world.state(mine) is JobState.RUNNING, "it was cancelled although another job may not be"
    world.iris("cancel", mine, bobs, "--yes", user="olga")
    assert world.state(mine) is world.state(bobs) is JobState.KILLED


def test_several_jobs_are_asked_for_once(world: ControllerInProcess) -> None:
    first, second = world.submit("first", slices=(9,)), world.submit("second", slices=(9,))
    person = Terminal((f"Cancel 2 jobs of ann: {first}, {second}?", "n\n"))
    assert world.on_terminal("cancel", first, second, person=person) == FAILED
    assert world.state(first) is JobState.PENDING
    person = Terminal(("Cancel 2 jobs", "y\n"))
    assert world.on_terminal("cancel", first, second, person=person) == OK
    assert world.state(second) is JobState.KILLED
