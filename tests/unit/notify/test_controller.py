"""Jobs that tell, on a cluster in this process: what is sent, to whom, and what a restart and faults change."""

import math
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.client.job_request import make_pod_request
from iris_ray.errors import IrisError
from iris_ray.model.lifecycle import JobState
from iris_ray.notify import core
from iris_ray.notify.outbox import Outbox
from tests.support.controller_in_process import ControllerInProcess
from tests.support.leaks import unpacked
from tests.support.receivers import Mailbox, Webhook
from tests.support.waiting import wait_until
from tests.support.worlds import gang_spec, in_group

ALL = "http:HOOK,key=KEY,on=started+ended+lost+stalled+waiting"


@pytest.fixture
def world(bare_cluster: ControllerInProcess, tmp_path: Path, hook: Webhook) -> ControllerInProcess:
    """A cluster with a webhook, HOOK, and its KEY."""
    bare_cluster.history = tmp_path / "head"
    bare_cluster.history.mkdir()
    bare_cluster.start_controller()
    put(bare_cluster, "HOOK", hook.url)
    put(bare_cluster, "KEY", "signing key")
    bare_cluster.iris("cluster", "settings", "set", "notify_private=127.0.0.1", user="olga")
    return bare_cluster


def put(world: ControllerInProcess, name: str, value: str, *more: str) -> None:
    world.iris("cluster", "secrets", "set", name, *more, input=f"{value}\n".encode(), user="olga")


def outcomes(world: ControllerInProcess) -> list[tuple[str, str, str]]:
    """Job, event and outcome of all notifications, the earliest first."""
    return [(one["job_id"], one["event"], one["outcome"]) for one in reversed(world.json("job", "notifications", "ls"))]


def test_life_of_job_is_told_in_order(world: ControllerInProcess, hook: Webhook) -> None:
    world.start("good", notify=(ALL,))
    wait_until(lambda: hook.events_of("good") == ["started"])
    world.succeed("good")
    wait_until(lambda: hook.events_of("good") == ["started", "succeeded"])
    assert all(got.is_signed_with(b"signing key") for got in hook.got)
    world.start("bad", notify=(ALL,))
    world.fail("bad", 0)
    wait_until(lambda: hook.events_of("bad")[-1:] == ["failed"])
    last = hook.news[-1]
    assert (last["user"], last["state"], last["lines"]) == ("ann", "failed", [])
    assert "exited with code 3" not in last["text"]  # what a job says is its own affair
    wait_until(lambda: {one[2] for one in outcomes(world)} == {"sent"})
    assert [one[:2] for one in outcomes(world)][:2] == [("good", "started"), ("good", "succeeded")]
    assert "succeeded" in world.iris("job", "notifications", "ls", "good").output
    assert set(world.iris("job", "notifications", "ls", "-q").stdout.split()) == {"good", "bad"}


def test_job_without_destination_tells_nobody(world: ControllerInProcess, hook: Webhook) -> None:
    world.succeed(world.start("quiet"))
    world.succeed(world.start("loud", notify=(ALL,)))
    wait_until(lambda: hook.events_of("loud")[-1:] == ["succeeded"])
    assert hook.events_of("quiet") == []


def test_lost_host_is_told_and_job_that_goes_on_ends_later(world: ControllerInProcess, hook: Webhook) -> None:
    world.start("job", notify=(ALL,), max_retries_preemption=5)
    wait_until(lambda: hook.events_of("job") == ["started"])  # a host that is lost earlier is a failed launch
    name = world.status("job").groups[0]
    world._in_loop(world.kill_host, name, 0)
    world.wait_for_attempt("job", 2)
    wait_until(lambda: "lost" in hook.events_of("job"))
    world.succeed("job")
    wait_until(lambda: hook.events_of("job") == ["started", "lost", "succeeded"])


