"""The clients' part: the sources of the values of the option ``secrets``."""

import os
from pathlib import Path

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown
from iris_ray.model.secret import SecretValue, require_secret_name


class Secret(SecretValue):
    """A value that tasks get, and that no record, log or message shows; for the option ``secrets``.

    Args:
        value: the value; empty if it is in the cluster's store.
        as_file: whether the task's variable has the path of a file with the value, and not the value. The file is in
            memory, only its own account can read it, and it goes with the task's process.
        stored: its name in the cluster's store, see `from_store`; empty if the value is given.

    Raises:
        InvalidRequestError: it is empty, longer than 16,384 characters, or has a NUL. No message has the value.

    Example::

        run_on_pod(train, "v4-32", secrets={"WANDB_API_KEY": Secret.from_file("~/.wandb-key")})
    """

    __slots__ = ()

    @staticmethod
    def from_file(path: str | os.PathLike[str], as_file: bool = False) -> "Secret":
        """Return the text of a file of this machine, without newlines at its end unless it is to be a file.

        Raises:
            InvalidRequestError: it can't be read, or is not text.
        """
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise InvalidRequestError(f"the secret's file {os.fspath(path)} can't be read: {why}") from None
        return Secret(text if as_file else text.rstrip("\r\n"), as_file)

    @staticmethod
    def from_env(name: str, as_file: bool = False) -> "Secret":
        """Return the value of a variable of this process.

        Raises:
            InvalidRequestError: it is not set.
        """
        if (value := os.environ.get(name)) is None:
            raise InvalidRequestError(
                f"the variable {shown(name)} is not set here; set it, since the secret takes its value from it"
            )
        return Secret(value, as_file)

    @staticmethod
    def from_store(name: str, as_file: bool = False) -> "Secret":
        """Return a secret of the cluster's store, which operators fill: ``iris-ray cluster secrets set NAME``.

        Only the name travels with the job. Each attempt gets the value that the store has then, without newlines at its
        end unless it is to be a file.

        Raises:
            InvalidRequestError: there can be no such name. Whether there is that secret is known at submission.
        """
        return Secret("", as_file, stored=require_secret_name(name))
