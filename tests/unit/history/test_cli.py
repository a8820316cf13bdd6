"""``iris-ray history`` and ``iris-ray report``, of the real Controller's jobs."""

import logging
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.calls import service_parts
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.pool import progress_watch
from iris_ray.actors.protocol.status import JobFacts
from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.history import controller as history_service
from iris_ray.history import history_file
from iris_ray.history.calls import HistoryCalls, HistoryRows
from iris_ray.history.history_file import NAME
from iris_ray.history.reading import read_history
from iris_ray.history.rows import JobStory, job_story
from iris_ray.model.goodput import JobTimes
from tests.support.command_line import invoke
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until


@pytest.fixture
def world(bare_cluster: ControllerInProcess, tmp_path: Path) -> ControllerInProcess:
    """A cluster whose Controller keeps a history."""
    bare_cluster.history = tmp_path / "history"
    bare_cluster.start_controller()
    return bare_cluster


def file_of(world: ControllerInProcess) -> Path:
    assert world.history is not None
    return world.history / NAME


def about(world: ControllerInProcess) -> dict[str, Any]:
    """Return what the history says about itself."""
    found: dict[str, Any] = world.json("cluster", "controller", "status")["services"]["history"]
    return found


def crashed_once(world: ControllerInProcess, job: str = "train") -> None:
    """A job of ann that crashed once and then succeeded."""
    world.start(job, max_retries_failure=3)
    world.fail(job, 1)
    world.wait_for_attempt(job, 2)
    world.succeed(job)


def test_ended_jobs_are_listed_and_filtered(world: ControllerInProcess) -> None:
    crashed_once(world)
    world.succeed(world.start("eval", user="bob"))
    printed = world.iris("history").stdout.splitlines()
    assert [line.split()[0] for line in printed[1:]] == ["eval", "train"]
    assert "1 failure" in printed[2]
    for filters, found in (
        (("--user", "bob"), ["eval"]),
        (("--cause", "crashed"), ["train"]),
        (("--state", "failed"), []),
        (("--tpu", "v4-16", "--name", "ra"), ["train"]),
        (("--tpu", "V4-16", "--name", "ra"), ["train"]),
        (("--since", "1h", "--until", "2999-01-01"), ["eval", "train"]),
        (("--until", "2001-01-01"), []),
        (("--limit", "1"), ["eval"]),
    ):
        assert [job["job_id"] for job in world.json("history", *filters)] == found


def test_one_job_is_shown_whole(world: ControllerInProcess) -> None:
    crashed_once(world)
    found = world.json("history", "train")
    assert (found["job"]["state"], found["job"]["user"], found["job"]["failures"]) == ("succeeded", "ann", 1)
    first, second = found["attempts"]
    assert (first["state"], first["cause"], first["task"], first["host"]) == ("failed", "crashed", 1, "v4-16-0/1")
    assert "exited with code 3" in first["error"]
    assert (second["state"], second["chips"]) == ("succeeded", 8.0)
    printed = world.iris("history", "train").stdout
    for words in ("succeeded", "crashed", "v4-16-0/1", "TIME LOST BY"):
        assert words in printed
    assert "did you mean train" in world.iris("history", "tarin", code=USAGE).stderr
    world.forget("train")
    assert "no job" in world.iris("job", "status", "train", code=USAGE).stderr
    assert world.json("history", "train")["attempts"] == found["attempts"]


def test_history_outlives_controller_without_doubles(world: ControllerInProcess) -> None:
    crashed_once(world)
    assert len(world.json("history")) == 1
    world.start("runs")
    assert [job["state"] for job in world.json("history")] == ["running", "succeeded"]
    world.restart_controller()
    world.succeed("runs")
    counts = "SELECT (SELECT count(*) FROM jobs) AS jobs, (SELECT count(*) FROM attempts) AS attempts"
    assert world.json("history", "--sql", counts) == [{"jobs": 2, "attempts": 3}]
    kinds = [row["subject"] for row in world.json("history", "--events") if row["kind"] == "controller"]
    assert kinds == ["2", "1"]


