"""Destinations of notifications, as people write them: ``slack:TEAM_HOOK,on=failed+stalled,lines=20``.

A destination never contains the address of a webhook, which is a secret: it names an entry of the secret store.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import nearest, shown
from iris_ray.model.durations import parse_duration
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.options import PriorityBand
from iris_ray.model.secret import NAME_FORM, is_secret_name


class Channel(StrEnum):
    """How a notification is sent."""

    HTTP = "http"
    SLACK = "slack"
    GOOGLE_CHAT = "googlechat"
    EMAIL = "email"
    COMMAND = "command"

    @property
    def has_webhook(self) -> bool:
        """Whether the destination is a URL in the secret store."""
        return self in (Channel.HTTP, Channel.SLACK, Channel.GOOGLE_CHAT)

    @property
    def is_for_programs(self) -> bool:
        """Whether a program reads it, which gets every notification whole."""
        return self in (Channel.HTTP, Channel.COMMAND)


class What(StrEnum):
    """What a notification is about.

    STARTED: the first task of the job runs.
    SUCCEEDED, FAILED: the job has ended; FAILED for every end other than success, also if it was cancelled.
    LOST: the job has lost hosts, by a preemption, a fault or an eviction, and goes on.
    STALLED: no task made progress for too long, and the gang starts again.
    WAITING: the job has waited for hosts for long.
    BUDGET: the job has used the chip-hours of ``chip-hours=``.
    """

    STARTED = "started"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    STALLED = "stalled"
    WAITING = "waiting"
    BUDGET = "budget"


ENDED: Final = "ended"
"""Stands for both ends in ``on=``."""
DEFAULT_ON: Final = frozenset(What) - {What.STARTED, What.LOST}
DEFAULT_WAIT_S: Final = 3600.0
MOST_LINES: Final = 50
MOST_CHIP_HOURS: Final = 1e9

EMAIL: Final = re.compile(r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.)+[A-Za-z]{2,63}")
KEY_PREFIX: Final = "whsec_"
"""A signing key in base64 begins with it; see `iris_ray.notify.messages.signed_headers`."""
COMMAND_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
FORM: Final = "CHANNEL:NAME[,on=EVENT+EVENT][,lines=N][,wait=DURATION][,chip-hours=N][,key=NAME][,band=BAND+BAND]"
_CHANNELS: Final = ", ".join(Channel)
_EVENTS: Final = ", ".join((*What, ENDED))


@dataclass(frozen=True, slots=True)
class Destination:
    """A destination, and what is sent there.

    Attributes:
        channel, name: how and where: the name of a secret, an address, or the name of a command.
        on: the events that are sent.
        lines: the number of last lines of output that a notification of an end or a stall has.
        wait_s: seconds of waiting after which WAITING is sent.
        chip_hours: the chip-hours at which BUDGET is sent; None: never.
        key: the name of the secret with the key that signs HTTP requests; empty for the other channels.
        bands: only jobs in these priority bands.
    """

    channel: Channel
    name: str
    on: frozenset[What] = DEFAULT_ON
    lines: int = 0
    wait_s: float = DEFAULT_WAIT_S
    chip_hours: float | None = None
    key: str = ""
    bands: frozenset[PriorityBand] = frozenset(PriorityBand)

    @property
    def place(self) -> str:
        """The destination without its options, which identifies it: ``slack:TEAM_HOOK``."""
        return f"{self.channel}:{self.name}"

    @property
    def secret_names(self) -> tuple[str, ...]:
        """The names of the secrets that it needs."""
        return tuple(filter(None, (self.name if self.channel.has_webhook else "", self.key)))


@lru_cache(maxsize=10_000)
def parse_destination(text: str) -> Destination:
    """Parse a destination.

    Raises:
        InvalidRequestError: it is invalid; the message says how one is written, and shows no address of a webhook.
    """
    place, *options = text.strip().split(",")
    channel, colon, name = place.partition(":")
    if "://" in text or channel.lower() == "https":
        raise InvalidRequestError(
            "a destination of notifications is the address of a webhook; such an address is a secret, so store it:"
            " iris-ray cluster secrets set NAME, and give slack:NAME, googlechat:NAME or http:NAME"
        )
    if not colon or channel not in set(Channel):
        lacks = f"there is no channel {shown(channel)}" if colon else "it has no channel"
        near = nearest(channel, list(Channel)) if colon else []
        advice = f"did you mean {near[0]}?" if near else f"give {FORM}, where CHANNEL is one of {_CHANNELS}"
        raise _invalid(text, f"{lacks}; {advice}")
    kind = Channel(channel)
    _require_name(text, kind, name)
    found: dict[str, Any] = {}
    for option in options:
        word, equals, value = option.strip().partition("=")
        field = word.replace("-", "_")
        if not equals or word not in _OPTIONS or field in found:
            again = "twice" if field in found else f"but the options are {', '.join(_OPTIONS)}"
            raise _invalid(text, f"it has {shown(option)}, {again}; give {FORM}")
        into, parse = _OPTIONS[word]
        try:
            found[into] = parse(value)
        except ValueError as error:
            if word == "key":  # perhaps it is the key itself
                raise _invalid(f"{place},key=…", f"key is not the name of a secret; {error}") from None
            raise _invalid(text, f"{word} is {shown(value)}; {error}") from None
    if kind is Channel.HTTP and "key" not in found:
        raise _invalid(
            text,
            "its requests have to be signed; store a key, iris-ray cluster secrets set NAME, and add key=NAME",
        )
    if kind is not Channel.HTTP and "key" in found:
        raise _invalid(text, "only http has a key; leave it out")
    return Destination(kind, name, **found)


def parse_destinations(text: str) -> tuple[Destination, ...]:
    """Parse destinations that are separated by white space or semicolons. Raise like `parse_destination`."""
    return tuple(map(parse_destination, text.replace(";", " ").split()))


def destinations_of(spec: JobSpec) -> tuple[Destination, ...]:
    """Parse the destinations of a job.

    Raises:
        InvalidRequestError: one is invalid or occurs twice, or has ``chip-hours`` although the job is not one gang.
    """
    found = tuple(map(parse_destination, spec.notify))
    for place, count in Counter(one.place for one in found).items():
        if count > 1:
            raise InvalidRequestError(f"notify has {place} twice; give it once, with all its options")
    for one in found:
        if one.chip_hours is not None and not spec.is_one_gang:
            raise InvalidRequestError(
                f"notify has chip-hours for {one.place}, which are only measured for jobs that are one gang on slices;"
                " leave them out"
            )
    return found


def _require_name(text: str, channel: Channel, name: str) -> None:
    if channel is Channel.EMAIL:
        wrong = "" if EMAIL.fullmatch(name) else "give an address, as in email:ann@example.org"
    elif channel is Channel.COMMAND:
        wrong = "" if COMMAND_NAME.fullmatch(name) else "give the name of a command of the setting notify_commands"
    elif not is_secret_name(name):  # perhaps it is the address itself
        why = f"give the name of the secret with the address: {NAME_FORM}"
        raise _invalid(f"{channel}:…", f"{channel}: is not followed by the name of a secret; {why}")
    else:
        wrong = ""
    if wrong:
        raise _invalid(text, wrong)


def _invalid(text: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{shown(text[:80])} is not a valid destination of notifications: {why}")


def _on(text: str) -> frozenset[What]:
    found: set[What] = set()
    for word in text.split("+"):
        if word == ENDED:
            found |= {What.SUCCEEDED, What.FAILED}
        elif word in set(What):
            found.add(What(word))
        else:
            raise ValueError(f"give one or more of {_EVENTS}, joined by +")
    return frozenset(found)


def _lines(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= MOST_LINES):
        raise ValueError(f"give a number of lines, {MOST_LINES} at most")
    return int(text)


def _wait(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 60:
        raise ValueError("give a duration of a minute or more")
    return seconds


def _chip_hours(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,10}(\.[0-9]{1,3})?", text) or not 0 < float(text) <= MOST_CHIP_HOURS:
        raise ValueError("give a number of chip-hours, more than 0")
    return float(text)


def _key(text: str) -> str:
    if not is_secret_name(text) or text.startswith(KEY_PREFIX):
        raise ValueError(f"give the name of a secret: {NAME_FORM}")
    return text


def _bands(text: str) -> frozenset[PriorityBand]:
    words = {band.name.lower(): band for band in PriorityBand}
    if not set(text.split("+")) <= words.keys():
        raise ValueError(f"give one or more of {', '.join(words)}, joined by +")
    return frozenset(words[word] for word in text.split("+"))


_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "on": ("on", _on),
    "lines": ("lines", _lines),
    "wait": ("wait_s", _wait),
    "chip-hours": ("chip_hours", _chip_hours),
    "key": ("key", _key),
    "band": ("bands", _bands),
}
"""The options of a destination: the field of `Destination` that each sets, and the function that reads its value."""
