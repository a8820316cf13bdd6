"""``iris-ray cluster controller export`` and ``import``, between two Controllers on one made-up cluster."""

import json
import stat
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray

from iris_ray import IrisClient, JobGroup, ResourceSpec, Secret, tpu_device
from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.calls.names import NAMESPACE, detached_pool
from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.goodput.calls import GoodputCalls
from iris_ray.handover.pool import HandoverInPool
from iris_ray.model.lifecycle import JobState
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until

EXPORT, IMPORT = ("cluster", "controller", "export"), ("cluster", "controller", "import")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "work.py"
    path.write_text("pass")
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "queue.jsonl")


def submit(world: ControllerInProcess, script: str, *options: str) -> str:
    """Put a detached job into the queue, and return its id."""
    return str(world.json("submit", script, "--tpu", "v4-16", *options)["job_id"])


def new_head(world: ControllerInProcess) -> None:
    """Lose the head with all that it knew; the callers of its jobs end with it."""
    for handle in world.ray._handles():
        world.ray.kill(handle)
    wait_until(lambda: all(handle._is_dead for handle in world.ray._handles()))
    for group in list(world._groups.values()):
        world._remove(group)
    world.store.values.clear()
    world.tasks.clear()


def lines_of(file: str, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, Path(file).read_text().splitlines()) if line["kind"] == kind]


def test_waiting_and_running_jobs_start_again_on_new_head(world: ControllerInProcess, script: str, file: str) -> None:
    running = submit(world, script, "--num-slices", "2", "--max-retries-failure", "3", "--name", "runs")
    world.wait_for_attempt(running, 1)
    world.fail(running, 0)
    waiting = submit(world, script, "--num-slices", "3", "--name", "waits", "--priority", "batch")
    callers = world.submit("caller", (3,))
    said = world.iris(*EXPORT, file)
    assert "3 jobs" in said.stdout
    assert f"{callers}: its caller waits for its results; run its script again" in said.stderr
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600

    new_head(world)
    taken = world.json(*IMPORT, file)
    assert taken["jobs"] == [running, waiting]
    assert [left.partition(":")[0] for left in taken["left_out"]] == [callers]
    world.wait_for_state(running, JobState.RUNNING)
    assert world.spec(running).max_retries_failure == 2, "it had failed once"
    assert (world.spec(waiting).user, world.spec(waiting).priority.name) == ("ann", "BATCH")
    world.succeed(running)
    world.wait_for_state(waiting, JobState.RUNNING)
    world.succeed(waiting)


def test_settings_limits_taints_and_history_arrive(world: ControllerInProcess, script: str, file: str) -> None:
    world.iris("cluster", "settings", "set", "operators=ann,olga", "evictions=off")
    world.iris("cluster", "limits", "bob", "--chips", "8")
    world.iris("host", "drain", "v4-16-1")
    done = submit(world, script)
    world.wait_for_state(done, JobState.RUNNING)
    world.succeed(done)
    before = [world.json(*command) for command in (("cluster", "limits"), ("cluster", "settings"))]
    world.iris(*EXPORT, file)
    (history,) = lines_of(file, "finished")
    assert (history["job_id"], history["user"], history["state"]) == (done, "ann", "succeeded")

    new_head(world)
    world.iris("cluster", "controller", "start", "--setting", "evictions=on")
    said = world.iris(*IMPORT, file).stdout
    assert "1 finished job" in said
    assert "the setting evictions stays on, as set here" in said
    after = [world.json(*command) for command in (("cluster", "limits"), ("cluster", "settings"))]
    assert after[0] == before[0]
    assert after[1]["operators"] == before[1]["operators"]
    assert [view["state"] for view in world.json("host", "ls")] == ["FREE", "CLOSED", "FREE", "FREE"]
    (day,) = ControllerConnection().ask(GoodputCalls.user_times, 0.0)
    assert (day.user, day.jobs) == ("ann", 1)


