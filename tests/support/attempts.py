"""An attempt's surroundings as plain coroutines: a slice whose tasks do what a test says, and a Controller."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.pool.attempt import Attempt
from iris_ray.actors.pool.attempt_place import AttemptContext, AttemptPlace
from iris_ray.actors.pool.services import Pool, pool_parts
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import (
    AttemptOrder,
    GangProgress,
    HostPlace,
    PoolProcess,
    ProcessSpec,
    Progress,
    RunRequest,
)
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import EndKind, HostEvidence, ProviderWord, TaskEnd
from tests.support.worlds import gang_spec


class Host:
    """A host of the slice. Its SliceActor tells its task."""

    async def hear_notice(self, attempt: AttemptId, notice: Notice, sent_at: float) -> None: ...


class Slices:
    """One slice. Its tasks run until `returns` or `crashes`, and have saved once `saves`.

    Attributes:
        hosts: how many.
        steps: what each running task says of itself, by host index.
        patience: what hosts were given to answer; seconds.
    """

    def __init__(self, hosts: int = 1) -> None:
        self.hosts = hosts
        self.returns = asyncio.Event()
        self.crashes = asyncio.Event()
        self.saves = False
        self.steps = {i: Progress(None, None) for i in range(hosts)}
        self.patience: list[float] = []
        self.ends: dict[int, TaskEnd] = {}

    def actor(self, name: str) -> Actor[Any]:
        assert name == "a"
        return Actor.here(self, "slice a")

    def host_actors(self, name: str) -> tuple[Actor[Any], ...]:
        return tuple(Actor.here(Host(), f"slice {name} host {i}") for i in range(self.hosts))

    def __contains__(self, name: str) -> bool:
        return name == "a"

    def take_processes(self, names: list[str]) -> dict[str, int]:
        return dict.fromkeys(names, 1)

    # -- what its SliceActor answers -------------------------------------------------------------------------------

    async def ping(self) -> None: ...

    async def run_remote_fn(
        self, attempt: AttemptId, generation: int, launches: object, silence_s: float
    ) -> dict[int, TaskEnd]:
        ways = {asyncio.ensure_future(event.wait()) for event in (self.returns, self.crashes)}
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        kind = EndKind.CRASHED if self.crashes.is_set() else EndKind.RETURNED
        self.ends = {i: TaskEnd(kind, time.time(), b"") for i in range(self.hosts)}
        return self.ends

    async def notify(self, attempt: AttemptId, notice: Notice, sent_at: float) -> tuple[bool, bool]:
        while not self.saves and time.time() < notice.deadline:
            await asyncio.sleep(0.01)
        return self.saves, self.saves

    async def introduce(self, attempt: AttemptId, peers: object) -> None: ...

    async def progress(self, attempt: AttemptId) -> dict[int, Progress]:
        return dict(self.steps)

    async def last_progress(self, attempt: AttemptId, host: int) -> Progress | None:
        return self.steps.get(host)

    async def ask_of_each(
        self, attempt: AttemptId, service: str, method: str, within_s: float
    ) -> dict[int, tuple[Any, float]]:
        return dict.fromkeys(self.steps, (Unreachable("it is not asked"), 0.0))

    async def healthy(self, patience_s: float) -> dict[int, None]:
        self.patience.append(patience_s)
        return dict.fromkeys(range(self.hosts))

    async def stop(self, attempt: AttemptId, reason: str | None, exit_grace: float) -> dict[int, TaskEnd]:
        stopped = TaskEnd(EndKind.STOPPED, time.time(), error=reason or "")
        return self.ends or dict.fromkeys(range(self.hosts), stopped)


class Controller:
    """What it knows of the growth, and how often it was asked for that; what it knows of host 0, once it is `there`."""

    def __init__(self, is_to_grow: bool = True, draining: str | None = None) -> None:
        self.grows = is_to_grow
        self.asked = 0
        self.there = True
        self.draining = draining
        self.heard: list[GangProgress] = []
        self.sender = PoolProcess("pool", 1)

    async def ask_once(self, question: Callable[..., Any], *args: Any) -> Any:
        return await getattr(self, question.__name__)(*args)

    async def note_progress(self, progress: GangProgress, sender: PoolProcess) -> Unreachable | None:
        if not self.there:
            return Unreachable("it is just coming back")
        self.heard.append(progress)
        return None

    async def is_to_grow(self, attempt: AttemptId) -> bool:
        assert attempt == AttemptId("job", 3)
        self.asked += 1
        return self.grows

    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence] | Unreachable:
        if not self.there:
            return Unreachable("it is just coming back")
        return {"node-0": HostEvidence(draining=self.draining)}

    async def provider_words(self, node_ids: list[str]) -> dict[str, ProviderWord]:
        return {}


BACKGROUND = BackgroundTasks()
"""Runs the services of all attempts."""


def new_attempt(
    slices: Slices, controller: Controller, stall_timeout: float | None = None, silence_s: float = 5.0
) -> Attempt:
    """Attempt 3 of a job on that slice."""
    hosts = tuple(HostPlace(f"node-{i}", f"10.0.0.{i}", "a", i) for i in range(slices.hosts))
    order = AttemptOrder(AttemptId("job", 3), (hosts,), {"TPU": 4.0}, 1, 1)
    services = pool_parts(Pool(controller))  # type: ignore[arg-type]
    for work, what in services.works():
        BACKGROUND.start(work, what)
    request = RunRequest(gang_spec(), b"", {}, ProcessSpec(), 60.0, stall_timeout, silence_s)
    return Attempt(slices, controller, services, request, order)  # type: ignore[arg-type]


def new_context(order: AttemptOrder, slices: Any, controller: Any) -> AttemptContext:
    """An attempt of that order."""
    return AttemptContext(
        AttemptPlace(order), slices, controller, RunRequest(gang_spec(), b"", {}, ProcessSpec(), 60.0)
    )
