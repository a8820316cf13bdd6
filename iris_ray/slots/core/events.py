"""What the reconciler hears. Events may come late, twice or not at all; a report of a runner makes up for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from iris_ray.slots.core.devices import Runner
from iris_ray.slots.core.models import ModelSpec, Request, SlotIdentity


@dataclass(frozen=True, slots=True)
class RunnerJoined:
    """A runner is there. It gets slots once it has reported that no other process is there.

    If there was one of its id, that one is lost.
    """

    runner: Runner


@dataclass(frozen=True, slots=True)
class RunnersExpected:
    """These runners may be there at some time. Their attributes are not known before they are."""

    runners: tuple[Runner, ...]


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """A runner is gone, and every process on it."""

    runner_id: str


@dataclass(frozen=True, slots=True)
class RunnerClosed:
    """A runner takes no new slots, and its slots end when their requests have; or it is open again.

    Attributes:
        runner_id: which.
        closed: whether it is closed.
        reason: why, for those who have sessions there.
    """

    runner_id: str
    closed: bool = True
    reason: str = "its host has to go"


@dataclass(frozen=True, slots=True)
class ModelRegistered:
    """Requests for this model may come. It replaces one of the same identity.

    Attributes:
        spec: the model.
        replicas: how many slots to keep, whether there are requests or not. They are never evicted.
        prewarm: whether each new runner gets a slot, if there is room without evicting.
        load_s: how long loading takes, as far as known.
    """

    spec: ModelSpec
    replicas: int = 0
    prewarm: bool = False
    load_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """No more requests for this."""

    identity: SlotIdentity


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """Somebody asks for a model."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """Nobody waits for the answer any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A slot has answered, or failed to: the request runs no more."""

    request_id: str
    slot_id: str


@dataclass(frozen=True, slots=True)
class SessionsRenewed:
    """A client has these sessions, and is there.

    Attributes:
        used: when each was last used, by id. One of which a call runs, or which the client has just got: now.
    """

    used: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SlotReady:
    """A slot has loaded its model."""

    slot_id: str


@dataclass(frozen=True, slots=True)
class SlotFailed:
    """A slot could not load its model, or can't serve any more. Its process may still be there."""

    slot_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotEnded:
    """A slot's process is gone; its memory is free."""

    slot_id: str


@dataclass(frozen=True, slots=True)
class RunnerReported:
    """The slots whose processes are on a runner.

    Attributes:
        runner_id: the runner.
        as_of: when it was asked. What was ordered before has been carried out; it may know nothing of what came later.
        slots: what they serve, by slot id.
        observed: bytes in use by device, as far as the driver tells.
    """

    runner_id: str
    as_of: float
    slots: Mapping[str, SlotIdentity]
    observed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotEviction:
    """An operator wants a slot to end once its requests have."""

    slot_id: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


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