def test_events_of_hosts_and_operators_are_kept(world: ControllerInProcess) -> None:
    world.iris("host", "drain", "v4-16-2", "--reason", "a fan", user="olga")
    world.kill_host("v4-16-2", 1)
    world.wait_for_no_host("v4-16-2", 1)
    lost, drained, _ = world.json("history", "--events")
    assert (lost["kind"], lost["subject"]) == ("host lost", "v4-16-2/1")
    assert (drained["kind"], drained["subject"], drained["what"]) == ("tainted", "v4-16-2", "drained: a fan")
    assert "a fan" in world.iris("history", "--events", "--since", "1h").stdout
    assert world.json("history", "--events", "--until", "2001-01-01") == []


def test_history_is_read_from_a_file_without_cluster(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed_once(world)
    world.json("history")
    world.ray.kill(world.controller())
    monkeypatch.delattr("iris_ray.history.cli.cluster")
    assert [job["job_id"] for job in world.json("history", "--file", str(file_of(world)))] == ["train"]
    assert world.json("report", "--file", str(file_of(world)))["lines"][0]["who"] == "ann"


def test_sql_reads_and_refuses_to_write(world: ControllerInProcess) -> None:
    crashed_once(world)
    sql = "SELECT user, count(*) AS jobs, NULL AS none FROM jobs GROUP BY user"
    assert world.iris("history", "--sql", sql).stdout.split() == ["USER", "JOBS", "NONE", "ann", "1"]
    refused = world.iris("history", "--sql", "DELETE FROM jobs", code=USAGE).stderr
    assert "only read here, and this statement would delete from jobs" in refused
    assert len(world.json("history")) == 1
    assert "give one of JOB" in world.iris("history", "train", "--sql", sql, code=USAGE).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--user", "ann"), "--user is for the list of jobs"),
        (("--sql", "SELECT 1", "--since", "1h"), "--since is for the list of jobs"),
        (("--events", "--tpu", "v4-16"), "--tpu is for the list of jobs"),
        (("--utilisation", "--state", "failed"), "--state is for the list of jobs"),
    ],
)
def test_filter_that_would_be_ignored_is_refused(
    bare_cluster: ControllerInProcess, words: tuple[str, ...], said: str
) -> None:
    assert said in bare_cluster.iris("history", *words, code=USAGE).stderr


@pytest.mark.parametrize("month", ["9999-12", "2026-13", "May"])
def test_month_that_can_not_be_is_refused(month: str) -> None:
    result = invoke("report", "--month", month, "--file", "history.sqlite")
    assert result.exit_code == USAGE
    assert f"'{month}' is not a month" in result.output


def test_report_sums_up_the_month(world: ControllerInProcess) -> None:
    crashed_once(world)
    world.succeed(world.start("eval", user="bob"))
    found = world.json("report")
    ann, bob = sorted(found["lines"], key=lambda line: line["who"])
    assert (ann["jobs"], bob["jobs"]) == (1, 1)
    total = world.json(
        "history", "--sql", "SELECT sum(chips * (ended_at - assigned_at)) / 3600 AS all_of FROM attempts"
    )
    assert ann["chip_hours"] + bob["chip_hours"] == pytest.approx(total[0]["all_of"])
    assert sum(ann["chip_hours_by_kind"].values()) == pytest.approx(ann["chip_hours"], rel=0.1)
    assert [(one["cause"], one["failures"]) for one in found["by_cause"]] == [("crashed", 1)]
    lines = world.iris("report").stdout.splitlines()
    assert lines[0].split()[0] == "USER"
    assert lines[3].split()[:2] == ["all", "2"]
    assert world.json("report", "--month", "2001-01")["lines"] == []
    assert "is not a month" in world.iris("report", "--month", "May", code=USAGE).stderr


