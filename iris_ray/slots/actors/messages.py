"""What a client tells a SlotManager, and what it sees."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.errors import InvalidSlotError, RemoteUserError
from iris_ray.model.checks import is_timeout, require, require_plain_int
from iris_ray.model.constraints import Constraint
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.slots.core.devices import Device, DeviceKind, Runner, runner_of_slice
from iris_ray.slots.core.models import ModelSpec, WorkloadKind


@dataclass(frozen=True, slots=True)
class SlotHosts:
    """Hosts that are to hold slots. A job gets each, or each slice, from the Controller as any other job would.

    Args:
        count: how many hosts; of a TPU type how many slices.
        kind: what slots use there; TPU if ``tpu_type`` is given.
        devices: so many GPUs of a host, or for CPUs how many to take there. All chips, if ``tpu_type`` is given.
        memory: bytes that slots may use: of each GPU or chip, or of the host for CPUs.
        tpu_type: such as "v4-8". Each host of the slice is a runner; the slice comes and goes as a whole.
        whole_slices: whether a slot uses all hosts of a slice, with a process on each. Then the slice is one runner.
        constraints: what every host must satisfy.
        preferences: what is better satisfied.
        tolerations: names of taints that do not keep slots away.
        priority: jobs of higher bands may take hosts whose slots are busy. Slots take no hosts from others.

    Raises:
        InvalidSlotError: a value makes no sense.
        UnknownTPUTypeError: there is no such type.
    """

    count: int = 1
    kind: DeviceKind = DeviceKind.CPU
    devices: int = 1
    memory: int = 2**30
    tpu_type: str | None = None
    whole_slices: bool = False
    constraints: Sequence[Constraint] = ()
    preferences: Sequence[Constraint] = ()
    tolerations: Sequence[str] = ()
    priority: PriorityBand = PriorityBand.BATCH

    def __post_init__(self) -> None:
        for name in ("count", "devices", "memory"):
            require_plain_int(f"SlotHosts: {name}", getattr(self, name), 1, InvalidSlotError)
        is_kind = isinstance(self.kind, DeviceKind)
        require(is_kind, "SlotHosts: kind", self.kind, "a DeviceKind, such as DeviceKind.GPU", InvalidSlotError)
        if self.whole_slices and self.tpu_type is None:
            raise InvalidSlotError('SlotHosts: whole_slices=True needs a type of slices: tpu_type="v4-16"')
        if self.tpu_type is not None:
            if self.kind is DeviceKind.GPU:
                raise InvalidSlotError(f"SlotHosts: hosts of {self.tpu_type} slices have no GPUs; leave kind out")
            object.__setattr__(self, "kind", DeviceKind.TPU)
            object.__setattr__(self, "devices", get_tpu_config(self.tpu_type).chips_per_vm)
        elif self.kind is DeviceKind.TPU:
            raise InvalidSlotError('SlotHosts: say which slices: tpu_type="v4-8"')

    @property
    def runner(self) -> Runner:
        """One of its runners as the reconciler sees it, before it is there."""
        if self.whole_slices and self.tpu_type is not None and (config := get_tpu_config(self.tpu_type)).vm_count > 1:
            return runner_of_slice(self.kind.value, config.chips_per_vm * config.vm_count, self.memory)
        count = 1 if self.kind is DeviceKind.CPU else self.devices
        return Runner(self.kind.value, (Device(self.kind, self.memory),) * count)


@dataclass(frozen=True, slots=True)
class Maker:
    """The process that made a SlotManager.

    Attributes:
        user: whose it is.
        ray_job: the id of its Ray job. The manager ends with that.
        worker_id: Ray's id of the process.
        where: its pid and host, for people.
    """

    user: str
    ray_job: str
    worker_id: str
    where: str


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """A model to be served.

    Attributes:
        spec: what it needs.
        pickled: the user's class and its arguments, by cloudpickle.
        replicas: slots to keep, whether there are requests or not.
        prewarm: whether each new runner gets a slot if there is room.
    """

    spec: ModelSpec
    pickled: bytes
    replicas: int = 0
    prewarm: bool = False

    def __post_init__(self) -> None:
        require_plain_int(f"model {self.spec.name}: replicas", self.replicas, 0, InvalidSlotError)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        request_id: of its own.
        model: the model's name.
        payload: what the model's ``__call__`` gets, by cloudpickle.
        timeout_s: seconds until it is given up if it has not begun.
        priority: whether it goes before those that have none.
        retriable: whether it may run again if its process is lost.
        kind: one request, or a session.
        idle_s: of a session: how long it keeps its seat without being used.
        client_id: who renews it: it is given up once nothing is heard of that client. "": nobody, and it is not.

    Raises:
        InvalidSlotError: ``timeout_s`` is not a number.
    """

    request_id: str
    model: str
    payload: bytes
    timeout_s: float | None = None
    priority: bool = False
    retriable: bool = True
    kind: WorkloadKind = WorkloadKind.INFERENCE
    idle_s: float | None = None
    client_id: str = ""

    def __post_init__(self) -> None:
        wanted = "seconds, or None to wait for as long as it takes"
        require(
            self.timeout_s is None or is_timeout(self.timeout_s), "timeout_s", self.timeout_s, wanted, InvalidSlotError
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """What a client gets that has asked for a session: a slot that takes its calls.

    Attributes:
        slot_id: the slot's id.
        actor: its `SlotActor`.
    """

    slot_id: str
    actor: ActorHandle


@dataclass(frozen=True, slots=True)
class NotHeld:
    """What a slot answers to a call of a session that has no seat there any more. The call has not run.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot, for people.

    Attributes:
        slot_id: its id.
        model: what it serves.
        runner: where.
        devices: numbers of its devices.
        memory: bytes on all of them.
        state: such as "ready".
        active: requests and sessions that have a seat.
        sessions: how many of these are sessions.
        idle_s: seconds since a request last began or ended.
        pid: of its process; 0 before it has started.
    """

    slot_id: str
    model: str
    runner: str
    devices: tuple[int, ...]
    memory: int
    state: str
    active: int
    sessions: int
    idle_s: float
    pid: int


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model, for people.

    Attributes:
        model: its name.
        slots: how many are ready.
        starting: how many are about to be.
        waiting: requests and sessions in the queue.
        replicas: slots that are kept.
        load_s: how long loading took, last.
        failures: loads that failed in a row, since a slot was last ready.
        waits_for: why there is no further slot now, or "".
    """

    model: str
    slots: int
    starting: int
    waiting: int
    replicas: int
    load_s: float
    failures: int
    waits_for: str


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """What there is: runners with their free bytes by device, slots and models."""

    runners: Mapping[str, tuple[int, ...]]
    slots: tuple[SlotRow, ...]
    models: tuple[ModelRow, ...]


# -- pieces ------------------------------------------------------------------------------------------------------------
# Values of users on their way between a client and a slot. Only these two open them; a SlotManager passes bytes on.

MOST_PIECES = 64
"""Of one stream that wait for their caller, in the SlotManager and in the slot. While there are so many, the model
waits."""
TAKEN_AT_ONCE = 16
"""A caller says after so many pieces that it has taken them."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A part of an answer, or all of it, or the exception that a model raised.

    Attributes:
        data: by cloudpickle.
        raised: whether it is an exception.
    """

    data: bytes
    raised: bool = False

    def open(self) -> Any:
        """Return the value, or raise the exception."""
        value = cloudpickle.loads(self.data)
        if self.raised:
            raise value
        return value


def packed(value: Any) -> AnswerPiece:
    """Return a value as it travels."""
    return AnswerPiece(cloudpickle.dumps(value))


def packed_error(error: BaseException) -> AnswerPiece:
    """Return an exception as it travels; one that can't be pickled becomes a `RemoteUserError` with its traceback."""
    try:
        data = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception:
        data = cloudpickle.dumps(RemoteUserError("".join(traceback.format_exception(error))))
    return AnswerPiece(data, raised=True)


# -- reasons -----------------------------------------------------------------------------------------------------------
# Why requests and sessions were stopped, for whoever has not heard of it yet.

MOST = 10_000
"""Of those that were stopped before, nothing is known any more."""


@dataclass(slots=True, eq=False)
class Reasons:
    """The most recent ones, by id."""

    _by_id: dict[str, str] = field(default_factory=dict)

    def note(self, request_id: str, reason: str) -> None:
        """Keep the first reason that is given for one."""
        self._by_id.setdefault(request_id, reason)
        if len(self._by_id) > MOST:
            del self._by_id[next(iter(self._by_id))]

    def knows(self, request_id: str) -> bool:
        """Return whether one was stopped."""
        return request_id in self._by_id

    def forget(self, request_id: str) -> bool:
        """Forget one; return whether it was known."""
        return self._by_id.pop(request_id, None) is not None

    def of(self, request_id: str) -> str:
        """Return why one is over."""
        return self._by_id.get(request_id, "it has ended")
