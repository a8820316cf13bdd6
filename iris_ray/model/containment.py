"""`SetAside`: a job, model or record that iris_ray could not handle and has set aside, so that all others continue.

A job that can't be handled, recorded or launched is ended. A job that can't be planned, or a model that can't be
served, is retried later. A record that can't be read is lost. All of these are reported in the same way.
"""

from dataclasses import dataclass

ERROR_CHARACTERS = 500
"""The number of characters of an error's text that a message shows."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Something that iris_ray could not handle.

    Attributes:
        name: the id of a job, a model, or the display name of a record, such as "the taints".
        why: what happened, and what the reader should do.
        since: when it was set aside, in seconds on this process's clock; None if that is unknown.
        until: when it will be retried, on the same clock; None if that is unknown or never happens.
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
    """Return a phrase that attributes a failure to a defect of iris_ray."""
    return f"by a defect of iris_ray ({in_short(error)})"


def others_go_on(others: str, process: str) -> str:
    """Return sentences that say that all other jobs or models continue, and whose log has the details."""
    return f"Other {others} continue. The {process}'s log has more: please report it"


def lost(name: str, why: str, since: float | None = None, is_kept: bool = True) -> SetAside:
    """Return the report of a record that can't be read, such as a job's.

    Args:
        name: the id of its job, or the record's name.
        why: why it can't be read.
        since: when that was found.
        is_kept: whether a copy is kept.
    """
    copy = "is kept in the cluster's store, under corrupt/," if is_kept else "was too large to be kept"
    words = (
        "its record was damaged when a Controller took over, so iris_ray no longer knows it. Its running tasks"
        f" continue until its caller ends. Submit it again. The rest of the record {copy} ({why})"
    )
    return SetAside(name, words, since)