def test_long_wait_is_told_once(world: ControllerInProcess, hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.notify.controller.WAITS_S", 0.1)
    world.start("runs", slices=(3,))
    world.submit("waits", notify=(f"{ALL},wait=60",))
    part = world.part_of_controller("notify")
    now = part._clock.now
    monkeypatch.setattr(part._clock, "now", lambda: now() + 90)
    wait_until(lambda: hook.events_of("waits") == ["waiting"])
    assert "iris-ray why waits" in hook.news[-1]["text"]
    time.sleep(2.5)
    assert hook.events_of("waits") == ["waiting"]


def test_cancelled_job_is_told_with_its_reason(world: ControllerInProcess, hook: Webhook) -> None:
    world.start("job", notify=("http:HOOK,key=KEY",))
    world.iris("cancel", "job", "--yes", user="olga")
    wait_until(lambda: hook.events_of("job") == ["failed"])
    assert "olga" in hook.news[-1]["text"]


def test_end_because_of_another_job_does_not_quote_its_error(world: ControllerInProcess, hook: Webhook) -> None:
    values: dict[str, Any] = {"user": "ann", "max_retries_failure": 0, "notify": ("http:HOOK,key=KEY",)}
    for spec in in_group(*(gang_spec(name, slices=(1,), **values) for name in ("trainer", "sampler"))):
        world.submitted(spec)
    world.wait_for_attempt("sampler", 1)
    world.submit("late", after={"trainer": "succeeded"}, notify=("http:HOOK,key=KEY",))
    world.fail("trainer", 0, "ValueError: what only ann may read")
    wait_until(lambda: [hook.events_of(job_id) for job_id in ("trainer", "sampler", "late")] == [["failed"]] * 3)
    texts = {one["job_id"]: one["text"] for one in hook.news}
    assert "what only ann may read" in str(world.status("sampler").error), "it is quoted there"
    assert "ann may read" not in str(texts)
    assert "trainer of its group rl has ended as failed" in texts["sampler"]
    assert "trainer had succeeded, and that has ended as failed" in texts["late"]


def test_end_of_a_lost_job_does_not_quote_how_its_task_ended(world: ControllerInProcess, hook: Webhook) -> None:
    world.start("job", notify=(ALL,), max_retries_preemption=0)
    wait_until(lambda: hook.events_of("job") == ["started"])  # a host that is lost earlier is a failed launch
    name = world.status("job").groups[0]
    world._in_loop(world.kill_host, name, 0)
    wait_until(lambda: hook.events_of("job") == ["started", "failed"])
    assert "ended as worker_failed" in hook.news[-1]["text"]
    assert str(world.status("job").error)[:20] not in hook.news[-1]["text"]
    assert "iris-ray job status job shows more" in hook.news[-1]["text"]


def test_last_lines_come_only_if_asked_for_and_without_secrets(world: ControllerInProcess, hook: Webhook) -> None:
    put(world, "TOKEN", "s3cr3t-token")
    world.start("job", notify=("http:HOOK,key=KEY,lines=2",), stored_secrets=("TOKEN",))
    for text in ("first\n", "second s3cr3t-token\n", "third\n"):
        world.prints("job", 0, text)
    world.fail("job", 0)
    wait_until(lambda: hook.events_of("job") == ["failed"])
    lines = hook.news[-1]["lines"]
    assert 1 <= len(lines) <= 2
    assert not any("s3cr3t" in line for line in lines)


def test_lines_are_left_out_if_a_secret_can_not_be_found_in_them(world: ControllerInProcess, hook: Webhook) -> None:
    put(world, "TOKEN", "s3cr3t-token")
    world.start("job", notify=("http:HOOK,key=KEY,lines=5",), stored_secrets=("TOKEN",))
    world.prints("job", 0, "with s3cr3t-token\n")
    world.iris("cluster", "secrets", "rm", "TOKEN", "--yes", user="olga")
    world.fail("job", 0)
    wait_until(lambda: hook.events_of("job") == ["failed"])
    assert hook.news[-1]["lines"] == ["(its output can't be read now)"]


# -- rules and defaults ------------------------------------------------------------------------------------------------


def test_rule_of_operator_is_for_all_jobs_from_now_on(world: ControllerInProcess, hook: Webhook) -> None:
    world.succeed(world.start("before"))
    put(world, "ONLY_RULE", hook.url, "--user", "nobody")
    world.start("runs")
    rule = "notify=http:ONLY_RULE,key=KEY,on=started+ended"
    world.iris("cluster", "settings", "set", rule, user="olga")
    world.succeed("runs")
    world.succeed(world.start("after"))
    wait_until(lambda: hook.events_of("after") == ["started", "succeeded"])
    assert (hook.events_of("before"), hook.events_of("runs")) == ([], ["succeeded"])
    world.iris("cluster", "settings", "reset", "notify", user="olga")
    world.succeed(world.start("later"))
    world.succeed(world.start("own", notify=(ALL,)))
    wait_until(lambda: hook.events_of("own")[-1:] == ["succeeded"])
    assert hook.events_of("later") == []


def test_own_destination_with_another_key_does_not_replace_the_rule(world: ControllerInProcess, hook: Webhook) -> None:
    put(world, "MINE", "another key")
    world.iris("cluster", "settings", "set", "notify=http:HOOK,key=KEY,on=failed", user="olga")
    world.start("job", notify=("http:HOOK,key=MINE,on=started+failed,lines=3",))
    wait_until(lambda: hook.events_of("job") == ["started"])
    world.prints("job", 0, "the last line\n")
    world.fail("job", 0)
    wait_until(lambda: hook.events_of("job") == ["started", "failed"])
    assert [got.is_signed_with(b"signing key") for got in hook.got] == [False, True]
    assert hook.news[-1]["lines"] != []


def test_default_of_user_is_in_the_environment(
    world: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "work.py"
    script.write_text("pass")
    submit = "submit", str(script), "--tpu", "v4-16"
    monkeypatch.setenv("IRIS_NOTIFY", "slack:HOOK,on=failed  http:HOOK,key=KEY")
    by_default = world.json(*submit)["job_id"]
    assert world.spec(by_default).notify == ("slack:HOOK,on=failed", "http:HOOK,key=KEY")
    named = world.json(*submit, "--notify", "slack:HOOK", "--notify", ALL)["job_id"]
    assert world.spec(named).notify == ("slack:HOOK", ALL)
    assert make_pod_request(lambda: None, "v4-16", 1, notify=[]).spec.notify == ()
    monkeypatch.setenv("IRIS_NOTIFY", "https://hooks.example.org/s3cr3t")
    said = world.iris(*submit, code=USAGE).stderr
    assert "cluster secrets set NAME" in said
    assert "s3cr3t" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("slack:NONE", "there is no secret 'NONE'"),
        ("slack:KEY", "the secret is not the URL of a webhook"),
        ("slack:OTHERS", "is for jobs of users olga only"),
        ("slack:METADATA", "not on https"),
        ("slack:LOOP", "private address"),
        ("http:HOOK", "have to be signed"),
        ("http:HOOK,key=NONE", "there is no secret 'NONE'"),
        ("http:HOOK,key=OTHERS", "is for jobs of users olga only"),
        ("command:page", "has no such command"),
        ("email:ann@example.org", "has no SMTP server"),
        ("irc:x", "one of http, slack"),
        ("slack:HOOK,lines=1000", "50 at most"),
    ],
)
def test_job_that_nobody_could_hear_of_is_refused(world: ControllerInProcess, given: str, said: str) -> None:
    put(world, "OTHERS", "https://hooks.example.org/s3cr3t", "--user", "olga")
    put(world, "METADATA", "http://metadata.google.internal/s3cr3t")
    put(world, "LOOP", "https://[::1]/s3cr3t")
    with pytest.raises(IrisError) as refused:
        world.submit("job", notify=(given,))
    assert said in str(refused.value)
    assert "s3cr3t" not in str(refused.value)
    assert world.jobs() == []


