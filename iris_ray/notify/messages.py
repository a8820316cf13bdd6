"""The form of notifications in each channel. Pure.

Names and texts come from users. No line end reaches a header, and no markup a chat: a job's name can't mention
everybody, and can't show a link under another name.
"""

import base64
import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from email.message import EmailMessage
from email.policy import SMTP
from typing import Any, Final

from iris_ray.masking import without_secret
from iris_ray.notify.core import News, batch_id
from iris_ray.notify.destination import KEY_PREFIX, Channel, What
from iris_ray.terminal import one_line, printable, without_colours

VERSION: Final = 1
DIGEST_JOBS: Final = 20
"""A digest names this number of news, and counts the others."""
MOST_LINE: Final = 500
MOST_TEXT: Final = 3500
"""The limit for a message in a chat; Slack and Google Chat cut or refuse longer ones."""
_WORDS: Final = {
    What.STARTED: "started",
    What.SUCCEEDED: "succeeded",
    What.FAILED: "failed",
    What.LOST: "lost hosts",
    What.STALLED: "stalled",
    What.WAITING: "waits for long",
    What.BUDGET: "used its budget",
}
_ORDER: Final = (
    What.FAILED, What.STALLED, What.BUDGET, What.LOST, What.WAITING, What.SUCCEEDED, What.STARTED,
)  # fmt: skip

Lines = Mapping[str, Sequence[str]]
"""Last lines of output, by the id of the news to which they belong."""


# -- for programs ------------------------------------------------------------------------------------------------------


def json_body(news: Sequence[News], lines: Lines, sent_at: float) -> bytes:
    """Return the JSON for a program: all news whole, as docs/notifications.md describes them."""
    return json.dumps(
        {
            "version": VERSION,
            "id": batch_id(news),
            "sent_at": sent_at,
            "notifications": [_as_json(one, lines.get(one.id, ())) for one in news],
        }
    ).encode()


def _as_json(news: News, lines: Sequence[str]) -> dict[str, Any]:
    found = {"id": news.id, "event": news.what.value, "number": news.number, "job_id": news.job_id, "name": news.name}
    about = {"user": news.user, "team": news.team, "state": news.state, "at": news.at, "text": news.text}
    return {**found, **about, "times": news.times, "lines": list(lines)}


def signed_headers(message_id: str, body: bytes, key: str, at: float) -> dict[str, str]:
    """Return the headers of a signed request, in the form of https://www.standardwebhooks.com.

    Args:
        message_id: the same for each try; a receiver deduplicates by it.
        body: what is signed, with the id and the time.
        key: the signing key: ``whsec_`` and base64, or any text.
        at: seconds since the epoch; receivers refuse old ones.
    """
    signed = f"{message_id}.{int(at)}.".encode() + body
    digest = hmac.new(_key_bytes(key), signed, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(at)),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def _key_bytes(key: str) -> bytes:
    if key.startswith(KEY_PREFIX):
        try:
            return base64.b64decode(key.removeprefix(KEY_PREFIX), validate=True)
        except ValueError:
            pass  # a key that only begins like one of theirs
    return key.encode()


# -- for people --------------------------------------------------------------------------------------------------------


def chat_body(channel: Channel, news: Sequence[News], lines: Lines, more: int) -> bytes:
    """Return the JSON for a chat.

    Args:
        channel: Slack or Google Chat.
        news: at least one; several become a digest.
        lines: last lines of output.
        more: the number of news that were dropped because too many waited.
    """
    text = f"{title(news)}\n" + "\n".join(_rows(news, more))
    escaped = _escaped(channel, text)
    shown = [line for one in news[:1] for line in lines.get(one.id, ())] if len(news) == 1 else []
    room = MOST_TEXT - len(escaped)
    block = _escaped(channel, _last("\n".join(shown), max(room, 0)).replace("```", "'''"))
    return json.dumps({"text": escaped[:MOST_TEXT] + (f"\n```\n{block}\n```" if block else "")}).encode()


def email_message(news: Sequence[News], lines: Lines, more: int, sender: str, to: str) -> EmailMessage:
    """Return the e-mail; arguments as of `chat_body`. Its Message-ID is the same for each try."""
    message = EmailMessage(policy=SMTP)
    message["Subject"] = one_line(title(news))[:200]
    message["From"], message["To"] = sender, to
    message["Message-ID"] = f"<{batch_id(news)}.iris-ray@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    shown = [line for one in news[:1] for line in lines.get(one.id, ())] if len(news) == 1 else []
    block = ["", "The last lines of its output:", "", *shown] if shown else []
    message.set_content("\n".join([*_rows(news, more), *block, ""]))
    return message


def title(news: Sequence[News]) -> str:
    """Return a message's first line."""
    if len(news) == 1:
        (one,) = news
        again = f" ({one.times} times)" if one.times > 1 else ""
        return f"Job {one.name} {_WORDS[one.what]}{again}"
    counts = Counter(one.what for one in news)
    return f"{len(news):,} events of jobs: " + ", ".join(f"{counts[w]:,} {_WORDS[w]}" for w in _ORDER if counts[w])


def _rows(news: Sequence[News], more: int) -> list[str]:
    if len(news) == 1:
        (one,) = news
        whose = f"{one.user}{f' of team {one.team}' if one.team else ''}" or "nobody"
        rows = [f"{one.job_id}, of {whose}: {one.text}"]
    else:
        ordered = sorted(news, key=lambda one: (_ORDER.index(one.what), one.at))
        rows = [f"{one.job_id} ({one.user}): {_WORDS[one.what]}" for one in ordered[:DIGEST_JOBS]]
        if (others := len(news) - DIGEST_JOBS) > 0:
            rows.append(f"and {others:,} others; iris-ray job notifications ls lists all")
    if more:
        rows.append(f"{more:,} earlier events are left out, as too many waited")
    return rows


def clean_lines(text: str, most: int, secrets: Iterable[str] = ()) -> list[str]:
    """Return the last lines of output, without secrets and what controls a terminal, each at most `MOST_LINE` long.

    Colours go as well, and first: chats, e-mails and JSON would show their sequences, and one may be within a secret.
    """
    if not most:
        return []
    text = without_colours(text)
    for secret in secrets:
        text = without_secret(text, secret)
    return [printable(line)[:MOST_LINE] for line in text.splitlines()[-most:]]


def _last(text: str, most: int) -> str:
    return text if len(text) <= most else text[len(text) - most :]


def _escaped(channel: Channel, text: str) -> str:
    if channel is Channel.SLACK:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("<", "‹").replace(">", "›")  # Google Chat has no way to escape them
