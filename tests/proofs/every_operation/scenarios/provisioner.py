"""A provisioner: it asks for the two slices of a gang, keeps the one that is used, and gives both back in the end.

The client of the Cloud TPU API is Google's own. Its channel leads to the emulator of the API, in this process; the
emulator's state is the list of all requests so far, in a file, so that it outlives the provisioner's process.
"""

import io
import itertools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from iris_ray.capacity import provisioner as module
from iris_ray.capacity.board import CapacityBoard
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Settings
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, Source
from iris_ray.capacity.provisioner import Jobs, Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.errors import ControllerUnavailableError, ProvisionerTakenError
from iris_ray.model.topology import get_tpu_config
from tests.proofs.every_operation.operations import NoAnswerError, Operations
from tests.proofs.every_operation.runs import Scenario

TYPE, WANTED, TURN_S = "v6e-16", 2, 60.0
STORY = (*["wanted"] * 6, *["one used"] * 4, *["unused"] * 5)
"""What the cluster's jobs do with slices, turn by turn."""


def provisioner() -> Scenario:
    return Scenario(
        "provisioner",
        lambda place: _Cloud(place).advance(),
        lambda place, said, operations: _act(place, operations),
        _judge,
        (),
        {"a new name for each try": _name_anew, "what is closed to jobs stays closed": _close_for_ever},
    )


class _Cloud:
    """The emulated API. Its methods are called with the bytes of requests, which are kept.

    Args:
        place: the directory of its file.
    """

    def __init__(self, place: Path) -> None:
        from iris_ray.testing.cloud_tpu_server.server import TpuApi
        from iris_ray.testing.cloud_tpu_server.zone import Zone

        self._file = str(place / "requests")
        self.zone = Zone()
        self._methods = TpuApi(self.zone).methods()["google.cloud.tpu.v2.Tpu"]
        self.requests: list[tuple[str, bytes]] = []
        self.most = 0
        self.used: str | None = None
        try:
            with io.FileIO(self._file) as file:
                data = file.readall()
        except FileNotFoundError:
            return
        stream = io.BytesIO(data)
        while stream.tell() < len(data):
            self._apply(*pickle.load(stream))

    def ask(self, method: str, request: bytes) -> bytes:
        is_used = self.used is not None and self.used.encode() in request
        assert not (method.startswith("Delete") and is_used), f"{self.used} is deleted, and a job runs there"
        with io.FileIO(self._file, "a") as file:
            file.write(pickle.dumps((method, request)))
        return self._apply(method, request)

    def advance(self) -> None:
        self.ask("advance", b"")

    def states(self) -> dict[str, str]:
        return self.zone.queued_states()

    def _apply(self, method: str, request: bytes) -> bytes:
        from iris_ray.testing.cloud_tpu_server.server import raw
        from iris_ray.testing.cloud_tpu_server.zone import ApiRefusal

        self.requests.append((method, request))
        if method == "advance":
            self.zone.advance()
            return b""
        read, answer = self._methods[method]
        try:
            found: bytes = raw(answer(read(request))).SerializeToString()
        except ApiRefusal as refusal:
            return pickle.dumps(refusal)
        self.most = max(self.most, sum(state != "DELETING" for state in self.states().values()))
        return found