def test_import_that_is_repeated_counts_nothing_twice(world: ControllerInProcess, script: str, file: str) -> None:
    done = submit(world, script)
    world.wait_for_state(done, JobState.RUNNING)
    world.succeed(done)
    world.iris(*EXPORT, file)
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    lines.insert(1, {"kind": "fleet_day", "day": "2026-11-20", "chip_seconds": {"busy": 100.0}})
    Path(file).write_text("\n".join(map(json.dumps, lines)))
    new_head(world)
    for _ in range(2):
        world.iris(*IMPORT, file)
        (day,) = ControllerConnection().ask(GoodputCalls.user_times, 0.0)
        assert (day.user, day.jobs) == ("ann", 1)
        assert ControllerConnection().ask(GoodputCalls.fleet_times, "")["2026-11-20"] == {"busy": 100.0}


def test_values_of_variables_travel_only_if_asked_for(
    world: ControllerInProcess, script: str, file: str, tmp_path: Path
) -> None:
    job = submit(world, script, "--env", "WANDB_API_KEY=hunter2")
    world.iris(*EXPORT, file)
    assert "hunter2" not in Path(file).read_text()
    with_values = f"{file}.all"
    world.iris(*EXPORT, with_values, "--variables")
    assert "hunter2" in Path(with_values).read_text()

    new_head(world)
    assert world.json(*IMPORT, file)["jobs"] == []
    (tmp_path / "env").write_text("WANDB_API_KEY=mine\n")
    again = world.json(*IMPORT, file, "--jobs-only", "--env-file", str(tmp_path / "env"))
    assert (again["jobs"], again["left_out"]) == ([job], [])
    once_more = world.json(*IMPORT, with_values, "--jobs-only")
    assert (once_more["jobs"], once_more["left_out"]) == ([], [f"{job}: there is a job of this id"])


def test_import_into_used_cluster_is_refused(world: ControllerInProcess, script: str, file: str) -> None:
    world.iris("cluster", "limits", "bob", "--chips", "8")
    submit(world, script)
    world.iris(*EXPORT, file)
    assert "exists already" in world.iris(*EXPORT, file, code=USAGE).stderr
    refused = world.iris(*IMPORT, file, code=USAGE).stderr
    assert "not empty: it has 1 jobs, the limits of" in refused


def test_import_by_others_than_operators_is_refused(world: ControllerInProcess, file: str) -> None:
    world.iris(*EXPORT, file)
    world.iris("cluster", "settings", "set", "operators=olga")
    assert "only operators may import" in world.iris(*IMPORT, file, code=FAILED).stderr


@pytest.mark.parametrize("change", [{"text": "maybe"}, {"at": None}, {"user": ["x"], "text": "on", "at": "x"}])
def test_damaged_line_leaves_nothing_imported(world: ControllerInProcess, file: str, change: dict[str, Any]) -> None:
    world.iris("cluster", "limits", "bob", "--chips", "8")
    world.iris("cluster", "settings", "set", "evictions=off")
    world.iris(*EXPORT, file)
    text = [json.loads(line) for line in Path(file).read_text().splitlines()]
    changed = [line | change if line["kind"] == "setting" else line for line in text]
    Path(file).write_text("\n".join(map(json.dumps, changed)))
    new_head(world)
    assert "can't be read" in world.iris(*IMPORT, file, code=USAGE).stderr
    assert world.json("cluster", "settings")["evictions"]["set_by"] is None
    assert {limit["user"] for limit in world.json("cluster", "limits")} == {"*"}


def test_job_that_this_version_refuses_is_named_and_others_start(
    world: ControllerInProcess, script: str, file: str
) -> None:
    refused, job = submit(world, script, "--name", "refused"), submit(world, script, "--name", "good")
    world.iris(*EXPORT, file)
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    for line in (line for line in lines if line.get("job_id") == refused):
        line["spec"]["max_retries_failure"] = -7
    Path(file).write_text("\n".join(map(json.dumps, lines)))
    new_head(world)
    taken = world.json(*IMPORT, file)
    assert taken["jobs"] == [job]
    assert taken["left_out"][0].startswith(f"{refused}: ")
    assert "max_retries_failure" in taken["left_out"][0]


