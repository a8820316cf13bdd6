"""Small pieces of what the command line says: one line, a duration, a count, the state of a job."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_ray.actors.wire.status import JobStatus


def one_line(text: object) -> str:
    """Return any text as one line for a cell or a terminal: without line ends and control characters."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in str(text)).split())


def duration(seconds: float) -> str:
    """Return a duration in two units at most: ``7s``, ``5m12s``, ``3h04m``, ``2d05h``."""
    whole = max(0, int(seconds))
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02d}{smaller}"
    return f"{whole}s"


def counted(number: int, noun: str) -> str:
    """Return ``1 host`` or ``2 hosts``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def state_in_words(job: "JobStatus") -> str:
    return "starting" if job.starting else job.state.value
