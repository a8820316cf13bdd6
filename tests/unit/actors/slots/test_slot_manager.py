"""What a SlotManager does when something goes wrong. Slots and runners stand aside; its event loop is real."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError

from iris_ray.actors.slots import slot_manager, slot_processes
from iris_ray.actors.slots.messages import Ask, Maker, ModelOrder
from iris_ray.actors.slots.pieces import MOST_PIECES, Piece, packed
from iris_ray.actors.slots.slot_manager import SlotManager
from iris_ray.actors.slots.slot_request import SlotRequest
from iris_ray.errors import InvalidSlotError, JobCancelledError, RequestLostError, SlotQueueFullError
from iris_ray.slots import events as ev
from iris_ray.slots.devices import DeviceKind
from iris_ray.slots.models import ModelSpec
from iris_ray.slots.serving_policy import ServingPolicy
from tests.support.slots import host_here

MAKER = Maker("ann", "job", "worker", "process 1 on host")
NO_PORT = "address not available"
HANGS = "its load never ends"


class Method:
    """A method of an actor: ``remote`` and ``options`` are all that is used of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function

    def options(self, **_: Any) -> "Method":
        return self


class Slot:
    """Stands for a `SlotActor`. It answers once it is told to."""

    def __init__(self, number: int, why_not: str | None) -> None:
        self.number = number
        self.meets_at = ""
        self.leads: list[Slot] = []
        self.pieces = 3
        self.sent = 0
        self.stopped: list[str] = []
        self.requests: list[SlotRequest] = []
        self._why_not = why_not
        self.may_answer = asyncio.Event()
        self.killed = asyncio.Event()
        for name in ("identity", "lead", "load", "watch", "unload", "serve", "stream", "stop"):
            setattr(self, name, Method(getattr(self, f"_{name}")))

    async def _identity(self) -> int:
        return self.number

    async def _lead(self, followers: "Sequence[Slot]") -> str:
        if self._why_not == NO_PORT:
            raise RayTaskError("lead", "", OSError(NO_PORT))
        self.leads = list(followers)
        return "10.0.0.1:1"

    async def _load(self, pickled: bytes, meeting: str) -> str | None:
        self.meets_at = meeting
        if self._why_not == HANGS:
            await self.killed.wait()
        return self._why_not

    async def _watch(self) -> None:
        await self.killed.wait()
        raise RayError("killed")

    async def _unload(self) -> None:
        await self.killed.wait()

    async def _stop(self, request_id: str) -> None:
        self.stopped.append(request_id)

    async def _serve(self, request: SlotRequest, payload: bytes) -> Piece:
        self.requests.append(request)
        await self.may_answer.wait()
        return packed(self.number)

    async def _stream(self, request: SlotRequest, payload: bytes) -> AsyncIterator[Awaitable[Piece]]:
        await self.may_answer.wait()
        for piece in range(self.pieces):
            await asyncio.sleep(0.01 if self.pieces == 3 else 0.0)
            self.sent += 1
            yield self._piece(piece)

    async def _piece(self, piece: int) -> Piece:
        return packed((self.number, piece))


class Slots:
    """Makes them, unless it fails to."""

    def __init__(self) -> None:
        self.made: list[Slot] = []
        self.loads: list[str | None] = []
        self.fails = False

    def options(self, **_: Any) -> "Slots":
        return self

    def remote(self, variables: Any) -> Slot:
        if self.fails:
            raise ValueError("placement group bundle index 0 is invalid")
        self.made.append(Slot(len(self.made), self.loads.pop(0) if self.loads else None))
        return self.made[-1]


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    made = Slots()
    monkeypatch.setattr(slot_processes, "_slot_actor", lambda seats: made)
    monkeypatch.setattr("ray.kill", lambda slot: slot.killed.set())
    return made


async def forever(*_: Any) -> None:
    await asyncio.Event().wait()


async def manager_of(*runners: str, **policy: Any) -> SlotManager:
    manager = SlotManager(ServingPolicy(**policy), MAKER)
    for name in runners:
        agent = SimpleNamespace(
            watch=Method(forever), wait_gone=Method(lambda *_: true()), alive=Method(lambda known: all_of(known))
        )
        here = host_here(name, agent)
        manager._background.start(manager.keep_runner(here), "keeping a runner")
    await asyncio.sleep(0.01)
    return manager


async def true() -> bool:
    return True


async def all_of(known: Any) -> set[Any]:
    return set(known)


