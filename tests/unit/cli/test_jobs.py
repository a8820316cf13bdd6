"""Commands about jobs: what they print about the real Controller's jobs."""

import re
import time
from types import SimpleNamespace

import pytest

from iris_ray.actors.calls import controller_connection
from iris_ray.actors.controller import user_calls
from iris_ray.cli.conventions import FAILED, INTERRUPTED, OK, USAGE
from iris_ray.errors import UnknownNameError
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from tests.support.command_line import CTRL_C, Terminal
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until

# -- ls, status, tasks, why and cancel --------------------------------------------------------------------------------


def test_waiting_job_answers_why_status_tasks_and_cancel(world: ControllerInProcess) -> None:
    first = world.start("train-1a2b3c4d", slices=(3,))
    second = world.submit("eval-5e6f7a8b")
    assert [job["job_id"] for job in world.json("ls")] == [first, second]
    assert f"in use by {first}" in world.iris("why", second).stdout
    assert "it does not wait" in world.iris("why", first).stdout
    assert re.search(r"tasks: +2 pending", world.iris("job", "status", second).stdout)
    tasks = world.json("job", "tasks", first)
    assert [(task["state"], task["group"]) for task in tasks[:2]] == [("RUNNING", "v4-16-0")] * 2
    slices = world.json("host", "ls")
    assert [(view["state"], view["jobs"]) for view in slices] == [("BUSY", [first])] * 3 + [("FREE", [])]
    assert f"did you mean {second}" in world.iris("cancel", second[:-1], code=USAGE).stderr
    cancelled = world.json("cancel", second)
    assert cancelled == [{"job_id": second, "cancelled": True, "state_before": "PENDING"}]
    assert world.json("job", "status", second)["error"] == "cancelled by ann"
    assert "had already ended: killed" in world.iris("cancel", second).stdout
    assert not world.json("cancel", second)[0]["cancelled"]


def test_job_after_another_says_so_and_starts_in_turn(world: ControllerInProcess) -> None:
    first = world.start("prepare-1a2b3c4d")
    last = world.submit("train-5e6f7a8b", after=[first])
    assert "waits until prepare-1a2b3c4d has succeeded" in world.iris("why", last).stdout
    assert "waits until prepare" in world.iris("job", "status", last).stdout
    with pytest.raises(UnknownNameError, match="did you mean prepare-1a2b3c4d"):
        world.submit("train-2", after=["prepare-1a2b3c4e"])
    world.succeed(first)
    world.wait_for_attempt(last, 1)
    world.iris("cancel", last)
    late = world.submit("late", after={last: "succeeded"})
    assert world.state(late) is JobState.UNSCHEDULABLE
    assert (
        f"once {last} had succeeded, and that has ended as killed: cancelled by ann" in world.iris("why", late).stdout
    )


def test_listing_filters_by_user_and_adds_finished_jobs(world: ControllerInProcess) -> None:
    world.succeed(world.start("train"))
    world.fail(world.start("again", priority=PriorityBand.BATCH), 1)
    world.start("of-bob", user="bob")
    jobs = world.json("ls", "--all", "--user", "ann")
    assert [(job["job_id"], job["priority"], job["state"]) for job in jobs] == [
        ("train", "INTERACTIVE", "SUCCEEDED"),
        ("again", "BATCH", "FAILED"),
    ]
    assert [job["job_id"] for job in world.json("ls")] == ["of-bob"]
    assert "3 others (--all)" in world.iris("ls", "--user", "ann").stderr
    listed = world.iris("ls", "--all").stdout
    for job in ("train", "again", "of-bob"):
        assert job in listed