def test_same_place_twice_and_chip_hours_without_gang_are_refused(world: ControllerInProcess) -> None:
    with pytest.raises(IrisError, match="slack:HOOK twice"):
        world.submit("job", notify=("slack:HOOK", "slack:HOOK,lines=3"))
    with pytest.raises(IrisError, match="only measured for jobs that are one gang"):
        world.submit("job", slices=(2,), notify=("slack:HOOK,chip-hours=3",), failure_domain="slice")


# -- tests of destinations ---------------------------------------------------------------------------------------------


def test_person_tests_destinations(world: ControllerInProcess, hook: Webhook, box: Mailbox, tmp_path: Path) -> None:
    assert world.iris("job", "notifications", "test", "slack:HOOK").output == "slack:HOOK has accepted the test\n"
    assert "ann tests this destination" in hook.got[-1].json["text"]
    hook.answers += [(404, {})]
    said = world.iris("job", "notifications", "test", ALL, code=FAILED).stderr
    assert "http:HOOK has not accepted the test: HTTP 404" in said
    world.iris("cluster", "settings", "set", f"notify_smtp=127.0.0.1:{box.port},from=iris@example.org,tls=off")
    world.iris("job", "notifications", "test", "email:ann@example.org")
    assert box.mails[0]["Subject"] == "Job test succeeded"
    page = f'notify_commands={{"page": ["/usr/bin/tee", "{tmp_path}/paged"]}}'
    world.iris("cluster", "settings", "set", page)
    assert world.json("job", "notifications", "test", "command:page") == {"to": "command:page", "problem": ""}
    assert '"job_id": "test"' in (tmp_path / "paged").read_text()
    assert "there is no secret" in world.iris("job", "notifications", "test", "slack:NONE", code=USAGE).stderr
    assert "it has no channel" in world.iris("job", "notifications", "test", "x", code=USAGE).stderr