def order(name: str = "m", **spec: Any) -> ModelOrder:
    return ModelOrder(ModelSpec(name, {1: 60 * 10**9}, **spec), b"", 0)


def ask(request_id: str, model: str = "m", **how: Any) -> Ask:
    return Ask(request_id, model, b"", **how)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_slot_that_can_not_be_made_stops_no_other_and_not_the_clock(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(order())
        slots.fails = True
        waits = asyncio.ensure_future(manager.submit(ask("r")))
        await asyncio.sleep(0.05)
        assert not waits.done()
        slots.fails = False
        await until(lambda: slots.made)  # after a pause: it is the timer that has it made
        slots.made[0].may_answer.set()
        assert (await waits).open() == 0

    asyncio.run(story())


def test_a_runner_reports_the_slots_that_it_has_until_they_have_ended(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(order())
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: manager._core.active.by_id)
        (slot,) = manager._core.fleet.slots.values()
        home = slot.allocation.runner_id
        alive = {
            name: await manager._processes.alive_on(name, runner) for name, runner in manager._runners.by_id.items()
        }
        assert alive == {"a": {}, "b": {}} | {home: {slot.slot_id: slot.identity}}
        slots.made[0].may_answer.set()
        await answer
        slots.made[0].killed.set()
        await until(lambda: not manager._core.fleet.slots)
        assert await manager._processes.alive_on(home, manager._runners.by_id[home]) == {}

    asyncio.run(story())


def test_pieces_of_two_slots_are_never_mixed(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b", drain_s=0.05)
        await manager.register(order())

        async def read() -> list[Any]:
            return [piece.open() async for piece in manager.stream(ask("r"))]

        reads = asyncio.ensure_future(read())
        await until(lambda: slots.made)
        await asyncio.sleep(0.05)
        (slot_id,) = manager._core.fleet.slots
        await manager.evict(slot_id)
        await asyncio.sleep(0.06)
        manager._hear(ev.Tick())  # it has overrun its time; the request is for another slot, and this one still runs
        await until(lambda: len(slots.made) == 2)
        await asyncio.sleep(0.05)
        for slot in slots.made:
            slot.may_answer.set()
        assert await reads == [(1, 0), (1, 1), (1, 2)]

    asyncio.run(story())


def test_a_name_that_is_registered_for_another_adapter_leaves_nothing_of_the_first(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order(lora="v1"))
        await manager.register(order(lora="v2"))
        await manager.remove("m")
        assert manager._core.models == {}
        assert manager._orders == {}

    asyncio.run(story())


def test_a_request_that_is_refused_leaves_nothing_behind(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        for _ in range(2):
            with pytest.raises(InvalidSlotError, match="not a number"):
                (await manager.submit(ask("r", timeout_s=float("nan")))).open()
        assert manager._waiting == {}

    asyncio.run(story())


def test_a_slot_is_told_which_attempt_of_a_request_it_is(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made and slots.made[0].requests)
        slots.made[0].killed.set()
        await until(lambda: len(slots.made) == 2)
        slots.made[1].may_answer.set()
        assert (await answer).open() == 1
        assert [slot.requests for slot in slots.made] == [[SlotRequest("r", 1)], [SlotRequest("r", 2)]]

    asyncio.run(story())


async def stops_at(slot: Slot, pieces: int) -> None:
    await until(lambda: slot.sent == pieces)
    await asyncio.sleep(0.02)
    assert slot.sent == pieces


def test_a_model_waits_for_a_caller_who_takes_no_pieces_and_not_for_one_who_is_gone(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        pieces = manager.stream(ask("r"))
        first = asyncio.ensure_future(anext(pieces))
        await until(lambda: slots.made)
        slots.made[0].pieces = 300
        slots.made[0].may_answer.set()
        await first
        await stops_at(slots.made[0], MOST_PIECES + 1)
        await manager.taken("r", 10)
        await stops_at(slots.made[0], MOST_PIECES + 11)
        await manager.cancel("r")
        await until(lambda: slots.made[0].sent == 300)
        assert slots.made[0].stopped == ["r"]
        with pytest.raises(JobCancelledError):
            [piece.open() async for piece in pieces]
        await until(lambda: not manager._core.active.by_id)

    asyncio.run(story())


def test_the_requests_of_a_client_that_is_gone_are_given_up(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_manager, "CLIENTS_LOOK_S", 0.01)

    async def story() -> None:
        manager = await manager_of("a", silence_s=0.1)
        await manager.start((), ())
        await manager.register(order(concurrency=3))
        gone, stays, nobodys = (
            asyncio.ensure_future(manager.submit(ask(name, client_id=client)))
            for name, client in (("r", "gone"), ("s", "stays"), ("t", ""))
        )
        await until(lambda: len(manager._core.active.by_id) == 3)
        while not gone.done():
            await manager.renew("stays", {})
            await asyncio.sleep(0.02)
        with pytest.raises(JobCancelledError):
            gone.result().open()
        assert slots.made[0].stopped == ["r"]
        slots.made[0].may_answer.set()
        assert ((await stays).open(), (await nobodys).open()) == (0, 0)

    asyncio.run(story())


def test_a_request_that_comes_after_its_cancelling_does_not_run(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        await manager.cancel("large")
        with pytest.raises(JobCancelledError):
            (await manager.submit(ask("large"))).open()
        assert len(manager._core.queue) == 0

    asyncio.run(story())


def test_a_request_is_refused_if_too_many_bytes_wait(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of(most_waiting_bytes=10)
        await manager.register(order())
        waits = asyncio.ensure_future(manager.submit(replace(ask("r"), payload=b"12345678")))
        await until(lambda: len(manager._core.queue) == 1)
        with pytest.raises(SlotQueueFullError, match=r"8 bytes of requests wait already, and this one has 3"):
            (await manager.submit(replace(ask("s"), payload=b"123"))).open()
        waits.cancel()

    asyncio.run(story())


def test_a_slot_that_uses_more_memory_than_its_model_said_raises_an_alarm_once_a_minute(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Sequence[Any]] = []

    async def memory(processes: Sequence[Any]) -> int:
        seen.append(processes)
        return 70 * 10**9

    async def story() -> None:
        manager = await manager_of()
        watches = {"watch": Method(forever), "wait_gone": Method(lambda *_: true()), "alive": Method(all_of)}
        agent = SimpleNamespace(**watches, memory=Method(memory))
        here = host_here("c", agent, kind=DeviceKind.CPU)
        manager._background.start(manager.keep_runner(here), "keeping a runner")
        await until(lambda: seen == [[]])
        await manager.register(order(kind=DeviceKind.CPU))
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made and slots.made[0].requests)
        await manager._report("c")
        assert seen == [[]]
        monkeypatch.setattr(slot_manager, "MEMORY_LOOK_S", 0.0)
        caplog.clear()
        await manager._report("c")
        assert seen == [[], [0]]
        slots.made[0].may_answer.set()
        await answer

    asyncio.run(story())
    (alarm,) = [record.message for record in caplog.records if "booked" in record.message]
    assert alarm == "runner c: device 0 uses 70,000,000,000 bytes, but slots have only 60,000,000,000 booked"


async def manager_of_a_slice() -> SlotManager:
    manager = SlotManager(ServingPolicy(), MAKER)
    for host in range(2):
        agent = SimpleNamespace(
            watch=Method(forever), wait_gone=Method(lambda *_: true()), alive=Method(lambda known: all_of(known))
        )
        manager._background.start(manager.keep_runner(host_here("t", agent, host=host, hosts=2)), "keeping a host")
    await manager.register(ModelOrder(ModelSpec("m", {8: 10**9}, kind=DeviceKind.TPU), b"", 0))
    return manager


def test_a_slot_of_a_slice_has_a_process_on_each_host_and_ends_with_one_of_them(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of_a_slice()
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: len(slots.made) == 2 and manager._core.active.by_id)
        assert [slot.meets_at for slot in slots.made] == ["10.0.0.1:1", "10.0.0.1:1"]
        assert slots.made[0].leads == [slots.made[1]]
        slots.made[1].killed.set()
        await until(lambda: len(slots.made) == 4)
        assert slots.made[0].killed.is_set()
        slots.made[2].may_answer.set()
        assert (await answer).open() == 2

    asyncio.run(story())


@pytest.mark.parametrize(
    ("loads", "said"), [((HANGS, "no weights"), "no weights"), ((NO_PORT, None), f"its hosts can't meet: {NO_PORT}")]
)
def test_a_host_that_cannot_load_fails_the_slot_though_the_others_wait_for_it(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, loads: tuple[str | None, ...], said: str
) -> None:
    monkeypatch.setattr(slot_processes, "UNLOAD_S", 0.01)

    async def story() -> None:
        slots.loads = [*loads]
        manager = await manager_of_a_slice()
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made and slots.made[0].killed.is_set())
        assert manager._core.models[manager._identity("m")].last_failure == said
        answer.cancel()

    asyncio.run(story())


def test_an_unload_that_fails_on_one_host_cuts_off_no_other_hosts(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of_a_slice()
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: len(slots.made) == 2 and manager._core.active.by_id)
        slots.made[0].may_answer.set()
        await answer
        unloaded: list[str] = []

        async def fails() -> None:
            raise RayTaskError("unload", "", OSError("the disk is full"))

        async def unloads() -> None:
            await asyncio.sleep(0.02)
            unloaded.append("second")

        slots.made[0].__dict__["unload"], slots.made[1].__dict__["unload"] = Method(fails), Method(unloads)
        await manager.evict(*manager._core.fleet.slots)
        await until(lambda: slots.made[1].killed.is_set())
        assert unloaded == ["second"]

    asyncio.run(story())


def test_adapters_of_one_class_are_served_under_names_of_their_own(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(order("llama+a", lora="/a"))
        await manager.register(order("llama+b", lora="/b"))
        answers = [asyncio.ensure_future(manager.submit(ask(name, name))) for name in ("llama+a", "llama+b")]
        await until(lambda: len(slots.made) == 2)
        for slot in slots.made:
            slot.may_answer.set()
        assert {(await answer).open() for answer in answers} == {0, 1}
        served = {str(slot.identity) for slot in manager._core.fleet.slots.values()}
        assert served == {"llama+a with /a", "llama+b with /b"}

    asyncio.run(story())


def test_a_request_is_not_forgotten_with_an_earlier_one_of_its_id(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", drain_s=0.05)
        await manager.register(order())
        first = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made and slots.made[0].requests)
        await manager.cancel("r")  # a function goes on all the same
        with pytest.raises(JobCancelledError):
            (await first).open()
        (slot_id,) = manager._core.fleet.slots
        await manager.evict(slot_id)
        await asyncio.sleep(0.1)
        manager._hear(ev.Tick())  # it has had its time: its end is ordered
        second = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: "r" in manager._core.queue)
        slots.made[0].may_answer.set()  # the first one ends while its process unloads
        await asyncio.sleep(0.05)
        slots.made[0].killed.set()
        await until(lambda: len(slots.made) == 2)
        slots.made[1].may_answer.set()
        assert (await second).open() == 1

    asyncio.run(story())


def test_a_stream_of_which_the_caller_has_had_a_part_does_not_run_again(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(replace(order(), replicas=2))
        await until(lambda: [each.state.value for each in manager._core.fleet.slots.values()] == ["ready"] * 2)
        ran: list[Slot] = []

        def answers_until_killed(slot: Slot) -> None:
            async def stream(request: SlotRequest, payload: bytes) -> AsyncIterator[Awaitable[Piece]]:
                ran.append(slot)  # as user code runs up to its first piece
                yield slot._piece(0)
                await slot.killed.wait()
                raise RayError("killed")

            vars(slot)["stream"] = Method(stream)

        for slot in slots.made:
            answers_until_killed(slot)
        pieces = manager.stream(ask("r"))
        (await anext(pieces)).open()
        ran[0].killed.set()  # the other slot has a free seat
        with pytest.raises(RequestLostError, match="cut off"):
            (await anext(pieces)).open()
        await asyncio.sleep(0.1)
        assert len(ran) == 1

    asyncio.run(story())


def test_a_slice_is_free_only_once_the_processes_on_all_of_its_hosts_are_gone(slots: Slots) -> None:
    gone = {0: False, 1: False}

    def agent_of(host: int) -> SimpleNamespace:
        async def alive(known: Any) -> set[str]:
            return set() if gone[host] else set(known)

        async def wait_gone(*_: Any) -> bool:
            await until(lambda: gone[host])
            return True

        return SimpleNamespace(watch=Method(forever), wait_gone=Method(wait_gone), alive=Method(alive))

    async def story() -> None:
        manager = SlotManager(ServingPolicy(), MAKER)
        for host in range(2):
            here = host_here("t", agent_of(host), host=host, hosts=2)
            manager._background.start(manager.keep_runner(here), "keeping a host")
        await manager.register(ModelOrder(ModelSpec("m", {8: 10**9}, kind=DeviceKind.TPU), b"", 0))
        waits = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: len(slots.made) == 2 and manager._core.active.by_id)
        gone[1] = True  # that on host 0 still holds its chips
        slots.made[1].killed.set()
        await manager._report("t")
        await asyncio.sleep(0.2)
        assert len(slots.made) == 2
        gone[0] = True
        await until(lambda: len(slots.made) == 4)
        waits.cancel()

    asyncio.run(story())