def test_jobs_status_text_is_in_list_and_status(world: ControllerInProcess) -> None:
    job = world.start("train")
    assert world.json("job", "status", job)["status"] is None
    world.says(job, 7, "loss 2.31, ETA 3 h")
    wait_until(lambda: world.status(job).status is not None)
    assert "step 7: loss 2.31, ETA 3 h" in world.iris("ls").stdout
    printed = world.iris("job", "status", job).stdout
    assert re.search(r"started: +\d+s ago\nslices", printed)
    assert re.search(r"says: +step 7: loss 2\.31, ETA 3 h\nheartbeat: +\d+s ago", printed)
    found = world.json("job", "status", job)
    assert (found["step"], found["status"]) == (7, "loss 2.31, ETA 3 h")
    assert found["submitted_at"] <= found["started_at"] <= time.time()
    world.succeed(job)
    found = world.json("job", "status", job)
    assert found["started_at"] <= found["ended_at"] <= time.time()
    waits = world.json("job", "status", world.submit("waits", slices=(9,)))
    assert (waits["started_at"], waits["ended_at"]) == (None, None)


def test_paged_lists_are_complete(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_calls, "PAGE", 2)
    monkeypatch.setattr(controller_connection, "PAGE", 2)
    first = world.start("train", slices=(3,))
    jobs = [first, *(world.submit(f"job-{number}") for number in range(4))]
    assert [job["job_id"] for job in world.json("ls")] == jobs
    assert [task["task_index"] for task in world.json("job", "tasks", first)] == list(range(6))
    hosts = [host["node_id"] for view in world.json("host", "ls") for host in view["hosts"]]
    assert len(set(hosts)) == len(hosts) == 7, "those of the slices, and the head"
    assert len(world.jobs()) == 2, "one page"


def test_tasks_of_several_processes_have_the_indices_that_other_commands_take(world: ControllerInProcess) -> None:
    waits = world.submit("eval", processes_per_host=2)  # two hosts
    lines = world.iris("job", "tasks", waits).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["TASK", "0-1", "2-3"]
    assert world.iris("job", "tasks", waits, "-q").stdout.split() == [f"{waits}/0", f"{waits}/2"]


def test_queue_shows_who_holds_slices_and_who_waits(world: ControllerInProcess) -> None:
    """Ann has all slices. Bob's batch job came before Carl's urgent one, and waits for it, too; so does Dora's."""
    ann = world.start("ann-train", slices=(3,), user="ann")
    batch = world.submit("bob-batch", user="bob", priority=PriorityBand.BATCH)
    urgent = world.submit("carl-urgent", user="carl", priority=PriorityBand.PRODUCTION)
    sweep = world.submit("dora-sweep", user="dora")
    seen = {job["job_id"]: (job["user"], job["state"]) for job in world.json("ls")}
    assert seen == {
        ann: ("ann", "RUNNING"),
        batch: ("bob", "PENDING"),
        urgent: ("carl", "PENDING"),
        sweep: ("dora", "PENDING"),
    }
    assert f"in use by {ann}" in world.iris("why", urgent, user="carl").stdout
    wait_until(lambda: urgent in world.iris("why", batch, user="bob").stdout)
    assert "in use by" in world.json("job", "status", urgent)["waiting"]["sentence"]
    assert world.json("job", "status", ann)["groups"] == ["v4-16-0", "v4-16-1", "v4-16-2"]
    assert [(task["state"], task["group"]) for task in world.json("job", "tasks", ann)] == [
        ("RUNNING", f"v4-16-{number}") for number in range(3) for _ in (0, 1)
    ]
    assert f"did you mean {sweep}" in world.iris("cancel", sweep[:-1], user="bob", code=USAGE).stderr
    assert f"{sweep} is cancelled; it was pending" in world.iris("cancel", sweep, user="bob").stdout
    assert world.json("job", "status", sweep)["error"] == "cancelled by bob"


@pytest.mark.parametrize(
    ("pressed", "code", "says"),
    [(CTRL_C, INTERRUPTED, "interrupted"), ("n\n", FAILED, "nothing is done")],
    ids=["Ctrl-C", "n"],
)
def test_cancel_on_terminal_without_yes_leaves_job_alone(
    world: ControllerInProcess, pressed: str, code: int, says: str
) -> None:
    job = world.start("train")
    person = Terminal((f"Cancel {job} of ann, running on v4-16-0? [y/N]", pressed))
    assert world.on_terminal("cancel", job, person=person) == code
    assert says in person.printed
    assert world.state(job) is JobState.RUNNING