def test_utilisation_shows_chips_in_use(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_service, "SAMPLE_S", 0.0)
    world.start("train")
    world.submit("waits", slices=(3,), user="bob")
    found = world.json("history", "--utilisation")
    assert found["chips"][-1]["chips"] == 24.0
    assert found["by_user"][0]["who"] == "ann"
    assert 0 < found["by_user"][0]["busy_chips"] <= 8.0
    assert world.json("history", "--utilisation", "--tpu", "v4-32")["chips"] == []
    assert "█" in world.iris("history", "--utilisation").stdout


def test_curves_have_what_running_jobs_say(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_service, "SAMPLE_S", 0.0)
    monkeypatch.setattr(progress_watch, "LOOK_S", 0.05)
    world.start("train")
    world.says("train", 7, "loss=2.5")
    wait_until(lambda: world.status("train").step == 7)
    curves = world.json("history", "train")["curves"]
    assert {(point["name"], point["step"], point["value"]) for point in curves} == {("loss", 7, 2.5), ("step", 7, 7.0)}


def test_operators_choose_place_and_switch_it_off(world: ControllerInProcess, tmp_path: Path) -> None:
    world.succeed(world.start("train"))
    world.iris("cluster", "settings", "set", f"history={tmp_path / 'elsewhere'}")
    assert [job["job_id"] for job in world.json("history")] == ["train"], "what the Controller knows is written anew"
    assert (tmp_path / "elsewhere" / NAME).exists()
    world.iris("cluster", "settings", "set", "history=off")
    assert "keeps no history" in world.iris("history", code=FAILED).stderr
    assert "begins with /" in world.iris("cluster", "settings", "set", "history=there", code=USAGE).stderr


def test_copy_in_parquet_files_is_made_or_says_why_not(
    world: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_service, "LOOK_S", 0.02)
    world.succeed(world.start("train"))
    world.json("history")
    target = tmp_path / "copy"
    world.iris("cluster", "settings", "set", f"history_parquet={target}")

    def copy() -> dict[str, Any] | None:
        found = about(world)
        return found if found.get("parquet_as_of") or found.get("parquet_trouble") else None

    found = wait_until(copy)
    assert found["parquet_to"] == str(target)
    if "pyarrow is not installed" in (found["parquet_trouble"] or ""):
        assert not target.exists()
    else:
        assert found["parquet_trouble"] is None
        assert len([*target.glob("jobs/*.parquet")]) == 1
    assert "gs://bucket" in world.iris("cluster", "settings", "set", "history_parquet=there", code=USAGE).stderr


