"""A program in a container image, as a user asks for it, and the name of the container in which a task runs it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import require_texts, require_variables, shown
from iris_ray.model.job_info import JobInfo

OURS = frozenset({"--name", "--rm", "-d", "--detach", "--restart", "--cidfile", "-i", "--interactive", "-t", "--tty"})
"""Options of the engine that would take a container out of our hands."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A program that every task of a gang runs in a container of its own.

    Args:
        image: the image, such as ``"gcr.io/project/train:v7"``.
        command: the program and its arguments. No shell reads them. Empty: what the image runs by itself.
        env: the user's environment variables. Values may hold anything but NUL.
        options: further options of ``docker run``, such as ``["--volume=/data:/data"]``.

    Raises:
        InvalidRequestError: something can't work as written. No message has the value of a variable.
    """

    image: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not _IMAGE.fullmatch(self.image):
            raise InvalidRequestError(f'image_id is {shown(self.image)}; give an image, such as "gcr.io/project/train"')
        _require_arguments("command", self.command, '["python", "train.py"]')
        _require_arguments("container_options", self.options, '["--volume=/data:/data"]')
        for option in self.options:
            if option.partition("=")[0] in OURS:
                raise InvalidRequestError(
                    f"container_options holds {option!r}, which is iris_ray's to choose; leave it out"
                )
        require_variables(self.env)
        _require_names_of_variables(self.env)


def container_name(task: JobInfo) -> str:
    """Return the container's name: it has the job, the task and the attempt, so no two containers share one."""
    job = _NOT_IN_NAMES.sub("-", task.job_id)  # its last characters make the job's id unique
    return f"iris-{job}-task-{task.task_index}-attempt-{task.attempt}"


def _require_arguments(what: str, given: Sequence[str], example: str) -> None:
    require_texts(what, given, example)
    if any("\0" in part for part in given):
        raise InvalidRequestError(f"{what} holds a NUL, which no argument can")


def _require_names_of_variables(env: Mapping[str, str]) -> None:
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise InvalidRequestError(
                f"env holds the name {shown(name)}; a container's variable has letters, digits, _, - and . only"
            )
