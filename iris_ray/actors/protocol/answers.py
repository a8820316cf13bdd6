"""Missing answers, and why they are missing: values, not exceptions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unreachable:
    """An actor did not answer.

    Attributes:
        reason: what happened, in words.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Gone(Unreachable):
    """Ray says that the actor's process has ended, or can't be reached at the moment. Its host may still be alive."""


@dataclass(frozen=True, slots=True)
class KilledForMemory(Gone):
    """Ray has killed the actor's process, because the memory of its host was nearly used up."""


@dataclass(frozen=True, slots=True)
class Unfit(Unreachable):
    """The host answers, but can't take a task: another process holds its chips, or its disk is full or faulty.

    Attributes:
        node_id: the host's id in Ray.
        why: the reason as part of a sentence about the host.
        ours: whether another task of iris_ray holds its chips. Then the host is not blamed, only avoided for a while.
    """

    node_id: str
    why: str
    ours: bool = False


@dataclass(frozen=True, slots=True)
class SetupFailed(Unreachable):
    """Hosts of a slice can't set up the runtime environment, or import a module of ``preload``.

    Attributes:
        hosts: their indexes.
        works_elsewhere: whether another host of the slice could do so.
    """

    hosts: tuple[int, ...]
    works_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class OtherVersion(SetupFailed):
    """Hosts of a slice have an iris_ray that does not go with this one, or none. Other callers may work with them."""


@dataclass(frozen=True, slots=True)
class NotReserved(Unreachable):
    """Ray has not reserved the resources. This says nothing about the hosts."""
