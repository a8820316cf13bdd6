"""What each task of a job of Fray's runs: its entrypoint, with Fray's current client set to ours."""

import functools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from iris_ray.client.user_function import name_of, pickle_function
from iris_ray.errors import InvalidFunctionError
from iris_ray.fray.current import as_current_client

if TYPE_CHECKING:
    from fray.types import Entrypoint


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, which no shell reads. What it prints is the task's output.

    Raises, when it is called:
        subprocess.CalledProcessError: it has ended with another exit code than 0, or by a signal.
        OSError: it can't be started, for example because the host does not have it.
    """

    command: str
    arguments: tuple[str, ...]

    def __call__(self) -> None:
        subprocess.run([self.command, *self.arguments], check=True)


@dataclass(frozen=True, slots=True)
class InTask:
    """A function, run where ``fray.current_client.current_client()`` is a client of ours.

    It is unpickled once that is so: modules that ask for the client when they are imported get ours, too. What it
    returns is dropped, as Fray drops it.
    """

    pickled: bytes

    def __call__(self) -> None:
        from iris_ray.fray.client import Client

        with as_current_client(Client()):
            cloudpickle.loads(self.pickled)()


def in_task(entrypoint: "Entrypoint") -> InTask:
    """Return what each task of a job with this entrypoint runs.

    Raises:
        InvalidFunctionError: there is nothing to run, or it can't be pickled.
    """
    return function_in_task(_function_of(entrypoint))


def function_in_task(function: Callable[[], Any]) -> InTask:
    """Return what each task of a job runs in order to run this function; raises like `in_task`."""
    return InTask(pickle_function(function, name_of(function)))


def _function_of(entrypoint: "Entrypoint") -> Callable[[], Any]:
    if (asked := entrypoint.callable_entrypoint) is not None:
        return functools.partial(asked.callable, *asked.args, **asked.kwargs)
    if (program := entrypoint.binary_entrypoint) is not None:
        return Command(program.command, tuple(program.args))
    raise InvalidFunctionError("the entrypoint has neither a function nor a program; see Entrypoint.from_callable")