# -- restarts, faults, floods ------------------------------------------------------------------------------------------


def test_what_waits_outlives_the_controller_and_is_sent_with_its_id(world: ControllerInProcess, hook: Webhook) -> None:
    hook.answers += [(503, {"retry-after": "600"})]
    world.start("job", notify=(ALL,))
    wait_until(lambda: ("job", "started", "waits") in outcomes(world))
    wait_until(lambda: len(hook.got) == 1)
    world.succeed("job")
    wait_until(lambda: ("job", "succeeded", "waits") in outcomes(world))
    world.restart_controller()
    wait_until(lambda: len(hook.news) == 3)
    first, *again = hook.news
    assert {one["event"] for one in again} == {"started", "succeeded"}
    assert first["id"] in {one["id"] for one in again}
    wait_until(lambda: {one[2] for one in outcomes(world)} == {"sent"})
    world.restart_controller()
    world.succeed(world.start("next", notify=(ALL,)))
    wait_until(lambda: hook.events_of("next")[-1:] == ["succeeded"])
    assert len(hook.events_of("job")) == 3, "what was sent is not sent again"


def test_end_that_no_controller_saw_is_told_by_the_next(world: ControllerInProcess, hook: Webhook) -> None:
    """The Controller dies right after the end, before it has told anybody, and its file is lost as well."""
    world.start("job", notify=(ALL,))
    wait_until(lambda: hook.events_of("job") == ["started"])
    part = world.part_of_controller("notify")
    part._sender.close()
    world.succeed("job")
    assert world.history is not None
    Outbox(world.history).path.unlink()
    world.restart_controller()
    wait_until(lambda: hook.events_of("job")[-1:] == ["succeeded"])


def test_what_was_told_long_ago_is_not_told_again_after_a_restart(world: ControllerInProcess, hook: Webhook) -> None:
    """A passed budget stays passed, and a loss of a job whose times are not measured has no time."""
    world.start("job", notify=("http:HOOK,key=KEY,on=budget,chip-hours=0.001",))
    part = world.part_of_controller("notify")

    def is_told() -> bool:
        part._looked_at = -math.inf
        return hook.events_of("job") == ["budget"]

    wait_until(is_told)
    wait_until(lambda: outcomes(world) == [("job", "budget", "sent")])
    assert world.history is not None
    with closing(sqlite3.connect(Outbox(world.history).path)) as file, file:
        file.execute("UPDATE notifications SET changed_at = changed_at - 2 * 86400")
    world.restart_controller()
    world.succeed(world.start("next", notify=(ALL,)))
    wait_until(lambda: hook.events_of("next")[-1:] == ["succeeded"])
    assert hook.events_of("job") == ["budget"]


