"""Values for tasks that no record, log or message shows, and the files in which the cluster's store keeps some."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from iris_ray.errors import InvalidRequestError, NotPermittedError
from iris_ray.model.checks import is_job_id, is_user, shown

MOST_CHARACTERS = 16_384
"""The limit for the characters of a secret: Ray sends so much with a call, and stores more."""
MOST_BYTES = 4 * MOST_CHARACTERS
"""The limit for the bytes of a secret in UTF-8."""
MOST_STORED_NAMES = 100
"""The limit for the stored secrets of a job."""
MOST_NAMED = 100
"""The limit for the users, and for the teams, to which a secret is restricted."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
NAME_FORM = "letters, digits, '_', '.' and '-', 100 at most, that begins with a letter or '_'"


def is_secret_name(value: object) -> bool:
    """Whether the store can have a secret of that name. It is also the name of its file."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def require_secret_name(name: object) -> str:
    """Return the name of a secret of the store.

    Raises:
        InvalidRequestError: there can be none of that name. A text that may be a value is not shown.
    """
    if isinstance(name, str) and is_secret_name(name):
        return name
    what = shown(name) if len(str(name)) <= 30 else f"a text of {len(str(name)):,} characters"
    raise InvalidRequestError(f"{what} is no name of a secret; give a name of {NAME_FORM}")


def text_of(value: bytes) -> str:
    """Return the text of a secret from a file or from stdin.

    Raises:
        InvalidRequestError: tasks can't get it. No message has any of it.
    """
    if len(value) > MOST_BYTES:
        raise InvalidRequestError(f"a secret has {MOST_CHARACTERS:,} characters at most, and this is longer")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(
            "the value is no text in UTF-8, and a variable can't hold anything else; encode it, for example with"
            " base64, and decode it in the task"
        ) from None
    SecretValue(text, as_file=True)
    SecretValue(text.rstrip("\r\n"))  # as a variable has it
    return text


@dataclass(frozen=True, slots=True)
class SecretValue:
    """A value that tasks get, and nobody else sees.

    Args:
        value: the value; empty if it is in the cluster's store.
        as_file: whether the task's variable has the path of a file with the value, and not the value. The file is in
            memory, only its own account can read it, and it goes with the task's process.
        stored: its name in the cluster's store, where each attempt of the job gets the value; empty if it is given.

    Raises:
        InvalidRequestError: it is empty, too long, or can't be the value of a variable. No message has the value.
    """

    value: str = field(repr=False)
    as_file: bool = False
    stored: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) or not isinstance(self.as_file, bool) or not isinstance(self.stored, str):
            raise InvalidRequestError("a secret is not made of a str and a bool; give Secret(value, as_file=True)")
        if self.stored:
            require_secret_name(self.stored)
            if self.value:
                raise InvalidRequestError(f"the secret {self.stored} has a value and is in the store; give one of them")
            return
        if not self.value or "\0" in self.value or len(self.value) > MOST_CHARACTERS:
            raise InvalidRequestError(
                f"a secret has {len(self.value):,} characters; it needs 1 to {MOST_CHARACTERS:,}, and no NUL among them"
            )


def with_value(secret: SecretValue, text: str) -> SecretValue:
    """Return a secret of the store with its value: without the ends of its last line, unless it is to be a file."""
    return SecretValue(text if secret.as_file else text.rstrip("\r\n"), secret.as_file)


# -- the store ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A secret of the cluster's store, without its value.

    Attributes:
        name: by which jobs ask for it.
        set_by: the user who has set it last.
        set_at: when, in seconds since the epoch.
        revision: 1, and one more with each new value.
        users, teams: whose jobs may use it; both empty: all jobs.
        problem: why it can't be read; empty if it can.
    """

    name: str
    set_by: str
    set_at: float
    revision: int = 1
    users: tuple[str, ...] = ()
    teams: tuple[str, ...] = ()
    problem: str = ""

    def require_for(self, user: str, team: str) -> None:
        """Refuse a job of that user and team if the secret is for others.

        Raises:
            NotPermittedError: it is.
        """
        if not (self.users or self.teams) or user in self.users or any(_within(team, one) for one in self.teams):
            return
        whose = [f"users {', '.join(self.users)}"] if self.users else []
        whose += [f"teams {', '.join(self.teams)}"] if self.teams else []
        raise NotPermittedError(
            f"the secret {self.name} is for jobs of {' and '.join(whose)} only, and not for {user}"
            f"{f' of team {team}' if team else ''}; ask {self.set_by}, who has set it, or another operator"
        )

    def next(self, before: "StoredSecret | None") -> "StoredSecret":
        """Return this secret with the revision after that of an earlier one of its name."""
        return self if before is None or before.problem else replace(self, revision=before.revision + 1)


def _within(team: str, whole: str) -> bool:
    return team == whole or team.startswith(f"{whole}/")


def require_audience(users: Sequence[str], teams: Sequence[str]) -> None:
    """Refuse texts that are no names of users and teams.

    Raises:
        InvalidRequestError: one is none, or they are too many.
    """
    for what, names, holds in (("user", users, is_user), ("team", teams, is_job_id)):
        if len(names) > MOST_NAMED:
            raise InvalidRequestError(
                f"a secret can be for {MOST_NAMED:,} {what}s at most, and these are {len(names):,}"
            )
        for name in names:
            if not holds(name):
                raise InvalidRequestError(f"{shown(name)} is no name of a {what}, so no job could use the secret")


def to_file(secret: StoredSecret, value: bytes) -> bytes:
    """Return the content of a secret's file: what is known of it, as a line of JSON, and then the value as it is."""
    line = asdict(secret)
    del line["problem"]
    return json.dumps({"format": 1, **line}).encode() + b"\n" + value


def of_file(name: str, data: bytes) -> tuple[StoredSecret, bytes]:
    """Return a secret and its value from the content of its file.

    Raises:
        ValueError: it is no such file. The message has nothing of it.
    """
    line, newline, value = data.partition(b"\n")
    try:
        known: dict[str, Any] = json.loads(line)
        if known.pop("format") != 1 or not newline or not value or known["name"] != name:
            raise ValueError
        known |= {"users": tuple(known["users"]), "teams": tuple(known["teams"])}
        return StoredSecret(**known), value
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("its file is damaged") from None