class _Channel:
    """The channel of Google's client. Each call is an operation.

    Args:
        cloud: answers.
        operations: count.
    """

    def __init__(self, cloud: _Cloud, operations: Operations | None) -> None:
        self._cloud = cloud
        self._operations = operations

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, *_: Any, **__: Any) -> Any:
        import grpc

        method = path.rpartition("/")[2]

        class Refused(grpc.RpcError):
            def __init__(self, code: Any, why: str) -> None:
                super().__init__(why)
                self.code = lambda: code
                self.details = lambda: why
                self.trailing_metadata = tuple

            def result(self) -> Any:
                raise self

        def ask(request: Any, *_: Any, **__: Any) -> Any:
            data, was_asked = request_serializer(request), False

            def asked() -> bytes:
                nonlocal was_asked
                was_asked = True
                return self._cloud.ask(method, data)

            kind = "request read" if method.startswith(("Get", "List")) else "request write"
            try:
                answer = asked() if self._operations is None else self._operations.do(kind, asked)
            except NoAnswerError:
                is_refusal = kind == "request write" and not was_asked
                code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_refusal else grpc.StatusCode.UNAVAILABLE
                raise Refused(code, "a fault") from None
            if answer.startswith(b"\x80"):
                refusal = pickle.loads(answer)
                raise Refused(refusal.code, str(refusal))
            return response_deserializer(answer)

        ask.with_call = lambda *given, **more: (ask(*given, **more), None)  # type: ignore[attr-defined]
        return ask


class _PaperJobs(Jobs):
    """The cluster's jobs. What the Controller knows of the provisioner outlives both, in a file.

    Args:
        place: the directory of the file.
        cloud: the slices that are active have joined.
        now: the time.
        operations: count the questions to the Controller.
    """

    def __init__(self, place: Path, cloud: _Cloud, now: Callable[[], float], operations: Operations | None) -> None:
        self._file = str(place / "controller")
        self._cloud = cloud
        self._operations = operations
        self.board = CapacityBoard(SimpleNamespace(now=now))  # type: ignore[arg-type]
        self._now = now
        self._closed_until: dict[str, float] = {}
        self.used: str | None = None
        self.phase = STORY[0]
        try:
            with io.FileIO(self._file) as file:
                self.board._leases, self._closed_until, self.used = pickle.loads(file.readall())
        except FileNotFoundError:
            pass

    @property
    def closed(self) -> dict[str, float]:
        """The slices that are closed to jobs, and until when."""
        for name in [name for name, until in self._closed_until.items() if until <= self._now()]:
            del self._closed_until[name]
        return self._closed_until

    def begin(self, phase: str) -> None:
        """Jobs do something else from now on."""
        self.phase = phase
        active = sorted(name for name, state in self._cloud.states().items() if state == "ACTIVE")
        if (
            phase == "one used"
            and self.used is None
            and (open_ := [name for name in active if name not in self.closed])
        ):
            self.used = open_[0]
        if phase == "unused":
            self.used = None
        self._cloud.used = self.used
        self._keep()

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        def look() -> tuple[Sequence[WaitingGang], Mapping[str, Joined]]:
            active = [name for name, state in self._cloud.states().items() if state == "ACTIVE"]
            missing = max(0, WANTED - len(active)) if self.phase == "wanted" else 0
            in_use = set(active) if self.phase == "wanted" and not missing else {self.used}
            joined = {name: Joined(True, name in in_use, name in self.closed) for name in active}
            return [WaitingGang(TYPE, missing, "job")] if missing else [], joined

        found: tuple[Sequence[WaitingGang], Mapping[str, Joined]] = self._ask("request read", look)
        return found

    def lease(self, owner: str, instance: str, seconds: float) -> bool:
        return self._ask("request write", lambda: self.board.lease(owner, instance, seconds))

    def report(self, report: CapacityReport) -> None:
        self._ask("request write", lambda: self.board.take(report))

    def close(self, name: str) -> None:
        self._ask("request write", lambda: self.closed.update({name: self._now() + module.CLOSED_S}))

    def reopen(self, name: str) -> None:
        self._ask("request write", lambda: self.closed.pop(name, None))

    def _ask(self, kind: str, work: Callable[[], Any]) -> Any:
        def done() -> Any:
            found = work()
            self._keep()
            return found

        try:
            return done() if self._operations is None else self._operations.do(kind, done)
        except NoAnswerError:
            raise ControllerUnavailableError("the Controller does not answer") from None

    def _keep(self) -> None:
        with io.FileIO(self._file, "w") as file:
            file.write(pickle.dumps((self.board._leases, self._closed_until, self.used)))


