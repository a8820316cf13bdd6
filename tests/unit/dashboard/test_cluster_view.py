"""The tables that the pages show, against the real Controller."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL
from iris_ray.actors.pool import attempt
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import GangProgress, PoolProcess
from iris_ray.actors.protocol.overview import Changes, Position
from iris_ray.dashboard.cluster_view import ClusterView
from iris_ray.dashboard.rows import Diff
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team, Teams
from iris_ray.teams import controller as teams_in_controller
from iris_ray.teams.calls import TeamCalls
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until

Tables = dict[str, dict[str, Any]]


class Followed:
    """A view, and the copy of it that a page makes of the diffs that it gets.

    Attributes:
        copy: the page's tables.
    """

    def __init__(self) -> None:
        self.controller = ControllerConnection()
        self.copy: Tables = {}
        seconds = itertools.count(1)
        self._view = ClusterView(lambda: float(next(seconds)))
        self._position = Position()

    def follow(self) -> Changes:
        """Ask until there is nothing more; return the last answer."""
        changes = self.controller.ask(ControllerInterface.changes, self._position)
        if changes.begin_anew:
            self._view.begin(
                self.controller.ask_all(ControllerInterface.list_jobs),
                self.controller.ask_all(ControllerInterface.list_workers),
            )
        else:
            self._view.apply(changes)
        self._position = changes.position
        self._copy(self._view.take_changes({}))
        return self.follow() if changes.more or changes.begin_anew else changes

    def until(self, holds: Callable[[Tables], object]) -> Tables:
        """Follow until the page's tables are as expected; return them."""

        def done() -> bool:
            self.follow()
            return bool(holds(self.copy))

        wait_until(done)
        return self.copy

    def events(self) -> list[str]:
        """Return what has happened, each with what it is about."""
        rows = sorted(self.copy.get("events", {}).values(), key=lambda row: row["number"])
        return [f"{row['job'] or row['slice']}: {row['text']}" for row in rows]

    def _copy(self, diff: Diff) -> None:
        for name, rows in diff.put.items():
            self.copy.setdefault(name, {}).update(rows)
        for name, keys in diff.drop.items():
            for key in keys:
                del self.copy[name][key]


def without_events(tables: Tables) -> Tables:
    return {name: rows for name, rows in tables.items() if name != "events" and rows}


def conditions(row: dict[str, Any]) -> list[str]:
    return [host[1] for host in row["hosts"]]


def test_following_page_equals_new_page(world: ControllerInProcess) -> None:
    """Whatever happens: jobs that start, fail, wait, end or are cancelled, hosts that are drained or lost."""
    page = Followed()
    page.follow()

    def same() -> bool:
        new = Followed()
        new.follow()
        page.follow()
        return without_events(new.copy) == without_events(page.copy)

    train = world.start("train", slices=(2,), max_retries_failure=1)
    assert page.until(lambda tables: tables["jobs"][train]["state"] == "running")
    assert same()
    waits = world.submit("waits", slices=(3,), user="bob")
    page.until(lambda tables: waits in tables.get("queue", {}))
    world.fail(train, 0)
    world.wait_for_attempt(train, 2)
    world.iris("host", "drain", "v4-16-2", "--reason", "a fan")
    world.iris("cluster", "limits", "bob", "--chips", "8")
    page.until(lambda tables: conditions(tables["slices"]["v4-16-2"]) == ["closed"] * 2)
    assert same()
    world.iris("cancel", waits, user="bob")
    world.succeed(train)
    world.kill_host("v4-16-1", 1)
    world.wait_for_no_host("v4-16-1", 1)
    page.until(lambda tables: conditions(tables["slices"]["v4-16-1"])[1] == "lost")
    assert same()


def test_rows_say_who_holds_and_waits_for_what(world: ControllerInProcess) -> None:
    page = Followed()
    world.start("train", slices=(2,))
    world.submit("second", slices=(2,), user="bob", priority=PriorityBand.BATCH)
    world.submit("first", slices=(3,), user="bob")
    tables = page.until(lambda tables: len(tables.get("queue", {})) == 2)
    now = tables["cluster"]["now"]
    assert (now["order"], now["waiting"]) == (["first", "second"], 2)
    assert "waiting for 3 slices" in tables["queue"]["first"]["why"]
    assert tables["slices"]["v4-16-0"]["hosts"][1] == [
        1, "busy", "train", None, "10.0.1.1", world.node_id("v4-16-0", 1)
    ]  # fmt: skip
    assert (now["chips"], now["chips_in_use"], now["hosts"]) == (24, 16, {"busy": 4, "free": 2})
    users = tables["users"]
    assert (users["ann"]["chips"], users["ann"]["running"], users["bob"]["queued"]) == (16, 1, 2)
    assert users["ann"]["share"] == 0.6667
    assert {band["band"]: band["queued"] for band in users["bob"]["bands"]} == {"interactive": 1, "batch": 1}