def test_full_disk_stops_no_notification_and_no_job(
    world: ControllerInProcess, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as on_full_disk:
        on_full_disk.setattr(Outbox, "write", full)
        world.succeed(world.start("job", notify=(ALL,)))
        wait_until(lambda: hook.events_of("job") == ["started", "succeeded"])
        services = wait_until(lambda: world._ask("about")["services"]["notify"].get("trouble"))
        assert "disk is full" in services
    wait_until(lambda: ("job", "succeeded", "sent") in outcomes(world))
    assert world._ask("about")["services"]["notify"]["trouble"] is None


def test_hanging_receiver_and_disk_hold_up_no_job(
    world: ControllerInProcess, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.goes_on.clear()
    monkeypatch.setattr(Outbox, "write", lambda *_: hook.goes_on.wait())
    began = time.monotonic()
    for number in range(3):
        world.succeed(world.start(f"job-{number}", notify=(ALL,)))
    assert time.monotonic() - began < 60
    hook.goes_on.set()
    wait_until(lambda: hook.events_of("job-2")[-1:] == ["succeeded"], 120)


def test_jobs_that_are_forgotten_at_once_are_told(
    world: ControllerInProcess, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iris_ray.state.job_table.FINISHED_JOBS_KEPT", 1)
    world.start("runs", slices=(3,))
    for number in range(30):
        world.submit(f"job-{number}", notify=("http:HOOK,key=KEY",))
    time.sleep(2)
    world.iris("cancel", *(f"job-{n}" for n in range(30)), "--yes")
    assert len(world.jobs()) < 10
    wait_until(lambda: {one["job_id"] for one in hook.news} == {f"job-{n}" for n in range(30)})


def test_address_of_webhook_is_nowhere_but_in_the_store(
    world: ControllerInProcess, hook: Webhook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        put(world, "GONE", f"http://127.0.0.1:{nobody.getsockname()[1]}/s3cr3t-path")
        world.start("job", notify=(ALL, "slack:GONE,on=started+ended"))
        wait_until(lambda: any(one["error"] for one in world.json("job", "notifications", "ls")))
    world.fail("job", 0)
    world.wait_for_state("job", JobState.FAILED)
    wait_until(lambda: "failed" in hook.events_of("job"))
    shown = [world.iris(*words).output for words in (
        ("job", "notifications", "ls", "--json"), ("job", "status", "job", "--json"), ("job", "events", "job"),
        ("history", "job", "--json"), ("cluster", "settings"), ("cluster", "secrets", "ls"),
    )]  # fmt: skip
    export = tmp_path / "export.jsonl"
    world.iris("cluster", "controller", "export", str(export), "--variables")
    assert not any("s3cr3t" in text for text in (*shown, caplog.text, export.read_text()))
    have = {path.name for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t-path" in path.read_bytes()}
    assert have == {"HOOK", "GONE"}
    recorded = [data for value in world.recorded().values() if value for data in unpacked(value)]
    assert not any(b"s3cr3t" in data for data in recorded)


def test_events_older_than_a_day_are_not_told(world: ControllerInProcess, hook: Webhook) -> None:
    assert core.MOST_AGE_S == 86_400
    world.succeed(world.start("job", notify=(ALL,)))
    wait_until(lambda: hook.events_of("job") == ["started", "succeeded"])
    assert world.history is not None
    Outbox(world.history).path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iris_ray.notify.controller.MOST_AGE_S", -1.0)
        world.restart_controller()
        world.succeed(world.start("next"))
        wait_until(lambda: world.part_of_controller("notify") and world.part_of_controller("notify")._read is not None)
        time.sleep(2.5)
        assert hook.events_of("job") == ["started", "succeeded"]
