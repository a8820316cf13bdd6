"""``iris-ray cluster limits``: what it shows and sets at the real Controller, and what becomes of jobs over a limit."""

import json

import pytest

from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.errors import LimitReachedError
from iris_ray.model.lifecycle import JobState
from tests.support.controller_in_process import ControllerInProcess


def table(world: ControllerInProcess, *arguments: str) -> dict[tuple[str, str], dict]:
    return {(one["user"], one["band"]): one for one in world.json("cluster", "limits", *arguments)}


def test_limits_are_shown_with_each_users_use(world: ControllerInProcess) -> None:
    assert {user for user, _ in table(world)} == {"*"}
    world.start("train", slices=(2,))
    world.submit("waits", slices=(3,))
    world.iris("cluster", "limits", "ann", "--priority", "interactive", "--chips", "24", "--tasks", "100")
    ann = table(world)["ann", "INTERACTIVE"]
    assert (ann["chips"], ann["running_jobs"], ann["queued_jobs"], ann["tasks"]) == (16, 1, 1, 10)
    assert ann["set_here"] == {"chips": 24, "running_jobs": None, "queued_jobs": None, "tasks": 100}
    shown = world.iris("cluster", "limits", "ann").stdout
    assert "16/24" in shown
    assert "set: chips, tasks" in shown
    assert "everybody" in world.iris("cluster", "limits").stdout


def test_limits_are_set_singly_and_reset_together(world: ControllerInProcess) -> None:
    world.iris("cluster", "limits", "everybody", "--chips", "64")
    world.iris("cluster", "limits", "ann", "--chips", "8")
    found = table(world, "ann", "--running-jobs", "3")
    assert [(one["set_here"]["chips"], one["set_here"]["running_jobs"]) for one in found.values()] == [(8, 3)] * 4
    assert table(world, "ann", "--reset") == {}
    assert "nothing is set for ann" in world.iris("cluster", "limits", "ann").stderr
    assert {one["limits"]["chips"] for one in table(world, "everybody").values()} == {64}


def test_job_over_limit_waits_and_says_so_until_raised(world: ControllerInProcess) -> None:
    world.iris("cluster", "limits", "ann", "--chips", "8")
    world.start("train")
    waits = world.submit("eval")
    for command in (("ls",), ("why", waits), ("job", "status", waits)):
        assert "limit of ann in band interactive: 8 chips, of which 8 are taken" in world.iris(*command).stdout
    assert json.loads(world.iris("why", waits, "--json").stdout)["waiting"]["limit"]["held"] == 8
    world.start("of-bob", user="bob")
    world.iris("cluster", "limits", "ann", "--chips", "16")
    world.wait_for_state(waits, JobState.RUNNING)


def test_job_over_queue_limit_is_refused_unless_known(world: ControllerInProcess) -> None:
    world.iris("cluster", "limits", "everybody", "--queued-jobs", "1")
    world.submit("waits", slices=(4,))
    with pytest.raises(LimitReachedError, match="1 queued jobs; there are 1, and the job adds 1"):
        world.submit("refused", slices=(4,))
    assert world.jobs() == ["waits"]


def test_cluster_that_takes_no_new_jobs_runs_what_it_has(world: ControllerInProcess) -> None:
    """As docs/upgrading.md says, before all jobs have to end."""
    world.start("runs", slices=(3,))
    world.submit("waits")
    world.iris("cluster", "limits", "everybody", "--queued-jobs", "0")
    with pytest.raises(LimitReachedError, match="0 queued jobs"):
        world.submit("refused")
    world.succeed("runs")
    world.wait_for_attempt("waits", 1)
    world.succeed("waits")
    world.iris("cluster", "limits", "everybody", "--reset")
    world.start("next")


def test_limits_outlast_the_controller(world: ControllerInProcess) -> None:
    world.iris("cluster", "limits", "ann", "--chips", "8")
    world.start("train")
    for _ in range(2):
        world.iris("cluster", "controller", "upgrade")
        ann = table(world)["ann", "INTERACTIVE"]
        assert (ann["set_here"]["chips"], ann["chips"], ann["running_jobs"]) == (8, 8, 1)
    assert len([key for key in world.store.values if key.startswith("limits/")]) == 1


def test_senseless_limits_are_refused(world: ControllerInProcess) -> None:
    assert "whose limits?" in world.iris("cluster", "limits", "--chips", "8", code=USAGE).stderr
    for user, chips, said in (("ann", "-1", "chips"), ("ann", "inf", "chips"), ("a b", "8", "not a valid user name")):
        assert said in world.iris("cluster", "limits", user, "--chips", chips, code=USAGE).stderr


def test_only_operators_set_limits_and_anybody_sees_them(world: ControllerInProcess) -> None:
    world.iris("cluster", "settings", "set", "operators=olga", user="olga")
    command = ("cluster", "limits", "ann", "--chips", "8")
    assert "only operators may" in world.iris(*command, user="ann", code=FAILED).stderr
    assert "everybody" in world.iris("cluster", "limits", user="bob").stdout
    world.iris(*command, user="olga")
    assert {user for user, _ in table(world)} == {"*", "ann"}


def test_limit_of_no_running_jobs_stops_new_ones_only(world: ControllerInProcess) -> None:
    """What an operator does before an upgrade."""
    runs = world.start("train")
    world.iris("cluster", "limits", "everybody", "--running-jobs", "0")
    waits = world.submit("eval")
    assert "limit" in world.iris("why", waits).stdout
    world.succeed(runs)
    assert world.state(waits) is JobState.PENDING
    world.iris("cluster", "limits", "everybody", "--reset")
    world.wait_for_state(waits, JobState.RUNNING)
