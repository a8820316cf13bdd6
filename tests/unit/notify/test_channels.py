"""One message by each channel, to real servers and to a real command."""

import asyncio
import json
import os
import smtplib
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from iris_ray.errors import SecretNotFoundError
from iris_ray.notify import channels, delivery, webhooks
from iris_ray.notify.channels import NotSentError
from iris_ray.notify.core import News
from iris_ray.notify.delivery import Config, Delivery
from iris_ray.notify.settings import NOTIFY_PRIVATE, NOTIFY_SMTP, PrivateHosts
from tests.support.receivers import Mailbox, Webhook, webhook
from tests.unit.notify.test_messages import some_news

LOOPBACK = NOTIFY_PRIVATE.parse("127.0.0.1")


def send(config: Config, news: Sequence[News], **secrets: str) -> None:
    """Send a message once, with these secrets in the store; each job's last line is "last"."""

    def secret(name: str, _: News | None) -> str:
        if name not in secrets:
            raise SecretNotFoundError(f"no {name}")
        return secrets[name]

    async def last_lines(one: News) -> Sequence[str]:
        return ["last"] * one.lines

    async def once() -> None:
        sends = Delivery(secret, last_lines)
        sends.config = config
        try:
            await sends.send(news, 0)
        finally:
            sends.close()

    asyncio.run(once())


def problem(config: Config, place: str, **secrets: str) -> str:
    with pytest.raises(NotSentError) as error:
        send(config, [some_news(place=place)], **secrets)
    return str(error.value)


def test_post_is_signed_and_has_the_lines_that_were_asked_for(hook: Webhook) -> None:
    news = [some_news(place="http:HOOK", key="KEY", lines=2), some_news("b", place="http:HOOK", key="KEY")]
    send(Config(private=LOOPBACK), news, HOOK=f"{hook.url}\n", KEY="sign")
    (got,) = hook.got
    assert got.path == "/services/T0/s3cr3t-path"
    assert got.is_signed_with(b"sign")
    assert got.headers["content-type"].startswith("application/json")
    assert got.json["id"] == got.headers["webhook-id"]
    assert [one["lines"] for one in got.json["notifications"]] == [["last", "last"], []]


def test_chats_get_their_form(hook: Webhook) -> None:
    for place in ("slack:HOOK", "googlechat:HOOK"):
        send(Config(private=LOOPBACK), [some_news(place=place, lines=1)], HOOK=hook.url)
    assert [list(got.json) for got in hook.got] == [["text"], ["text"]]
    assert all(got.json["text"].endswith("```\nlast\n```") for got in hook.got)


def test_many_news_at_once_have_no_lines(hook: Webhook) -> None:
    news = [some_news(f"job-{n}", place="http:HOOK", key="KEY", lines=2) for n in range(4)]
    send(Config(private=LOOPBACK), news, HOOK=hook.url, KEY="k")
    assert [one["lines"] for one in hook.news] == [[]] * 4


def test_redirect_is_not_followed(hook: Webhook) -> None:
    with webhook() as other:
        hook.answers += [(307, {"location": other.url})]
        assert "redirects are not followed" in problem(Config(private=LOOPBACK), "slack:HOOK", HOOK=hook.url)
        assert (len(hook.got), other.got) == (1, [])


@pytest.mark.parametrize(
    ("status", "again", "after_s"), [(500, True, 0), (503, True, 7), (429, True, 7), (404, False, 0), (403, False, 0)]
)
def test_answer_says_whether_another_try_may_help(hook: Webhook, status: int, again: bool, after_s: float) -> None:
    hook.answers += [(status, {"retry-after": "7"} if after_s else {})]
    with pytest.raises(NotSentError, match=f"^HTTP {status}$") as error:
        asyncio.run(webhooks.post(hook.url, b"{}", {}, LOOPBACK))
    assert (error.value.again, error.value.after_s) == (again, after_s)


def test_absurd_retry_after_is_bounded(hook: Webhook) -> None:
    for value in ("99999999", "-1", "soon", "9" * 400, "Fri, 31 Dec 1999 23:59:59 GMT"):
        hook.answers += [(503, {"retry-after": value})]
        with pytest.raises(NotSentError) as error:
            asyncio.run(webhooks.post(hook.url, b"{}", {}, LOOPBACK))
        assert 0 <= error.value.after_s <= 3600


