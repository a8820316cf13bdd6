"""The form of notifications in each channel, with names that users chose badly or in bad faith."""

import base64
import json
from typing import Any

from iris_ray.notify.core import News, news_id
from iris_ray.notify.destination import Channel, What
from iris_ray.notify.messages import (
    MOST_TEXT,
    chat_body,
    clean_lines,
    email_message,
    json_body,
    signed_headers,
)
from tests.support.receivers import Got


def some_news(job_id: str = "train-1", what: What = What.FAILED, place: str = "slack:HOOK", **more: Any) -> News:
    values: dict[str, Any] = {
        "name": "train",
        "user": "ann",
        "team": "",
        "state": "failed",
        "at": 1.0,
        "text": "it has failed",
    }
    return News(news_id(job_id, what, 1, place), what, 1, job_id, **(values | {"place": place} | more))  # fmt: skip


def test_program_gets_all_fields_and_lines() -> None:
    news = [some_news(), some_news("b", What.LOST, times=3)]
    found = json.loads(json_body(news, {news[0].id: ["last"]}, 5.0))
    assert (found["version"], found["sent_at"], len(found["id"])) == (1, 5.0, 32)
    first, second = found["notifications"]
    assert (first["id"], first["event"], first["lines"]) == (news[0].id, "failed", ["last"])
    assert (second["times"], second["lines"], second["job_id"]) == (3, [], "b")
    assert not {"place", "key", "by_rule"} & first.keys()


def test_signature_is_that_of_standard_webhooks() -> None:
    # the example of https://github.com/standard-webhooks/standard-webhooks (its reference libraries' test)
    key, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", body, key, 1614265330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert Got("", headers, body).is_signed_with(base64.b64decode(key.removeprefix("whsec_")))
    assert Got("", signed_headers("x", body, "plain key", 1.0), body).is_signed_with(b"plain key")
    assert Got("", signed_headers("x", body, "whsec_not base64", 1.0), body).is_signed_with(b"whsec_not base64")


def test_chat_can_not_be_made_to_mention_or_to_link() -> None:
    bad = some_news(name="<!channel> <https://evil|you won> & <users/all>", text="<@U1>")
    slack = json.loads(chat_body(Channel.SLACK, [bad], {bad.id: ["```<!here>"]}, 0))["text"]
    assert "<" not in slack
    assert ">" not in slack
    assert slack.count("```") == 2
    chat = json.loads(chat_body(Channel.GOOGLE_CHAT, [bad], {}, 0))["text"]
    assert "<" not in chat
    long = some_news(text="x" * 500)
    body = chat_body(Channel.SLACK, [long], {long.id: ["y" * 500 + "end"] * 50}, 0)
    text = json.loads(body)["text"]
    assert len(text) <= MOST_TEXT + 20
    assert text.rstrip("`\n").endswith("end")


def test_mail_header_can_not_be_injected() -> None:
    bad = some_news(name="x\r\nBcc: all@example.org\r\n\r\nbody\u2028y", text="a\nb")
    mail = email_message([bad], {}, 0, "iris@example.org", "ann@example.org")
    assert mail["Bcc"] is None
    assert mail["Subject"] == "Job x Bcc: all@example.org body y failed"
    assert mail["Message-ID"] == f"<{bad.id}.iris-ray@example.org>"
    assert b"\r\nBcc" not in mail.as_bytes()
    long = email_message([some_news(name="ü" * 5000)], {}, 0, "iris@example.org", "ann@example.org")
    assert max(map(len, long.as_bytes().splitlines())) < 1000


def test_digest_counts_and_names_some() -> None:
    news = [some_news(f"job-{n}", What.SUCCEEDED if n % 10 else What.FAILED) for n in range(10_000)]
    text = json.loads(chat_body(Channel.SLACK, news, {}, 7))["text"]
    first, *rows = text.splitlines()
    assert first == "10,000 events of jobs: 1,000 failed, 9,000 succeeded"
    assert (rows[0], rows[20], len(rows)) == (
        "job-0 (ann): failed", "and 9,980 others; iris-ray job notifications ls lists all", 22,
    )  # fmt: skip
    assert rows[21] == "7 earlier events are left out, as too many waited"


def test_last_lines_are_bounded_and_control_no_terminal() -> None:
    assert clean_lines("a\nb\n\x1b]0;x\x07c\n" + "d" * 9999, 3)[:2] == ["b", "\\x1b]0;x\\x07c"]
    assert [len(line) for line in clean_lines("d" * 9999, 3)] == [500]
    assert clean_lines("a\nb", 0) == []


def test_last_lines_have_no_colours_and_no_secret_in_colours() -> None:
    """Chats, e-mails and JSON show the sequences. Highlighters give numbers a colour, also those within a key."""
    assert clean_lines("\x1b[1;31mERROR\x1b[0m: no", 1) == ["ERROR: no"]
    assert clean_lines("key \x1b[1mhf_\x1b[1;36m12345678\x1b[0m!", 1, ["hf_12345678"]) == ["key ***!"]