def test_locked_file_costs_history_and_no_job(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.succeed(world.start("before"))
    world.json("history")
    for name, value in (("LOOK_S", 0.02), ("MOST_WAITING", 6), ("SAY_S", 0.0)):
        monkeypatch.setattr(history_service, name, value)
    monkeypatch.setattr(history_file, "BUSY_S", 0.0)
    caplog.set_level(logging.WARNING)
    with closing(sqlite3.connect(file_of(world))) as other:
        other.execute("BEGIN EXCLUSIVE")
        for number in range(6):
            world.succeed(world.start(f"train-{number}"))
        wait_until(lambda: "database is locked" in caplog.text and "0 are lost" not in caplog.records[-1].getMessage())
        other.rollback()
    kept = {job["job_id"] for job in world.json("history")}
    assert "train-5" in kept
    assert "train-0" not in kept
    found = about(world)
    assert (found["path"], found["trouble"]) == (str(file_of(world)), None)
    assert found["lost"] > 0


def test_record_that_can_not_be_written_costs_no_other(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(of: JobFacts, times: JobTimes, now: float) -> JobStory:
        told = job_story(of, times, now)
        return replace(told, job={**told.job, "step": 2**70}) if of.job.spec.job_id == "bad" else told

    monkeypatch.setattr(history_service, "job_story", made)
    monkeypatch.setattr(history_service, "LOOK_S", 60.0)
    for job in ("before", "bad", "after"):
        world.succeed(world.start(job))
    assert [job["job_id"] for job in world.json("history")] == ["after", "before"]
    assert about(world)["lost"] == 1


def test_statement_that_waits_too_long_for_its_turn_is_refused(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed_once(world)
    asked, goes_on = threading.Semaphore(0), threading.Event()

    def slow(*args: Any) -> HistoryRows:
        asked.release()
        goes_on.wait(60)
        return read_history(*args)

    monkeypatch.setattr(history_service, "read_history", slow)
    monkeypatch.setattr(history_service, "PATIENCE_S", 0.1)

    def ask(user: str) -> HistoryRows:
        return ControllerConnection().ask(HistoryCalls.ask_history, "SELECT job_id FROM jobs", {}, 1, user)

    with ThreadPoolExecutor() as others:
        answers = [others.submit(ask, f"user-{n}") for n in range(history_service.AT_A_TIME)]
        for _ in answers:
            asked.acquire()
        assert "other statements" in world.iris("history", code=FAILED).stderr
        goes_on.set()
        assert [answer.result().rows for answer in answers] == [(("train",),)] * history_service.AT_A_TIME
    assert [job["job_id"] for job in world.json("history")] == ["train"]


def test_slow_statements_of_one_user_keep_nobody_else_waiting(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed_once(world)
    goes_on = threading.Event()

    def slow(path: Path, sql: str, *rest: Any) -> HistoryRows:
        if "slow" in sql:
            goes_on.wait(60)
        return read_history(path, sql, *rest)

    monkeypatch.setattr(history_service, "read_history", slow)

    def ask() -> HistoryRows:
        return ControllerConnection().ask(HistoryCalls.ask_history, "SELECT 1 AS slow", {}, 1, "eve")

    with ThreadPoolExecutor() as others:
        answers = [others.submit(ask) for _ in range(2 * history_service.AT_A_TIME)]
        try:
            time.sleep(0.5)
            assert [job["job_id"] for job in world.json("history")] == ["train"]
            assert not any(answer.done() for answer in answers)
        finally:
            goes_on.set()
        assert {answer.result().rows for answer in answers} == {((1,),)}


def test_corrupt_file_is_replaced_by_all_that_is_known(world: ControllerInProcess) -> None:
    crashed_once(world)
    world.json("history")
    file_of(world).write_bytes(b"not a database at all" * 500)
    world.succeed(world.start("eval"))
    wait_until(lambda: {job["job_id"] for job in world.json("history")} == {"train", "eval"})


def test_running_jobs_are_refreshed_once_while_file_is_locked(
    bare_cluster: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare_cluster.history = tmp_path
    for name, value in (("LOOK_S", 0.02), ("MOST_WAITING", 12), ("SAY_S", 0.0)):
        monkeypatch.setattr(history_service, name, value)
    monkeypatch.setattr(history_file, "BUSY_S", 0.0)
    with closing(sqlite3.connect(tmp_path / NAME)) as other:
        other.execute("BEGIN EXCLUSIVE")
        bare_cluster.start_controller()
        bare_cluster.start("runs")
        caplog.clear()
        wait_until(lambda: len(caplog.records) > 20)
        other.rollback()
    assert {record.getMessage().rpartition(", ")[2] for record in caplog.records} == {"0 are lost; no job is affected"}


def test_history_that_is_made_anew_says_once_that_the_controller_has_begun(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service_parts, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(history_service, "LOOK_S", 0.01)
    look = history_service.HistoryInController.look
    monkeypatch.setattr(history_service.HistoryInController, "look", failing)

    def health() -> Any:
        return {one["service"]: one for one in world.json("cluster", "controller", "status")["service_health"]}

    wait_until(lambda: health()["history"]["failures"] > 1)
    monkeypatch.setattr(history_service.HistoryInController, "look", look)
    wait_until(lambda: health()["history"]["trouble"] is None)
    crashed_once(world)
    assert [row["subject"] for row in world.json("history", "--events") if row["kind"] == "controller"] == ["1"]


async def failing(_: object) -> None:
    raise ValueError("broken")