def test_job_of_older_pool_is_named_and_others_are_exported(
    world: ControllerInProcess, script: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(world, script)
    world.wait_for_attempt(job, 1)
    with monkeypatch.context() as older:
        older.setattr(Actor, "call", lambda actor, method: getattr(actor.handle, f"no_{method.__name__}"))
        said = world.json(*EXPORT, file)
    assert said["left_out"] == [f"{job}: its iris_ray is older, and can't say how to start it again; submit it again"]
    assert lines_of(file, "job")[0]["job_id"] == job
    assert not Path(f"{file}.partial").exists()


@pytest.mark.parametrize("says", [{"run": 7}, {"run": {"runtime_env": {}}, "ray_job": {"pip": b"x"}}, {"run": {}}, "x"])
def test_pool_that_answers_nonsense_loses_its_own_job_only(
    world: ControllerInProcess, script: str, file: str, monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    jobs = submit(world, script), submit(world, script)
    honest = HandoverInPool.what_it_runs

    async def what_it_runs(pool: HandoverInPool) -> Any:
        request = pool.pool.only_request()
        return says if request is not None and request.spec.job_id == jobs[0] else await honest(pool)

    monkeypatch.setattr(HandoverInPool, "what_it_runs", what_it_runs)
    (left,) = world.json(*EXPORT, file)["left_out"]
    assert left.startswith(f"{jobs[0]}: its pool does not say how to start it again")
    assert [line["job_id"] for line in lines_of(file, "job") if "run" in line] == [jobs[1]]


def test_pool_speaks_for_nothing_but_the_start_of_its_job(
    world: ControllerInProcess, script: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(world, script)
    honest = HandoverInPool.what_it_runs

    async def what_it_runs(pool: HandoverInPool) -> Any:
        return {**(await honest(pool) or {}), "job_id": "another", "spec": {"job_id": "another", "user": "olga"}}

    monkeypatch.setattr(HandoverInPool, "what_it_runs", what_it_runs)
    world.iris(*EXPORT, file)
    (line,) = lines_of(file, "job")
    assert (line["job_id"], line["spec"]["user"]) == (job, "ann")


def test_missing_file_is_named(world: ControllerInProcess, file: str, tmp_path: Path) -> None:
    (tmp_path / "zip").write_bytes(b"PK\xff\xfe")
    assert "can't be read: No such file" in world.iris(*IMPORT, file, code=USAGE).stderr
    assert "can't be read: it is not text" in world.iris(*IMPORT, str(tmp_path / "zip"), code=USAGE).stderr


def test_function_of_another_python_is_not_started(world: ControllerInProcess, script: str, file: str) -> None:
    job = submit(world, script)
    world.iris(*EXPORT, file)
    header, *rest = Path(file).read_text().splitlines()
    Path(file).write_text("\n".join([json.dumps(json.loads(header) | {"python": "3.9.7"}), *rest]))
    new_head(world)
    taken = world.json(*IMPORT, file)
    assert taken["jobs"] == []
    assert taken["left_out"][0].startswith(f"{job}: its function was pickled by Python 3.9.7, and this is 3.")


def test_teams_and_the_teams_of_jobs_arrive(world: ControllerInProcess, script: str, file: str, tmp_path: Path) -> None:
    teams = tmp_path / "teams.toml"
    teams.write_text("[teams.ads]\nusers = ['ann']\nquota.v4-16 = 8\n[teams.'ads/eu']\nusers = ['ann']\n")
    world.iris("team", "apply", str(teams))
    options = "--num-slices", "3", "--team"
    kept, moved = submit(world, script, *options, "ads"), submit(world, script, *options, "ads/eu")
    teams.write_text(teams.read_text().partition("[teams.'ads/eu']")[0])
    world.iris("team", "apply", str(teams))
    shown = world.iris("team", "show", "--toml").stdout
    world.iris(*EXPORT, file)

    new_head(world)
    assert world.json(*IMPORT, file)["jobs"] == [kept, moved]
    assert world.iris("team", "show", "--toml").stdout == shown
    assert [world.spec(job).team for job in (kept, moved)] == ["ads", "ads"]


def test_job_with_secrets_of_store_arrives_once_they_are_set(
    world: ControllerInProcess, script: str, file: str, tmp_path: Path
) -> None:
    world.history = tmp_path / "head"
    world.restart_controller()
    put = "cluster", "secrets", "set", "KEY"
    world.iris(*put, input=b"old")
    job = submit(world, script, "--secret", "KEY=store:")
    world.iris(*EXPORT, file, "--variables")

    new_head(world)
    world.history = tmp_path / "new head"
    (left,) = world.json(*IMPORT, file)["left_out"]
    assert job in left
    assert "there is no secret 'KEY'" in left
    world.iris(*put, input=b"new")
    assert world.json(*IMPORT, file, "--jobs-only")["jobs"] == [job]
    world.wait_for_state(job, JobState.RUNNING)
    assert world.launches[-1].env["KEY"] == "new"


def has_pool(job: str) -> bool:
    try:
        ray.get_actor(detached_pool(job), NAMESPACE)
    except ValueError:
        return False
    return True


def test_group_of_which_a_job_is_refused_is_withdrawn_and_can_be_imported_later(
    world: ControllerInProcess, file: str, tmp_path: Path
) -> None:
    world.history = tmp_path / "head"
    world.restart_controller()
    put = "cluster", "secrets", "set", "KEY"
    world.iris(*put, input=b"old")
    group = JobGroup("rl", main="trainer")
    for name, secrets in (("trainer", {}), ("sampler", {"KEY": Secret.from_store("KEY")}), ("other", {})):
        group.add(time.time, name, resources=ResourceSpec(device=tpu_device("v4-16")), secrets=secrets)
    with mock.patch.dict("os.environ", IRIS_USER="ann"):
        jobs = [job.job_id for job in IrisClient().submit_group(group, detached=True).jobs.values()]
    world.iris(*EXPORT, file, "--variables")

    new_head(world)
    world.history = tmp_path / "new head"
    taken = world.json(*IMPORT, file)
    assert taken["jobs"] == []
    assert {left.partition(": ")[0] for left in taken["left_out"]} == set(jobs)
    assert world.state(jobs[0]) is JobState.KILLED
    world.iris(*put, input=b"new")
    wait_until(lambda: not has_pool(jobs[0]))
    assert world.json(*IMPORT, file, "--jobs-only") == {"jobs": jobs, "left_out": [], "remarks": []}
    for job in jobs:
        world.wait_for_state(job, JobState.RUNNING)
    assert [left.partition(": ")[2] for left in world.json(*IMPORT, file, "--jobs-only")["left_out"]] == [
        "there is a job of this id"
    ] * 3


def test_export_into_a_missing_directory_is_refused_at_once(world: ControllerInProcess, tmp_path: Path) -> None:
    assert "none is not a directory" in world.iris(*EXPORT, str(tmp_path / "none" / "x"), code=USAGE).stderr


def test_jobs_beyond_a_limit_are_named_and_imported_once_it_is_raised(
    world: ControllerInProcess, script: str, file: str
) -> None:
    """A limit of 0 queued jobs refuses new jobs. It is exported, and running jobs are new ones on the new head."""
    job = submit(world, script)
    world.wait_for_attempt(job, 1)
    world.iris("cluster", "limits", "everybody", "--queued-jobs", "0")
    world.iris(*EXPORT, file)
    new_head(world)
    refused = world.json(*IMPORT, file)
    assert refused["jobs"] == []
    assert "is 0 queued jobs" in refused["left_out"][0]
    world.iris("cluster", "limits", "everybody", "--queued-jobs", "20000")
    assert world.json(*IMPORT, file, "--jobs-only")["jobs"] == [job]
