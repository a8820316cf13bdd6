"""Stored secrets: their metadata, access rules and validation, and the format of their files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from iris_ray.errors import InvalidRequestError, NotPermittedError
from iris_ray.model.checks import is_job_id, is_user, shown
from iris_ray.model.secret import MOST_CHARACTERS, SecretValue

MOST_BYTES = 4 * MOST_CHARACTERS
"""The largest size of a secret in UTF-8, in bytes."""
MOST_NAMED = 100
"""The largest number of users, and of teams, to which a secret can be restricted."""


def text_of(value: bytes) -> str:
    """Decode the value of a secret that was read from a file or from stdin.

    Raises:
        InvalidRequestError: the value is too long or invalid. The message includes none of it.
    """
    if len(value) > MOST_BYTES:
        raise InvalidRequestError(f"a secret has {MOST_CHARACTERS:,} characters at most, and this is longer")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(
            "the value is not text in UTF-8, and a variable can't hold anything else; encode it, for example with"
            " base64, and decode it in the task"
        ) from None
    SecretValue(text, as_file=True)
    SecretValue(text.rstrip("\r\n"))  # the form for a variable
    return text


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A secret in the cluster's store, without its value.

    Attributes:
        name: the name by which jobs request it.
        set_by: the user who set it last.
        set_at: the time of that, in seconds since the epoch.
        revision: the number of values that it has had.
        users, teams: the users and teams whose jobs may use it; all jobs if both are empty.
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
        """Check that a job of this user and team may use the secret.

        Raises:
            NotPermittedError: the secret is restricted to other users or teams.
        """
        if (
            not (self.users or self.teams)
            or user in self.users
            or any(f"{team}/".startswith(f"{one}/") for one in self.teams)
        ):
            return
        whose = [f"users {', '.join(self.users)}"] if self.users else []
        whose += [f"teams {', '.join(self.teams)}"] if self.teams else []
        raise NotPermittedError(
            f"the secret {self.name} is for jobs of {' and '.join(whose)} only, and not for {user}"
            f"{f' of team {team}' if team else ''}; ask {self.set_by} (its owner) or another operator"
        )


def require_audience(users: Sequence[str], teams: Sequence[str]) -> None:
    """Check the users and teams to which a secret is to be restricted.

    Raises:
        InvalidRequestError: a name is invalid, or there are too many.
    """
    for what, names, holds in (("user", users, is_user), ("team", teams, is_job_id)):
        if len(names) > MOST_NAMED:
            raise InvalidRequestError(
                f"a secret can be for {MOST_NAMED:,} {what}s at most, and these are {len(names):,}"
            )
        for name in names:
            if not holds(name):
                raise InvalidRequestError(
                    f"{shown(name)} is not a valid name for a {what}, so no job could use the secret"
                )


def to_file(secret: StoredSecret, value: bytes) -> bytes:
    """Return the content of a secret's file: a line of JSON with its metadata, followed by the raw value."""
    line = asdict(secret)
    del line["problem"]
    return json.dumps({"format": 1, **line}).encode() + b"\n" + value


def of_file(name: str, data: bytes) -> tuple[StoredSecret, bytes]:
    """Parse the content of a secret's file into the secret and its value.

    Raises:
        ValueError: the file is damaged. The message includes none of its content.
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
