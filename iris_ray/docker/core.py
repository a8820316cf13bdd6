"""The container of a task: its image, program and options, with their validation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import VARIABLES, require, shown, texts
from iris_ray.model.job_info import JobInfo

CONTAINER_LABEL = "iris-ray.container"
"""The label that holds a container's name. Engines match labels exactly, but names by patterns."""
OURS = frozenset({
    *("--name", "--rm", "--detach", "--restart", "--cidfile", "--interactive", "--tty", "--label-file", "--replace"),
})  # fmt: skip
"""Options of the engine that would take a container out of iris_ray's control. Setting its label would, as well."""
_OUR_LETTERS = re.compile(r"-[Pq]*[dit]")
"""Matches ``-d``, ``-i`` and ``-t``, alone or combined. ``-P`` and ``-q`` take no value either."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]*")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A program that each task of a gang runs in its own container.

    Args:
        image: the image, such as ``"gcr.io/project/train:v7"``.
        command: the program and its arguments, without a shell; empty for the image's own program.
        env: the user's environment variables. A value can have any character except NUL.
        options: additional options of ``docker run``, such as ``["--volume=/data:/data"]``.
        secrets: names of the variables that hold paths of secret files. The task has these files as well.

    Raises:
        InvalidRequestError: a field is invalid. The message never includes a variable's value.
    """

    image: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Sequence[str] = ()
    secrets: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.image, str) or not _IMAGE.fullmatch(self.image):
            raise InvalidRequestError(f'image_id is {shown(self.image)}; give an image, such as "gcr.io/project/train"')
        _require_arguments("command", self.command, '["python", "train.py"]')
        _require_arguments("container_options", self.options, '["--volume=/data:/data"]')
        for option in self.options:
            if option.partition("=")[0] in OURS or _OUR_LETTERS.match(option) or CONTAINER_LABEL in option:
                raise InvalidRequestError(
                    f"container_options holds {option!r}, which is iris_ray's to choose; leave it out"
                )
        require("env", self.env, VARIABLES)
        _require_names_of_variables(self.env)


def container_name(task: JobInfo) -> str:
    """Return the unique name of a task's container, composed of the job, the task and the attempt."""
    job = _NOT_IN_NAMES.sub("-", task.job_id)  # a job's id is unique by its last characters
    return f"iris-{job}-task-{task.task_index}-attempt-{task.attempt}"


def _require_arguments(what: str, given: Sequence[str], example: str) -> None:
    require(what, given, texts(example))
    if any("\0" in part for part in given):
        raise InvalidRequestError(f"{what} holds a NUL, which no argument can")


def _require_names_of_variables(env: Mapping[str, str]) -> None:
    for name in env:
        if not _VARIABLE.fullmatch(name):
            raise InvalidRequestError(
                f"env holds the name {shown(name)}; a container's variable has letters, digits, _, - and . only"
            )