def test_private_address_gets_no_connection(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    port = hook.url.split(":")[2].partition("/")[0]
    for host in ("127.0.0.1", "[::1]", "localhost"):
        said = problem(Config(), "slack:HOOK", HOOK=f"https://{host}:{port}/s3cr3t")
        assert "private address" in said
        assert "s3cr3t" not in said
    resolves_to = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", int(port)))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolves_to)
    said = problem(Config(), "slack:HOOK", HOOK=f"https://innocent.example.org:{port}/s3cr3t")
    assert "private address" in said
    assert hook.got == []


def test_errors_never_have_the_address(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "HTTP_S", 0.5)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        refused = f"http://user:s3cr3t@127.0.0.1:{nobody.getsockname()[1]}/s3cr3t?k=s3cr3t"
        saids = [problem(Config(private=LOOPBACK), "slack:HOOK", HOOK=refused)]
    assert saids == ["ClientConnectorError: Connection refused"]
    listed = PrivateHosts(names=frozenset({"no-such-host.invalid", "a..b"}))
    saids += [problem(Config(private=listed), "slack:HOOK", HOOK="http://no-such-host.invalid/s3cr3t")]
    saids += [problem(Config(private=LOOPBACK), "slack:HOOK", HOOK="s3cr3t"), problem(Config(), "slack:HOOK")]
    hook.goes_on.clear()
    saids += [problem(Config(private=LOOPBACK), "slack:HOOK", HOOK=hook.url)]
    assert saids[-1] == "no answer within 0.5 s"
    assert not any("s3cr3t" in said for said in saids)


def test_proxy_of_the_environment_is_not_used(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    with webhook() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        asyncio.run(webhooks.post(hook.url, b"{}", {}, LOOPBACK))
        assert (len(hook.got), proxy.got) == (1, [])


# -- e-mail ------------------------------------------------------------------------------------------------------------


def by(box: Mailbox, more: str = "") -> Config:
    return Config(smtp=NOTIFY_SMTP.parse(f"127.0.0.1:{box.port},from=iris@example.org,tls=off{more}"))


def test_mail_arrives_whole(box: Mailbox) -> None:
    send(by(box), [some_news(place="email:ann@example.org", lines=2, name="tr\r\nBcc: x@evil.org")])
    (mail,) = box.mails
    assert (mail["To"], mail["From"]) == ("ann@example.org", "iris@example.org")
    assert [line for line in box.commands if line.startswith("rcpt")] == ["rcpt TO:<ann@example.org>"]
    body = mail.get_payload(decode=True)
    assert isinstance(body, bytes)
    assert b"it has failed" in body
    assert body.count(b"last\r\n") == 2


def test_mail_to_other_domain_is_not_sent(box: Mailbox) -> None:
    assert "does not allow" in problem(by(box), "email:ann@evil.org")
    assert "no server" in problem(Config(), "email:ann@example.org")
    assert box.commands == []


def test_refused_recipient_is_given_up_and_greylisted_one_is_not(box: Mailbox) -> None:
    news = [some_news(place="email:ann@example.org")]
    for answer, again in (("550 no such user", False), ("450 try later", True)):
        box.refuses = answer
        with pytest.raises(NotSentError, match=f"refuses the recipient: {answer[:3]}") as error:
            send(by(box), news)
        assert error.value.again is again


def test_password_is_not_sent_to_server_without_tls(box: Mailbox) -> None:
    config = Config(smtp=NOTIFY_SMTP.parse(f"127.0.0.1:{box.port},from=iris@example.org,login=SMTP"))
    said = problem(config, "email:ann@example.org", SMTP="ann:s3cr3t")
    assert "STARTTLS" in said
    assert not any("AUTH" in line or "s3cr3t" in line for line in box.commands)


def test_server_that_drips_is_left_in_time(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SMTP_S", 1.0)
    box.drips = True
    began = time.monotonic()
    assert "has not taken it within" in problem(by(box), "email:ann@example.org")
    assert time.monotonic() - began < 30


def test_mail_that_was_given_up_is_not_sent_later(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, so a server that answers late must not get what has waited for a thread meanwhile."""
    monkeypatch.setattr(delivery, "SMTP_S", 0.5)
    connect, goes_on = smtplib.SMTP, threading.Event()

    def late(*words: Any, **options: Any) -> smtplib.SMTP:
        goes_on.wait(60)
        return connect(*words, **options)

    monkeypatch.setattr(smtplib, "SMTP", late)

    async def story() -> None:
        sends = Delivery(lambda *_: "", None)  # type: ignore[arg-type]
        sends.config = by(box)
        for number in range(6):
            with pytest.raises(NotSentError, match="has not taken it"):
                await sends.send([some_news(f"job-{number}", place="email:ann@example.org")], 0)
        goes_on.set()
        await asyncio.to_thread(sends._for_smtp.shutdown)

    asyncio.run(story())
    assert box.mails == []


# -- commands ----------------------------------------------------------------------------------------------------------


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "page"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return [str(path), "$(touch x)", "a b; c"]


def test_command_gets_json_and_its_arguments_without_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "s3cr3t")
    words = script(tmp_path, f'cat > {tmp_path}/in; printf "%s|" "$@" > {tmp_path}/args; env > {tmp_path}/env')
    send(Config(commands={"page": words}), [some_news(place="command:page")])
    assert json.loads((tmp_path / "in").read_text())["notifications"][0]["job_id"] == "train-1"
    assert (tmp_path / "args").read_text() == "$(touch x)|a b; c|"
    assert "s3cr3t" not in (tmp_path / "env").read_text()


def test_command_that_fails_or_is_missing_is_tried_again(tmp_path: Path) -> None:
    assert problem(Config(commands={"page": script(tmp_path, "exit 3")}), "command:page").endswith("code 3")
    assert "No such file" in problem(Config(commands={"page": ["/no/such"]}), "command:page")
    assert "has no command page" in problem(Config(), "command:page")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("group", ["its own group", "another group"])
@pytest.mark.parametrize("ends", ["in time", "too late"])
def test_command_ends_with_all_that_it_has_started_in_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, ends: str
) -> None:
    """The program `timeout`, or a shell with job control, begins a process group and stays in the session."""
    monkeypatch.setattr(channels, "COMMAND_S", 1.0 if ends == "too late" else 30.0)
    sleep, wait = "exec sleep 600", "; wait" if ends == "too late" else ""
    if group == "another group":
        sleep = "exec timeout 600 sh -c 'echo > begun; sleep 600'"
    words = script(
        tmp_path, f"cd {tmp_path}; ({sleep}) & echo $! > child; until [ -e begun ]; do sleep 0.01; done{wait}"
    )
    if group == "its own group":
        (tmp_path / "begun").touch()
    config = Config(commands={"page": words})
    if ends == "too late":
        assert "has not ended within 1 s" in problem(config, "command:page")
    else:
        send(config, [some_news(place="command:page")])
    child = int((tmp_path / "child").read_text())
    alive = runs(child)
    if alive:
        os.kill(child, 9)
    assert not alive


def test_no_group_is_killed_once_the_number_of_its_leader_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives the number to another process as soon as the leader was reaped and the group is empty."""
    kill, leaders = os.killpg, list[str]()

    def noted(group: int, number: int) -> None:
        leaders.append(Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[0])
        kill(group, number)

    monkeypatch.setattr(os, "killpg", noted)
    send(Config(commands={"page": script(tmp_path, "exit 0")}), [some_news(place="command:page")])
    assert leaders == ["Z"], "it has ended, and nobody has reaped it"


def test_commands_leave_no_descriptor_and_no_zombie(tmp_path: Path) -> None:
    config, before = Config(commands={"page": script(tmp_path, "exit 0")}), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        send(config, [some_news(place="command:page")])
        problem(Config(commands={"page": ["/no/such"]}), "command:page")
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)


def test_command_that_reads_nothing_gets_large_input(tmp_path: Path) -> None:
    news = [some_news(f"job-{n}", place="command:page", text="x" * 500) for n in range(1000)]
    send(Config(commands={"page": script(tmp_path, "exit 0")}), news)
