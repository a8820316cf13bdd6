"""``iris-ray ls``, ``status``, ``tasks``, ``why``, ``cancel``: what they print about the real Controller's jobs."""

import re

import pytest

from iris_ray.actors.calls import controller_connection
from iris_ray.actors.controller import user_calls
from iris_ray.cli.conventions import FAILED, INTERRUPTED, OK, USAGE
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from tests.support.command_line import CTRL_C, Terminal
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until


def test_why_status_tasks_and_cancel_of_a_job_that_waits(world: ControllerInProcess) -> None:
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
    assert cancelled == {"job_id": second, "cancelled": True, "state_before": "PENDING"}
    assert world.json("job", "status", second)["error"] == "cancelled by ann"
    assert "had already ended: killed" in world.iris("cancel", second).stdout
    assert not world.json("cancel", second)["cancelled"]


def test_listing_shows_one_users_jobs_and_the_finished_ones_if_asked(world: ControllerInProcess) -> None:
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


def test_what_a_job_says_of_itself_is_in_the_list_and_in_its_status(world: ControllerInProcess) -> None:
    job = world.start("train")
    assert world.json("job", "status", job)["status"] is None
    world.says(job, 7, "loss 2.31, ETA 3 h")
    wait_until(lambda: world.status(job).status is not None)
    assert "step 7: loss 2.31, ETA 3 h" in world.iris("ls").stdout
    printed = world.iris("job", "status", job).stdout
    assert re.search(r"says: +step 7: loss 2\.31, ETA 3 h\nheartbeat: +\d+s ago", printed)
    found = world.json("job", "status", job)
    assert (found["step"], found["status"]) == (7, "loss 2.31, ETA 3 h")


def test_lists_are_whole_though_the_controller_gives_them_page_by_page(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "PAGE", 2)
    monkeypatch.setattr(controller_connection, "PAGE", 2)
    first = world.start("train", slices=(3,))
    jobs = [first, *(world.submit(f"job-{number}") for number in range(4))]
    assert [job["job_id"] for job in world.json("ls")] == jobs
    assert [task["task_index"] for task in world.json("job", "tasks", first)] == list(range(6))
    hosts = [host["node_id"] for view in world.json("host", "ls") for host in view["hosts"]]
    assert len(set(hosts)) == len(hosts) == 7, "those of the slices, and the head"
    assert len(world.jobs()) == 2, "one page"


def test_everybody_sees_who_has_the_slices_and_who_waits_for_whom(world: ControllerInProcess) -> None:
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
def test_cancel_on_a_terminal_asks_and_leaves_the_job_alone_unless_the_answer_is_yes(
    world: ControllerInProcess, pressed: str, code: int, says: str
) -> None:
    job = world.start("train")
    person = Terminal((f"Cancel {job} of ann, running on v4-16-0? [y/N]", pressed))
    assert world.on_terminal("cancel", job, person=person) == code
    assert says in person.printed
    assert world.state(job) is JobState.RUNNING


def test_cancel_on_a_terminal_ends_the_job_if_the_answer_is_yes_or_given_before(world: ControllerInProcess) -> None:
    asked, told = world.start("train"), world.start("eval")
    person = Terminal(("[y/N]", "y\n"))
    assert world.on_terminal("cancel", asked, person=person) == OK
    assert f"{asked} is cancelled" in person.printed
    assert world.on_terminal("cancel", told, "--yes", person=Terminal()) == OK
    assert {world.state(asked), world.state(told)} == {JobState.KILLED}
