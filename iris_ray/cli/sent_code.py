"""The code that ``run`` and ``submit`` send along: a named directory or, with the service ``dev``, a checkout."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from iris_ray.actors.protocol.services import module_of
from iris_ray.errors import ServiceUnavailableError


@dataclass(frozen=True, slots=True)
class SentDirectory:
    """The directory that the user has named, which Ray sends as it is; None: only the script travels."""

    directory: str | None

    @property
    def travels(self) -> bool:
        """Whether the hosts get the script's directory."""
        return self.directory is not None

    @contextlib.contextmanager
    def for_ray(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of ``ray.init`` that send the code to the hosts."""
        yield {} if self.directory is None else {"runtime_env": {"working_dir": self.directory}}

    def keep(self, job_id: str) -> None:
        """Keep which code a job has run, if that is known."""


_used: ContextVar[Any] = ContextVar("_used", default=None)


@contextlib.contextmanager
def use_code(code: Any) -> Iterator[None]:
    """Have `sent_code` return this code within the block."""
    before = _used.set(code)
    try:
        yield
    finally:
        _used.reset(before)


def sent_code(working_dir: str | None) -> Any:
    """Return the code that travels: a `SentDirectory`, or a `TravellingCode`, which also sends a checkout."""
    if (used := _used.get()) is not None:
        return used
    try:
        return module_of("dev", "code").TravellingCode.of(working_dir)
    except ServiceUnavailableError:
        return SentDirectory(working_dir)


def restored_code(record: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a block that yields the code of a record, as `code_of` returns it, in a temporary directory."""
    restored: contextlib.AbstractContextManager[Any] = module_of("dev", "code").restored(record)
    return restored


def code_of(job_id: str) -> Any:
    """Return the record of the code that a job has run; None if it is not known."""
    try:
        return module_of("dev", "checkout").record_of(job_id)
    except ServiceUnavailableError:
        return None
