"""A value for tasks that no record, log or message shows: an API key, or the text of a file with credentials."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown

MOST_CHARACTERS = 16_384
"""Limit for each secret: Ray sends so much with a call, and stores more."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A value that tasks get, and nobody else sees; for the option ``secrets``.

    Args:
        value: the value.
        as_file: whether the task's variable has the path of a file with the value, and not the value. The file is in
            memory, only its own account can read it, and it goes with the task's process.

    Raises:
        InvalidRequestError: it is empty, too long, or can't be the value of a variable. No message has the value.

    Example::

        run_on_pod(train, "v4-32", secrets={"WANDB_API_KEY": Secret.from_file("~/.wandb-key")})
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

    @staticmethod
    def from_file(path: str | os.PathLike[str], as_file: bool = False) -> "Secret":
        """Return the text of a file of this machine, without the end of its last line unless it is to be a file.

        Raises:
            InvalidRequestError: it can't be read, or is no text.
        """
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise InvalidRequestError(f"the secret's file {os.fspath(path)} can't be read: {why}") from None
        return Secret(text if as_file else text.rstrip("\r\n"), as_file)

    @staticmethod
    def from_env(name: str, as_file: bool = False) -> "Secret":
        """Return the value of a variable of this process.

        Raises:
            InvalidRequestError: it is not set.
        """
        if (value := os.environ.get(name)) is None:
            raise InvalidRequestError(f"the variable {shown(name)} is not set here, and a secret is to have its value")
        return Secret(value, as_file)
