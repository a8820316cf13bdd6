"""A job of Ray's job API, as a user describes it: checked, and measured, before anything is sent."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iris_ray.client.environment_limits import require_env_travels
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import require_texts, require_variables

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class RayJobConfig:
    """A command to run on a Ray cluster, in a directory that is sent there.

    Args:
        command: the program and its arguments, such as ``["python", "train.py", "--steps", "1000"]``. No shell reads
            them: spaces, quotes and ``$`` arrive as they are.
        working_dir: the directory that is sent to the cluster, and in which the command runs; None: none.
        excludes: what stays here of it, as patterns of a .gitignore file. What its .gitignore and .rayignore files
            name stays here, too.
        env: environment variables of the command, and of the tasks that it starts.
        env_file: a file with further variables, ``NAME=value`` a line; for secrets, which belong on no command line.
        pip: packages to install on the cluster for it.

    Raises:
        InvalidRequestError: something can't work as written.
    """

    command: Sequence[str]
    working_dir: str | Path | None = "."
    excludes: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    env_file: str | Path | None = None
    pip: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, example in (("command", '["python", "train.py"]'), ("excludes", '["data/"]'), ("pip", '["chex"]')):
            require_texts(name, getattr(self, name), example)
        if not self.command or not self.command[0]:
            raise InvalidRequestError(
                'command is empty; give a program and its arguments, such as ["python", "train.py"]'
            )
        if self.working_dir is not None and not Path(self.working_dir).is_dir():
            raise InvalidRequestError(f"working_dir is {str(self.working_dir)!r}, which is not a directory")
        require_variables(self.env)
        require_env_travels(self.variables())

    @property
    def entrypoint(self) -> str:
        """The command as the shell on the cluster must see it."""
        return shlex.join(self.command)

    @property
    def name(self) -> str:
        """What to call it: its script, or its program."""
        scripts = [part for part in self.command if part.endswith(".py")]
        stem = Path((scripts or [self.command[0]])[0]).stem
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem) or "job"

    def variables(self) -> dict[str, str]:
        """Return all variables; those of ``env`` win over those of the file."""
        return (read_env_file(self.env_file) if self.env_file is not None else {}) | dict(self.env)


def read_env_file(path: str | Path) -> dict[str, str]:
    """Return the variables of a file: ``NAME=value`` a line, as docker reads them. No message has a value.

    The value is all that follows the first ``=``, quotes included. Empty lines and lines that begin with # are skipped;
    a name alone passes this process's value on.

    Raises:
        InvalidRequestError: the file can't be read, or a line makes no sense.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidRequestError(f"the file of variables {path} can't be read: {why}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"{path}, line {number}: give NAME=value, or a name alone to pass yours on")
        if not equals and name not in os.environ:
            raise InvalidRequestError(f"{path}, line {number}: {name} is not set here; give {name}=value")
        found[name] = value if equals else os.environ[name]
    return found
