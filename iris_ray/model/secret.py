"""A value for tasks that no record, log or message shows: an API key, or the text of a file with credentials."""

from dataclasses import dataclass, field

from iris_ray.errors import InvalidRequestError

MOST_CHARACTERS = 16_384
"""Limit for each secret: Ray sends so much with a call, and stores more."""


@dataclass(frozen=True, slots=True)
class SecretValue:
    """A value that tasks get, and nobody else sees.

    Args:
        value: the value.
        as_file: whether the task's variable has the path of a file with the value, and not the value. The file is in
            memory, only its own account can read it, and it goes with the task's process.

    Raises:
        InvalidRequestError: it is empty, too long, or can't be the value of a variable. No message has the value.
    """

    value: str = field(repr=False)
    as_file: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) or not isinstance(self.as_file, bool):
            raise InvalidRequestError("a secret is not made of a str and a bool; give Secret(value, as_file=True)")
        if not self.value or "\0" in self.value or len(self.value) > MOST_CHARACTERS:
            raise InvalidRequestError(
                f"a secret has {len(self.value):,} characters; it needs 1 to {MOST_CHARACTERS:,}, and no NUL among them"
            )
