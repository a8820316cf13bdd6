"""The interface between a provisioner and a provider's API: sources of slices, requests, and their states.

`CloudTpu` and `ComputeEngine` are the two APIs behind this seam; a plan knows neither.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from iris_ray.capacity.settings import LOCATION
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown
from iris_ray.model.topology import TPUConfig, get_tpu_config

OWNER_LABEL = "iris-ray-provisioner"
"""The label with the name of the provisioner that made a slice."""
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "iris-ray/provisioner")
_CHIPS = r"(:(?P<chips>[1-9]\d{0,8}))?"
_RESERVATION = re.compile(rf"(?P<name>(?P<zone>{LOCATION.pattern})/reservations/[a-z0-9-]+){_CHIPS}")
_ZONE = re.compile(rf"(?P<zone>{LOCATION.pattern}){_CHIPS}")


class Market(Enum):
    """How a slice is paid for; this decides its price, and when Google takes it back."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    RESERVED = "reserved"
    FLEX = "flex"


@dataclass(frozen=True, slots=True)
class Source:
    """A zone, or a reservation in a zone, from which slices can come.

    Attributes:
        location: ``projects/<project>/locations/<zone>``.
        reservation: ``<location>/reservations/<name>``; empty: none.
        chips: how many chips may be asked for and held there; None: as many as there are.
    """

    location: str
    market: Market
    reservation: str = ""
    chips: int | None = None

    @staticmethod
    def reserved(text: str) -> "Source":
        """Return the source that ``projects/P/locations/ZONE/reservations/NAME`` names, perhaps with ``:CHIPS``.

        Raises:
            InvalidRequestError: it is malformed.
        """
        if (found := _RESERVATION.fullmatch(text)) is None:
            raise InvalidRequestError(
                f"--reservation is {shown(text)}; give projects/PROJECT/locations/ZONE/reservations/NAME, and :CHIPS"
                " after it if you know how many it has"
            )
        chips = int(found["chips"]) if found["chips"] else None
        return Source(found["zone"], Market.RESERVED, found["name"], chips)

    @staticmethod
    def unreserved(text: str, market: Market) -> "Source":
        """Return the source that ``projects/P/locations/ZONE`` names, perhaps with ``:CHIPS``.

        Raises:
            InvalidRequestError: it is malformed.
        """
        if (found := _ZONE.fullmatch(text)) is None:
            raise InvalidRequestError(
                f"--location is {shown(text)}; give projects/PROJECT/locations/ZONE, and :CHIPS after it if you know"
                " how many your quota has"
            )
        return Source(found["zone"], market, chips=int(found["chips"]) if found["chips"] else None)

    @property
    def flag(self) -> str:
        """The option of ``cluster provision`` that names such sources."""
        return "--reservation" if self.reservation else "--location"

    @property
    def key(self) -> str:
        """What tells sources apart: the name of the reservation, or else of the zone."""
        return self.reservation or self.location

    @property
    def zone(self) -> str:
        return self.location.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.reservation.rpartition('/')[2]} in {self.zone}" if self.reservation else self.zone


class QueuedState(Enum):
    """The states of a requested slice, with the names that the Cloud TPU API has for queued resources."""

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
"""The states in which a request can be withdrawn before it becomes a slice."""


@dataclass(frozen=True, slots=True)
class QueuedSlice:
    """A slice that was requested.

    Attributes:
        name: its name without project and zone.
        accelerator_type: the type as Google spells it.
        by_service: whether the provider, not a user, caused its state.
        error: why it failed.
        location: its zone.
        market: how it is paid for.
        reservation: the reservation that it comes from; empty: none.
        asked_at: when it was requested, in seconds since the epoch; 0: unknown.
    """

    name: str
    accelerator_type: str
    state: QueuedState
    labels: Mapping[str, str]
    by_service: bool = False
    error: str = ""
    location: str = ""
    market: Market = Market.ON_DEMAND
    reservation: str = ""
    asked_at: float = 0.0

    @property
    def source(self) -> str:
        """The key of its source."""
        return self.reservation or self.location

    @property
    def chips(self) -> int:
        return get_tpu_config(self.accelerator_type).chip_count


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The properties that the hosts of all slices of a provisioner share.

    Attributes:
        image: the runtime version for the Cloud TPU API, the image of the disk for Compute Engine.
        labels: of the slice.
        startup_script: what each host runs when it starts.
        external_ips: whether each host gets an address of its own on the internet.
        network, subnetwork: the names, or the paths if they are another project's; empty: Google's default.
        service_account: the email; empty: Google's default.
        tags: network tags.
        max_run_s: for flex-start: seconds after which Google ends a slice.
    """

    image: str
    labels: Mapping[str, str]
    startup_script: str
    external_ips: bool = False
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    tags: tuple[str, ...] = ()
    max_run_s: int | None = None


@dataclass(frozen=True, slots=True)
class NewSlice:
    """A request for a slice."""

    name: str
    config: TPUConfig
    source: Source
    hosts: HostSettings = field(repr=False)

    @property
    def request_id(self) -> str:
        return request_id("create", self.name)


def request_id(verb: str, name: str) -> str:
    """Return a UUID that makes repetitions of a request harmless: names are never used twice."""
    return str(uuid.uuid5(_NAMESPACE, f"{verb}/{name}"))


def new_request_id() -> str:
    """Return a UUID for the tries of one call.

    Google answers a request whose id it knows with the earlier operation and does nothing. A deletion that it has
    accepted and not completed must be requested anew.
    """
    return str(uuid.uuid4())


class Provider(Protocol):
    """One zone of a provider's API."""

    location: str

    def require_type(self, config: TPUConfig) -> None:
        """Refuse a type that the zone does not have.

        Raises:
            InvalidRequestError: the zone has other types only.
            ProviderError: the API can't be reached, or refuses.
        """

    def queued_slices(self) -> list[QueuedSlice]:
        """Return all requested slices of the zone, other people's included.

        Raises:
            ProviderError: the API can't be reached, or refuses.
        """

    def create(self, wanted: NewSlice) -> str | None:
        """Request a slice; a repetition changes nothing. Return why the API refuses, or None.

        Raises:
            ProviderError: the API can't be reached; the request may or may not have arrived.
        """

    def delete(self, name: str) -> str | None:
        """Delete a slice, or a request for one. Return why the API refuses, or None, also if there is none.

        Raises:
            ProviderError: the API can't be reached.
        """
