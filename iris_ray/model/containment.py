"""`SetAside`: a job, model or record that iris_ray could not handle, put aside so that everything else goes on.

A job that could not be handled, recorded or launched is ended. A job that could not be planned, and a model that could
not be served, are tried again later. A record that can't be read is lost. All of them are reported in the same way.
"""

from dataclasses import dataclass

ERROR_CHARACTERS = 500
"""How much of an error's text a message shows."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Something that iris_ray could not handle.

    Attributes:
        name: the id of a job, a model, or the name of a record for people, such as "the taints".
        why: what happened, and what to do.
        since: when it was set aside, in seconds on the clock of the process that did so; None: an earlier process did.
        until: when it is tried again, on the same clock; None: unknown, or never.
    """

    name: str
    why: str
    since: float | None = None
    until: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def in_short(error: Exception) -> str:
    """Return the type of an error and the beginning of its text."""
    return f"{type(error).__name__}: {str(error)[:ERROR_CHARACTERS]}"


def by_a_defect(error: Exception) -> str:
    """Return words that blame a failure on a defect of iris_ray."""
    return f"by a defect of iris_ray ({in_short(error)})"


def others_go_on(others: str, process: str) -> str:
    """Return words that all others, such as "jobs", go on, and which process has logged more."""
    return f"Other {others} go on. The {process}'s log has more: please report it"


def lost(name: str, why: str) -> SetAside:
    """Return the note about a job, or something else, whose record can't be read."""
    words = (
        "its record was damaged when this Controller took over, so iris_ray does not know it any more. Running tasks of"
        " it go on until its caller ends. Submit it again. The rest of the record is kept in the cluster's store,"
        f" under corrupt/ ({why})"
    )
    return SetAside(name, words)
