"""Secrets: values for tasks that never appear in records, logs or messages."""

import re
from dataclasses import dataclass, field

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown

MOST_CHARACTERS = 16_384
"""The largest length of a secret, which Ray still sends inline with a call."""
MOST_STORED_NAMES = 100
"""The largest number of stored secrets of a job."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
NAME_FORM = "letters, digits, '_', '.' and '-', 100 at most, that begins with a letter or '_'"


def is_secret_name(value: object) -> bool:
    """Whether a value is a valid name of a stored secret, which is also its file name."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def require_secret_name(name: object) -> str:
    """Return a valid name of a stored secret.

    Raises:
        InvalidRequestError: the name is invalid. The message omits a text that may be a secret value.
    """
    if isinstance(name, str) and is_secret_name(name):
        return name
    what = shown(name) if len(str(name)) <= 30 else f"a text of {len(str(name)):,} characters"
    raise InvalidRequestError(f"{what} is not a valid name for a secret; give a name of {NAME_FORM}")


@dataclass(frozen=True, slots=True)
class SecretValue:
    """A value that only tasks can see.

    Args:
        value: the value; empty if it is in the cluster's secret store.
        as_file: whether the task's variable holds the path of a file with the value instead of the value. The file is
            in memory, only the task's account can read it, and it is deleted with the task's process.
        stored: its name in the cluster's secret store, from which each attempt gets the value; empty otherwise.

    Raises:
        InvalidRequestError: the value is empty, too long, or invalid for a variable. The message never includes it.
    """

    value: str = field(repr=False)
    as_file: bool = False
    stored: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) or not isinstance(self.as_file, bool) or not isinstance(self.stored, str):
            raise InvalidRequestError("a secret needs a str, and a bool for as_file; give Secret(value, as_file=True)")
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
    """Return a stored secret with its value, without trailing newlines unless it becomes a file."""
    return SecretValue(text if secret.as_file else text.rstrip("\r\n"), secret.as_file)