def test_cancel_on_terminal_with_yes_ends_job(world: ControllerInProcess) -> None:
    asked, told = world.start("train"), world.start("eval")
    person = Terminal(("[y/N]", "y\n"))
    assert world.on_terminal("cancel", asked, person=person) == OK
    assert f"{asked} is cancelled" in person.printed
    assert world.on_terminal("cancel", told, "--yes", person=Terminal()) == OK
    assert {world.state(asked), world.state(told)} == {JobState.KILLED}


# -- events -----------------------------------------------------------------------------------------------------------


def test_story_of_twice_failing_job_survives_restart(world: ControllerInProcess) -> None:
    job = world.start("train", max_retries_failure=3)
    world.fail(job, 1)
    world.wait_for_attempt(job, 2)
    world.fail(job, 0)
    world.wait_for_attempt(job, 3)
    world.succeed(job)
    found = world.json("job", "events", job)
    assert [(event["attempt"], event["what"].split(":")[0]) for event in found] == [
        (None, "submitted by ann, interactive"),
        (1, "runs on v4-16-0"),
        (1, "ended (charged as a failure)"),
        (2, "runs on v4-16-0"),
        (2, "ended (charged as a failure)"),
        (3, "got v4-16-0"),
        (3, "runs on v4-16-0"),
        (None, "the job ended"),
    ]
    assert "worker 1" in found[2]["what"]
    assert found == sorted(found, key=lambda event: event["at"])
    world.restart_controller()
    assert world.json("job", "events", job) == found
    assert "charged as a failure" in world.iris("job", "events", job).stdout
    assert "did you mean train" in world.iris("job", "events", "trian", code=USAGE).stderr


def test_status_says_when_time_is_up(world: ControllerInProcess) -> None:
    world.start("train", max_runtime=4000.0)
    assert "in 1h06m at the latest (max_runtime)" in world.iris("job", "status", "train").stdout
    world.succeed("train")
    assert "max_runtime" not in world.iris("job", "status", "train").stdout


# -- ls: which jobs, and following them --------------------------------------------------------------------------------


def test_listing_is_by_state_type_and_number(world: ControllerInProcess) -> None:
    ended, failed = world.start("ended-1a2b3c4d"), world.start("failed-1a2b3c4d")
    world.succeed(ended)
    world.fail(failed, 0)
    runs, waits = world.start("runs-1a2b3c4d", slices=(3,)), world.submit("waits-1a2b3c4d")

    def ids(*options: str) -> list[str]:
        return world.iris("ls", "-q", *options).stdout.split()

    assert ids() == [runs, waits]
    assert ids("--state", "failed", "--state", "RUNNING") == [failed, runs]
    assert ids("--all", "--limit", "2") == [runs, waits]
    assert ids("--tpu", "v4-16") == [runs, waits]
    assert ids("--tpu", "V4-16") == [runs, waits]
    assert ids("--tpu", "v4-32") == []
    assert "'v4' is not a TPU type" in world.iris("ls", "--tpu", "v4", code=USAGE).stderr
    assert "no killed jobs" in world.iris("ls", "--state", "killed").stderr
    assert "give --json or --quiet" in world.iris("ls", "-q", "--json", code=USAGE).stderr


def test_listing_is_drawn_anew_until_ctrl_c(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.start("train-1a2b3c4d")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 1:
            raise KeyboardInterrupt
        world.submit("late-5e6f7a8b", slices=(9,))

    monkeypatch.setattr("iris_ray.cli.job_list.time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    person = Terminal()
    assert world.on_terminal("top", person=person) == INTERRUPTED
    before, late, after = person.printed.partition("late-5e6f7a8b")
    assert before.count(first) == 2
    assert late
    assert "Ctrl-C ends this" in before
    assert after.endswith("interrupted\n")
    assert "--watch is for a terminal" in world.iris("ls", "--watch", code=USAGE).stderr


def test_watch_at_a_dashboard_says_what_to_do_instead() -> None:
    person = Terminal()
    assert person.run("ls", "--watch", "--address", "http://127.0.0.1:1") == USAGE
    assert "watch -n 10 iris-ray ls --address http://127.0.0.1:1" in person.printed