def test_unusable_host_is_shown_until_gone_or_usable(world: ControllerInProcess) -> None:
    page = Followed()
    page.follow()
    world.add_node("unlabelled", "10.9.0.0", {"TPU": 4.0}, {})
    world.add_node("incomplete", "10.9.0.1", {"TPU": 4.0}, {})
    tables = page.until(lambda tables: {"10.9.0.0", "10.9.0.1"} <= tables["slices"].keys())
    assert conditions(tables["slices"]["10.9.0.0"]) == ["unusable"]
    world.remove_node("unlabelled")
    place = {SLICE_NAME_LABEL: "v4-8-0", WORKER_ID_LABEL: "0", POD_TYPE_LABEL: "v4-8"}
    world.add_node("incomplete", "10.9.0.1", {"TPU": 4.0}, place)
    tables = page.until(lambda tables: not {"10.9.0.0", "10.9.0.1"} & tables["slices"].keys())
    assert conditions(tables["slices"]["v4-8-0"]) == ["free"]
    assert "10.9.0.0: all its hosts are gone (1)" in page.events()


def test_events_tell_stories_of_jobs_and_hosts(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "AT_ONCE_S", 0.0)  # later than that, a lost host costs a preemption
    page = Followed()
    page.follow()
    world.start("train", slices=(2,), max_retries_preemption=1)
    page.until(lambda _: "train: attempt 1 runs on v4-16-0, v4-16-1" in page.events())
    world.kill_host("v4-16-0", 1)
    page.until(lambda _: "v4-16-0: host 1 gone" in page.events())
    world.wait_for_attempt("train", 2)
    page.until(lambda _: any("train: attempt 2 runs" in event for event in page.events()))
    assert any("train: attempt 1 was preempted, another one follows: " in event for event in page.events())
    world.iris("host", "drain", "v4-16-0", "--reason", "a fan")
    page.until(lambda _: any("v4-16-0: host 0 closed: drained (a fan)" in one for one in page.events()))
    world.succeed("train")
    page.until(lambda _: "train: succeeded" in page.events())
    assert page.events()[0] == "train: submitted by ann"


def test_page_follows_new_controller_from_beginning(world: ControllerInProcess) -> None:
    page = Followed()
    world.start("train")
    page.until(lambda tables: tables["jobs"]["train"]["state"] == "running")
    told = page.events()
    world.restart_controller()
    world.wait_for_state("train", JobState.RUNNING)
    world.submit("eval", slices=(3,))
    page.until(lambda tables: "eval" in tables["jobs"])
    assert page.events()[: len(told)] == told
    assert page.copy["jobs"]["train"]["state"] == "running"


def test_jobs_own_status_text_is_shown(world: ControllerInProcess) -> None:
    page = Followed()
    train = world.start("train")
    progress = GangProgress(AttemptId(train, 1), step=7, status="loss 2.31", age=0.0)
    sender = PoolProcess(world.spec(train).owner, 1)
    world.controller().note_progress.remote(progress, sender).future().result(60)
    tables = page.until(lambda tables: tables["jobs"][train]["says"])
    assert (tables["jobs"][train]["step"], tables["jobs"][train]["says"]) == (7, "loss 2.31")


def test_teams_have_a_row_for_each_type_with_quota(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams_in_controller, "LOOK_S", 0.02)
    page = Followed()
    train = world.start("train")
    assert page.until(lambda tables: train in tables["jobs"])["jobs"][train]["team"] == ""
    assert page.copy.get("teams", {}) == {}
    teams = [
        Team("research", {"v4-16": Quota(16), "v5p": Quota(8)}),
        Team("research/vision", {"v4-16": Quota(8)}, users=("ann",)),
        Team("sales"),
    ]
    page.controller.ask(TeamCalls.set_teams, teams, Teams().version, "ann")
    named = world.submit("named", slices=(3,))
    rows = page.until(lambda tables: tables["jobs"].get(named) and tables.get("teams"))["teams"]
    assert page.copy["jobs"][named]["team"] == "research/vision"
    assert {key: (row["order"], row["quota"]) for key, row in rows.items() if row["team"]} == {
        "research:v4-16": (1, 16),
        "research:v5p": (1, 8),
        "research/vision:v4-16": (2, 8),
        "sales:": (3, 0),
    }
    page.until(lambda tables: tables["teams"]["research/vision:v4-16"]["waiting"] == 1)
    page.controller.ask(TeamCalls.set_teams, teams[:1], Teams(teams).version, "ann")
    page.until(lambda tables: tables["jobs"][named]["team"] == "research")
