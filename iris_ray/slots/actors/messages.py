"""The messages between clients, a SlotManager and slots, and the rows that show the state of slots to people."""

import hashlib
import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle
from ray.actor import ActorHandle

from iris_ray.errors import InvalidSlotError, RemoteUserError
from iris_ray.model.checks import FLAG, NAME, Check, Holds, OneOf, Seconds, Whole, is_timeout, require, require_fields
from iris_ray.model.constraints import Constraint
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.slots.core.devices import UNKNOWN, Device, DeviceKind, Runner, runner_of_slice
from iris_ray.slots.core.events import ModelRegistered
from iris_ray.slots.core.models import ModelSpec, WorkloadKind

MOST_HOSTS = 10_000
"""The limit for hosts, and for devices of a host. A mistyped number must not fill the memory."""


def _is_memory(given: object) -> bool:
    sizes = given if isinstance(given, (list, tuple)) and given else [given]
    return not any(map(Whole(1, exactly=True).problem, sizes))


_CHECKS: Mapping[str, Check] = {
    "count": Whole(1, MOST_HOSTS, exactly=True),
    "devices": Whole(1, MOST_HOSTS, exactly=True),
    "memory": Holds(_is_memory, "bytes: an int of 1 or more, or one for each GPU of a host", or_none=True),
    "kind": Holds(DeviceKind, "a DeviceKind, such as DeviceKind.GPU"),
    "whole_slices": FLAG,
    "priority": OneOf(tuple(band for band in PriorityBand if band is not PriorityBand.SYSTEM)),
}


@dataclass(frozen=True, slots=True)
class SlotHosts:
    """Hosts that are to hold slots. Each host, or slice, belongs to a job, which asks the Controller like any other.

    Args:
        count: the number of hosts, or of slices if ``tpu_type`` is given.
        kind: the devices that slots use there; TPU if ``tpu_type`` is given.
        devices: the number of GPUs, or of CPUs, to take on each host. All chips, if ``tpu_type`` is given. One machine
            may provide several hosts.
        memory: bytes that slots may use: of each GPU or chip, or of the host for CPUs. If the GPUs of a machine differ,
            take all of them, and give a list: one number for each, in the order of ``nvidia-smi``. If Ray names them by
            UUID and the numbers differ, this needs nvidia-ml-py. None: of a GPU all that programs can use, as NVIDIA's
            driver reports it once a host is there, which needs nvidia-ml-py; of others 1 GiB.
        tpu_type: such as "v4-8". Each host of the slice is a runner; the slice comes and goes as a whole.
        whole_slices: whether a slot uses all hosts of a slice, with a process on each. Then the slice is one runner. No
            effect on slices of one host.
        constraints: conditions that every host must satisfy.
        preferences: conditions that hosts should satisfy if possible.
        tolerations: names of taints that do not keep slots away.
        priority: the band of the jobs; not SYSTEM. Jobs of higher bands may take hosts whose slots are busy. Slots take
            no hosts that other jobs use.

    Raises:
        InvalidSlotError: a value makes no sense.
        UnknownTPUTypeError: there is no such type.
    """

    count: int = 1
    kind: DeviceKind = DeviceKind.CPU
    devices: int = 1
    memory: int | Sequence[int] | None = None
    tpu_type: str | None = None
    whole_slices: bool = False
    constraints: Sequence[Constraint] = ()
    preferences: Sequence[Constraint] = ()
    tolerations: Sequence[str] = ()
    priority: PriorityBand = PriorityBand.BATCH

    def __post_init__(self) -> None:
        require_fields("SlotHosts: ", self, _CHECKS, InvalidSlotError)
        if self.whole_slices and self.tpu_type is None:
            raise InvalidSlotError('SlotHosts: whole_slices=True needs a type of slices: tpu_type="v4-16"')
        if self.tpu_type is not None:
            if self.kind is DeviceKind.GPU:
                raise InvalidSlotError(f"SlotHosts: hosts of {self.tpu_type} slices have no GPUs; leave kind out")
            object.__setattr__(self, "kind", DeviceKind.TPU)
            object.__setattr__(self, "devices", get_tpu_config(self.tpu_type).chips_per_vm)
        elif self.kind is DeviceKind.TPU:
            raise InvalidSlotError('SlotHosts: say which slices: tpu_type="v4-8"')
        if isinstance(self.memory, (list, tuple)):
            if self.kind is not DeviceKind.GPU or len(self.memory) != self.devices:
                raise InvalidSlotError(
                    f"SlotHosts: memory lists {len(self.memory)} devices; a list is for hosts with as many GPUs, with"
                    f" kind=DeviceKind.GPU and devices={len(self.memory)}"
                )
            object.__setattr__(self, "memory", tuple(self.memory))
        if self.memory is None and self.kind is not DeviceKind.GPU:
            object.__setattr__(self, "memory", 2**30)

    @property
    def runner(self) -> Runner:
        """One of the expected runners, as the reconciler sees it."""
        count = 1 if self.kind is DeviceKind.CPU else self.devices
        known = self.memory or UNKNOWN
        sizes = (known,) * count if isinstance(known, int) else known
        if self.whole_slices and self.tpu_type is not None and (config := get_tpu_config(self.tpu_type)).vm_count > 1:
            return runner_of_slice(self.kind.value, config.chips_per_vm * config.vm_count, sizes[0])
        return Runner(self.kind.value, tuple([Device(self.kind, size) for size in sizes]))


def runner_names(hosts: Sequence[SlotHosts]) -> Iterator[tuple[str, SlotHosts]]:
    """Yield the name of each runner, or of each slice's runners, with its description."""
    expanded = (each for each in hosts for _ in range(each.count))
    return ((f"{each.kind.value}-{number}", each) for number, each in enumerate(expanded))


