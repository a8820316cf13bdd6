"""Two async operations are cancelled at each point where they wait: a job is submitted, and the front is asked."""

import asyncio
import contextlib
import http.client
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.actors.controller import controller_process
from iris_ray.actors.controller import journal as journal_module
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.controller.event_processor import EventProcessor
from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.actors.controller.pool_registry import Pool
from iris_ray.model.lifecycle import JobState
from iris_ray.slots.front import ApiKey, HttpFront
from iris_ray.slots.front.api_keys import KeyUse
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario
from tests.support.http_fronts import Client, asked, bearer
from tests.support.ray_in_process import Store
from tests.support.worlds import gang_spec

KEY = ApiKey("alice", "a" * 20, at_a_time=1)
SETTLE_S = 5.0
REQUESTS = asked("one two"), asked("one two", stream=True), asked("one", user="u" * 2**20)


def serving() -> Scenario:
    return Scenario(
        "serving",
        lambda place: None,
        _act,
        lambda place, said: None,
        (),
        {
            "a cancelled request counts for ever": _keep_running,
            "a writing ends with its caller": _no_shield,
        },
    )


def _act(place: Path, said: Said, operations: Operations) -> None:
    count = operations.do

    def do(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return count(name, function, *args, **kwargs) if name == "await" else function(*args, **kwargs)

    operations.do = do  # type: ignore[method-assign]
    asyncio.run(_submit(operations))
    _ask(operations)


# -- a job is submitted ------------------------------------------------------------------------------------------------


class Silent:
    """A pool that runs, and answers nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())


class SlowStore(Store):
    """A store whose writes take some turns of the loop."""

    async def add(self, key: str, value: bytes) -> bool:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().add(key, value)


async def _submit(operations: Operations) -> None:
    store = SlowStore()
    setattr(journal_module, "ClusterStore", lambda: store)  # noqa: B010
    setattr(controller_process, "installed_services", tuple)  # noqa: B010
    Pool.is_one = staticmethod(lambda handle: True)  # type: ignore[method-assign]
    for name in (name for name in vars(Store) if not name.startswith("_")):
        setattr(ClusterStore, name, staticmethod(getattr(store, name)))
    failed: list[str] = []
    controller = Controller(lambda: NodeTable((), {}, {}), lambda: failed.append("ended"), lambda: None)
    await controller.ping()
    spec = gang_spec("job", user="ann")
    first = asyncio.create_task(_awaited(operations, Controller.submit(controller, spec, Silent(), 1)))
    beside = asyncio.create_task(Controller.submit(controller, gang_spec("other", user="ann"), Silent(), 1))
    await asyncio.wait([first, beside])
    if not first.cancelled():
        assert first.result() is JobState.PENDING
    assert beside.result() is JobState.PENDING, "nobody else is hurt"
    assert await Controller.submit(controller, spec, Silent(), 1) is JobState.PENDING
    controller._state.check()
    assert not failed
    assert set(controller._state.jobs) == {"job", "other"}
    records, _ = journal_module.Journal().begin()
    assert {record.job.spec.job_id for record in records} == {"job", "other"}, "both are recorded"


async def _awaited(operations: Operations, work: Any) -> Any:
    return await operations.awaited(work)


# -- the front is asked ------------------------------------------------------------------------------------------------


def _ask(operations: Operations) -> None:
    answers = HttpFront._answers

    def counted(front: HttpFront, route: Any) -> Any:
        handle = answers(front, route)

        async def handled(request: web.Request) -> web.StreamResponse:
            response: web.StreamResponse = await operations.awaited(handle(request))  # type: ignore[arg-type]
            return response

        return handled

    HttpFront._answers = counted  # type: ignore[method-assign, assignment]
    client: Any = Client()
    client.models = ["m"]
    with HttpFront(client, keys=[KEY]) as front:
        tasks = _tasks(front)
        for body in (*REQUESTS, *REQUESTS):
            with contextlib.suppress(http.client.HTTPException, ConnectionError):
                _post(front, body)
            _until(lambda: not _left(front) and _tasks(front) <= tasks, lambda: (_left(front), _tasks(front) - tasks))
        HttpFront._answers = answers  # type: ignore[method-assign]
        assert _post(front, REQUESTS[0]) == 200, "the key's only request at a time is free again"
    HttpFront._answers = answers  # type: ignore[method-assign]


def _post(front: HttpFront, body: bytes) -> int:
    connection = http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=10)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **bearer(KEY.secret)})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _left(front: HttpFront) -> dict[str, Any]:
    """Return what counts as running in a front, without what is 0."""
    found = {
        "requests": len(front._running._scopes),
        "of keys": sum(use.running for use in front._keys._uses.values()),
        "measured": front._metrics._running._value.get(),
        "parsing": front._parser._turns._held.total(),
    }
    return {name: value for name, value in found.items() if value}


def _tasks(front: HttpFront) -> set[str]:
    async def names() -> set[str]:
        return {str(task.get_coro()).partition(" at ")[0] for task in asyncio.all_tasks() - {asyncio.current_task()}}

    return asyncio.run_coroutine_threadsafe(names(), front._loop).result(10)


def _until(holds: Callable[[], bool], shown: Callable[[], object]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not holds():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.01)


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _keep_running() -> None:
    @contextlib.contextmanager
    def request(use: KeyUse, now: float) -> Any:
        use._take(now)
        use.running += 1
        yield
        use.running -= 1

    KeyUse.request = request  # type: ignore[method-assign, assignment]


def _no_shield() -> None:
    async def recorded(processor: EventProcessor, events: Any) -> None:
        await processor.apply(events)

    EventProcessor.recorded = recorded  # type: ignore[method-assign, assignment]
