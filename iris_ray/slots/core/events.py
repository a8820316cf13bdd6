"""The events that the reconciler takes. They may come late, twice or not at all; reports of runners correct that."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from iris_ray.slots.core.devices import DeviceKind, Runner
from iris_ray.slots.core.models import ModelSpec, Request


@dataclass(frozen=True, slots=True)
class RunnerJoined:
    """A runner is there. It gets slots once it has reported that no unknown process is on it.

    A runner of the same id that was there before counts as lost.
    """

    runner: Runner


@dataclass(frozen=True, slots=True)
class RunnersExpected:
    """These runners may come. Their attributes are not known before.

    Attributes:
        problems: why a runner that was expected will not come, by the kind of its devices.
    """

    runners: tuple[Runner, ...]
    problems: Mapping[DeviceKind, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """A runner is gone, and every process on it."""

    runner_id: str


@dataclass(frozen=True, slots=True)
class RunnerClosed:
    """A runner takes no new slots, and its slots end after their last requests; or it is open again.

    Attributes:
        closed: whether it is closed.
        reason: why, as clients with sessions there are told.
    """

    runner_id: str
    closed: bool = True
    reason: str = "its host has to go"


@dataclass(frozen=True, slots=True)
class ModelRegistered:
    """Requests for this model may come. It replaces a model of the same name.

    Slots of another spec or code end after their last requests; new requests go to new slots.

    Attributes:
        code: what tells its class and arguments from others.
        replicas: how many slots to keep even without requests. They are never evicted.
        prewarm: whether each new runner gets a slot, if there is room without evicting.
        load_s: how long loading takes, as far as known.
    """

    spec: ModelSpec
    replicas: int = 0
    prewarm: bool = False
    load_s: float = 1.0
    code: bytes = b""


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """The model is served no more; its waiting requests are refused."""

    model: str


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client asks for a model."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """Nobody waits for the answer any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request runs no more: its slot has answered it or failed to."""

    request_id: str
    slot_id: str


@dataclass(frozen=True, slots=True)
class SessionsRenewed:
    """A client is alive and has these sessions.

    Attributes:
        used: when each session was last used, by id: now, if a call runs or the client has just got the session.
    """

    used: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SlotReady:
    """A slot has loaded its model."""

    slot_id: str


@dataclass(frozen=True, slots=True)
class SlotFailed:
    """A slot could not load its model, or can't serve any more. Its process may still exist."""

    slot_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotEnded:
    """A slot's process is gone; its memory is free. ``why``: what is known of the cause, or ""."""

    slot_id: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class RunnerReported:
    """The slots whose processes are on a runner.

    Attributes:
        as_of: when it was asked. The report shows all orders from before that time, but perhaps not later ones.
        slots: the ids of the slots.
        observed: bytes in use by device, as far as the driver tells.
    """

    runner_id: str
    as_of: float
    slots: Collection[str]
    observed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotEviction:
    """An operator wants a slot to end after its last request."""

    slot_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; nothing else happened."""


Event = (
    RunnerJoined
    | RunnersExpected
    | RunnerLost
    | RunnerClosed
    | ModelRegistered
    | ModelRemoved
    | RequestArrived
    | RequestCancelled
    | RequestEnded
    | SessionsRenewed
    | SlotReady
    | SlotFailed
    | SlotEnded
    | RunnerReported
    | SlotEviction
    | Tick
)