@dataclass(frozen=True, slots=True)
class Maker:
    """The process that made a SlotManager.

    Attributes:
        ray_job: the id of its Ray job. The manager ends with that job.
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
        pickled: the user's class and its arguments, by cloudpickle.
        replicas: slots to keep even without requests.
        prewarm: whether each new runner gets a slot if there is room.
    """

    spec: ModelSpec
    pickled: bytes
    replicas: int = 0
    prewarm: bool = False

    def __post_init__(self) -> None:
        checks: Mapping[str, Check] = {"replicas": Whole(exactly=True), "prewarm": FLAG}
        require_fields(f"model {self.spec.name}: ", self, checks, InvalidSlotError)

    @property
    def event(self) -> ModelRegistered:
        """The event that tells the reconciler of the model."""
        code = hashlib.sha256(self.pickled).digest()
        return ModelRegistered(self.spec, self.replicas, self.prewarm, code=code)


_ASK_CHECKS: Mapping[str, Check] = {
    "request_id": NAME,
    "model": Holds(str, "a model's name"),
    "timeout_s": Holds(is_timeout, "seconds, or None to wait for as long as it takes", or_none=True),
    "priority": FLAG,
    "retriable": FLAG,
    "kind": Holds(WorkloadKind, "a WorkloadKind"),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        request_id: an id of its own.
        payload: the argument of the model's ``__call__``, by cloudpickle.
        timeout_s: seconds until it is given up if it has not begun.
        priority: whether it goes before requests without priority.
        retriable: whether it may run again if its process is lost.
        kind: one request, or a session.
        idle_s: how long a session keeps its seat without being used.
        client_id: the client who renews it; the request is given up if that client falls silent. "": no client.

    Raises:
        InvalidSlotError: a value makes no sense.
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
        require_fields("", self, _ASK_CHECKS, InvalidSlotError)
        if self.kind is WorkloadKind.SESSION:
            require("idle_s", self.idle_s, Seconds(above=True), InvalidSlotError)


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a client that asked for a session: the slot, and its `SlotActor`, which takes the calls."""

    slot_id: str
    actor: ActorHandle


@dataclass(frozen=True, slots=True)
class NotHeld:
    """A slot's answer to a call of a session that has lost its seat, and why. The call has not run."""

    reason: str


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot, for people.

    Attributes:
        runner: its runner's id.
        devices: numbers of its devices.
        memory: bytes that it takes on all devices together; of a TPU chip, all that slots may use.
        state: such as "ready".
        active: the number of requests and sessions that have a seat.
        sessions: the number of sessions among these.
        idle_s: seconds since a request or session last began or ended, since the slot became ready or, before that,
            since it was planned; 0 while a request or session has a seat.
        pid: the pid of its process, on a whole slice that on the first host; 0 before it has started.
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
        slots: the number of ready slots.
        starting: the number of slots that are planned or load.
        waiting: requests and sessions in the queue.
        replicas: the number of slots that are kept even without requests.
        load_s: how long the last load took, or how long one had taken when another was begun; 1 s before the first.
        failures: loads that failed in a row, since a slot was last ready or the model was registered.
        waits_for: why the model gets no further slot now, if requests wait or replicas are missing; otherwise "".
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
    """Runners, slots and models.

    Attributes:
        runners: bytes of each device that no slot has booked, by runner.
        memory: bytes of each device that slots may use.
        in_use: bytes that all programs use of each device, as NVIDIA's driver last reported them (it is asked once a
            minute); of a host for CPUs, the bytes that slots use. Runners whose use is not known, such as those with
            TPU chips, are missing.
    """

    runners: Mapping[str, tuple[int, ...]]
    slots: tuple[SlotRow, ...]
    models: tuple[ModelRow, ...]
    memory: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    in_use: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


# -- pieces ------------------------------------------------------------------------------------------------------------
# Values of users travel between a client and a slot. Only these two unpickle them; a SlotManager passes bytes on.


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A part of an answer, or all of it, or the exception that a model raised, by cloudpickle."""

    data: bytes
    raised: bool = False

    def open(self) -> Any:
        """Return the value, or raise the exception."""
        value = cloudpickle.loads(self.data)
        if self.raised:
            raise value
        return value


def packed(value: Any) -> AnswerPiece:
    """Pickle a value. A text, such as each piece of a language model's answer, needs no cloudpickle."""
    return AnswerPiece(pickle.dumps(value) if type(value) is str else cloudpickle.dumps(value))


def packed_error(error: BaseException) -> AnswerPiece:
    """Pickle an exception; one that can't be pickled becomes a `RemoteUserError` with its traceback."""
    try:
        data = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception:
        data = cloudpickle.dumps(RemoteUserError("".join(traceback.format_exception(error))))
    return AnswerPiece(data, raised=True)


# -- reasons -----------------------------------------------------------------------------------------------------------

MOST = 10_000
"""How many reasons are kept; older ones are forgotten."""


@dataclass(slots=True, eq=False)
class StopReasons:
    """Why requests and sessions were stopped, by id; kept for clients and processes that hear of it later."""

    _by_id: dict[str, str] = field(default_factory=dict)

    def note(self, request_id: str, reason: str) -> None:
        """Keep the first reason that is given for a request or session."""
        self._by_id.setdefault(request_id, reason)
        if len(self._by_id) > MOST:
            del self._by_id[next(iter(self._by_id))]

    def knows(self, request_id: str) -> bool:
        """Return whether a request or session was stopped."""
        return request_id in self._by_id

    def forget(self, request_id: str) -> bool:
        """Forget a request or session; return whether it was known."""
        return self._by_id.pop(request_id, None) is not None

    def of(self, request_id: str) -> str:
        """Return why a request or session is over."""
        return self._by_id.get(request_id, "it has ended")