class _World:
    """A provisioner with its cloud and its cluster, and a clock that goes on by `TURN_S` for each turn."""

    def __init__(self, place: Path, operations: Operations | None = None, began: float = 1e6) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import tpu_v2
        from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

        from iris_ray.capacity import cloud_tpu
        from iris_ray.capacity.google_api import Patience

        self.now = began
        clock = SimpleNamespace(time=lambda: 1.7e9 + self.now, monotonic=lambda: self.now)
        setattr(module, "time", clock)  # noqa: B010
        self.cloud = _Cloud(place)
        client = cloud_tpu.CloudTpu(self.cloud.zone.location)
        channel = _Channel(self.cloud, operations)
        transport = TpuGrpcTransport(channel=lambda *_, **__: channel, credentials=AnonymousCredentials())
        client._made = tpu_v2.TpuClient(transport=transport)
        for name in ("queued_slices", "create", "delete"):
            getattr(cloud_tpu.CloudTpu, name).__defaults__ = (Patience(0.01, 0.01),)  # no second try
        self.jobs = _PaperJobs(place, self.cloud, lambda: self.now, operations)
        settings = Settings(
            "ann", (get_tpu_config(TYPE),), (Source(client.location, Market.SPOT),), least=0, most=4, idle_s=0.0
        )
        hosts = HostSettings("v2-alpha-tpuv6e", {OWNER_LABEL: "ann"}, "#!/bin/sh")
        self.provisioner = Provisioner(settings, [client], self.jobs, hosts)
        self.provisioner._say = lambda *_, **__: None  # type: ignore[method-assign]

    def turn(self, phase: str) -> None:
        self.jobs.begin(phase)
        self.provisioner.try_turn()
        self.cloud.advance()
        self.now += TURN_S


def _act(place: Path, operations: Operations) -> None:
    world = _World(place, operations)
    for phase in STORY:
        world.turn(phase)


def _judge(place: Path, said: list[list[Any]]) -> None:
    """Come back with a new provisioner, once the lease of the old one is over, and play the rest of the story."""
    _require_nothing_hurt(place)
    early = _World(place, began=1e6 + 1)
    if early.jobs.board._leases:  # the old one may still work
        asked = len(early.cloud.requests)
        try:
            early.provisioner.turn()
            raise AssertionError("two provisioners of one name work")
        except ProvisionerTakenError:
            assert len(early.cloud.requests) == asked
    later = _World(place, began=2e6)
    phase = "wanted" if later.jobs.used is None and len(later.cloud.requests) < 40 else "one used"
    for word in (*[phase] * 6, *["one used"] * 4):
        later.turn(word)
    states = later.cloud.states()
    assert states == {later.jobs.used: "ACTIVE"}, (states, later.jobs.used)
    for _ in range(6):
        later.turn("unused")
    assert not later.cloud.states(), f"forgotten: {later.cloud.states()}"
    assert not later.jobs.closed, f"closed to jobs for ever: {later.jobs.closed}"
    _require_nothing_hurt(place)


def _require_nothing_hurt(place: Path) -> None:
    """Raise AssertionError if there were too many slices at any time, or one that was used was deleted."""
    cloud = _Cloud(place)
    assert cloud.most <= WANTED, f"{cloud.most} slices at a time for a gang of {WANTED}"


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _name_anew() -> None:
    from iris_ray.capacity.cloud_tpu import CloudTpu

    create, numbers = CloudTpu.create, itertools.count()

    def created(cloud: Any, wanted: Any, *more: Any) -> Any:
        from dataclasses import replace

        return create(cloud, replace(wanted, name=f"{wanted.name}-{next(numbers)}"), *more)

    CloudTpu.create = created  # type: ignore[method-assign, assignment]


def _close_for_ever() -> None:
    module.CLOSED_S = math.inf
