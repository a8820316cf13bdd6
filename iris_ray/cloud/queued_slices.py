"""Slices as the provider knows them: queued resources of one node each. Pure."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

OWNER_LABEL = "iris-ray-provisioner"
"""The label with the name of the provisioner that made a queued resource."""
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "iris-ray/provisioner")


class QueuedState(Enum):
    """The states of a queued resource, with the API's names."""

    UNKNOWN = "unknown"
    CREATING = "creating"
    ACCEPTED = "accepted"
    WAITING_FOR_RESOURCES = "waiting for resources"
    PROVISIONING = "provisioning"
    ACTIVE = "active"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    FAILED = "failed"
    DELETING = "deleting"


COMING = (QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES, QueuedState.PROVISIONING)
CANCELLABLE = (QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)
"""The states in which a request can be given back before it becomes a slice."""


@dataclass(frozen=True, slots=True)
class QueuedSlice:
    """A queued resource of one node, which has the same name.

    Attributes:
        name: without project and zone.
        accelerator_type: as Google spells it.
        labels: of its node.
        by_service: whether the provider, not a user, caused its state.
        error: why it failed.
    """

    name: str
    accelerator_type: str
    state: QueuedState
    labels: Mapping[str, str]
    by_service: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class NewSlice:
    """A request for a slice."""

    name: str
    accelerator_type: str
    runtime_version: str
    labels: Mapping[str, str]
    startup_script: str
    spot: bool
    external_ips: bool

    def named(self, name: str) -> "NewSlice":
        return replace(self, name=name)

    @property
    def request_id(self) -> str:
        return request_id("create", self.name)


def request_id(verb: str, name: str) -> str:
    """Return the UUID that makes repeating a request harmless: names are never used twice."""
    return str(uuid.uuid5(_NAMESPACE, f"{verb}/{name}"))
