"""What a SlotManager does when something goes wrong."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from iris_ray.errors import InvalidSlotError, JobCancelledError, RequestLostError, SlotQueueFullError
from iris_ray.slots.actors import slot_manager, slot_processes
from iris_ray.slots.actors.messages import Ask, Grant, SlotHosts
from iris_ray.slots.actors.model_call import SlotRequest
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.actors.streams import MOST_PIECES, StreamEnd
from iris_ray.slots.actors.waiting import Clients
from iris_ray.slots.core import events as ev
from iris_ray.slots.core import reconciler, slot_planner
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.models import WorkloadKind
from iris_ray.slots.core.policy import RENEW_S
from tests.support.slot_processes import (
    Method,
    Slot,
    Slots,
    all_of,
    ask,
    forever,
    manager_of,
    order,
    pieces_of,
    serving,
    stand_in_agent,
    true,
    until,
)  # fmt: skip
from tests.support.slots import GB, host_here
from tests.support.virtual_time import in_virtual_time

# -- slots and requests -----------------------------------------------------------------------------------------------


async def test_slot_that_cannot_be_made_blocks_nothing_else(slots: Slots) -> None:
    manager = await serving("a", "b")
    slots.fails = True
    waits = asyncio.ensure_future(manager.submit(ask("r")))
    await asyncio.sleep(0.05)
    assert not waits.done()
    slots.fails = False
    await until(lambda: slots.made)  # after a pause: it is the timer that has it made
    slots.made[0].may_answer.set()
    assert (await waits).open() == 0


async def test_runner_reports_slots_until_they_have_ended(slots: Slots) -> None:
    manager = await serving("a", "b")
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: any(made.requests for made in slots.made))
    (slot,) = manager._core.fleet.slots.values()
    home = slot.allocation.runner_id
    alive = {name: await manager._processes.alive_on(name, runner) for name, runner in manager._runners.by_id.items()}
    assert alive == {"a": set(), "b": set()} | {home: {slot.slot_id}}
    slots.made[0].may_answer.set()
    await answer
    slots.made[0].killed.set()
    await until(lambda: not manager._core.fleet.slots)
    assert await manager._processes.alive_on(home, manager._runners.by_id[home]) == set()


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        ([SlotHosts(count=2)], DeviceKind.CPU),
        ([SlotHosts(tpu_type="v4-8")], DeviceKind.TPU),
        ([SlotHosts(), SlotHosts(kind=DeviceKind.GPU)], None),
        ([], None),
    ],
    ids=["cpu", "tpu", "several", "none"],
)
async def test_manager_tells_the_kind_of_its_hosts(hosts: Sequence[SlotHosts], kind: DeviceKind | None) -> None:
    manager = await manager_of()
    asked = asyncio.ensure_future(manager.kind())  # by a client that has found it before its hosts are known
    await asyncio.sleep(0)
    await manager.start(hosts, ())
    assert await asked is await manager.kind() is kind


async def test_models_come_and_go_in_one_step(slots: Slots) -> None:
    manager = await manager_of("a")
    await manager.register(order(lora="v1"))
    for _ in range(2):  # as after a lost answer
        await manager.change([order("n", lora="v2"), order("o")], ["m"])
        assert [row.model for row in (await manager.status()).models] == ["n", "o"]
    await manager.change([], ["n", "o"])
    assert (await manager.status()).models == ()
    assert manager._orders == {}


async def test_equal_spec_with_other_arguments_replaces_the_first(slots: Slots) -> None:
    manager = await serving("a", "b")
    old = asyncio.ensure_future(manager.submit(ask("old")))
    await until(lambda: slots.made and slots.made[0].requests)
    await manager.register(order())  # nothing has changed
    await manager.register(replace(order(), pickled=b"other"))
    new = asyncio.ensure_future(manager.submit(ask("new")))
    await until(lambda: len(slots.made) == 2 and slots.made[1].requests)
    for slot in slots.made:
        slot.may_answer.set()
    assert ((await old).open(), (await new).open()) == (0, 1)
    await until(slots.made[0].killed.is_set)
    assert not slots.made[1].killed.is_set()


async def test_refused_request_leaves_nothing_behind(slots: Slots) -> None:
    manager = await manager_of("a")
    await manager.register(order(memory={1: 90 * GB}))
    for _ in range(2):
        with pytest.raises(InvalidSlotError, match="fits on no runner"):
            (await manager.submit(ask("r"))).open()
    assert manager._waiting == {}


async def test_slot_is_told_attempt_number_of_request(slots: Slots) -> None:
    manager = await serving("a")
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: slots.made and slots.made[0].requests)
    slots.made[0].killed.set()
    await until(lambda: len(slots.made) == 2)
    slots.made[1].may_answer.set()
    assert (await answer).open() == 1
    assert [slot.requests for slot in slots.made] == [[SlotRequest("r", 1)], [SlotRequest("r", 2)]]


@in_virtual_time
async def test_requests_of_gone_client_are_given_up(slots: Slots) -> None:
    manager = await manager_of("a", silence_s=10.0)
    await manager.start((), ())
    await manager.register(order(concurrency=3))
    gone, stays, nobodys = (
        asyncio.ensure_future(manager.submit(ask(name, client_id=client)))
        for name, client in (("r", "gone"), ("s", "stays"), ("t", ""))
    )
    await until(lambda: slots.made and len(slots.made[0].requests) == 3)
    while not gone.done():
        await manager.renew("stays", {})
        await asyncio.sleep(RENEW_S + 0.1)
    with pytest.raises(JobCancelledError):
        gone.result().open()
    assert slots.made[0].stopped == ["r"]
    slots.made[0].may_answer.set()
    assert ((await stays).open(), (await nobodys).open()) == (0, 0)


async def test_request_arriving_after_its_cancellation_does_not_run(slots: Slots) -> None:
    manager = await serving("a")
    await manager.cancel("large")
    with pytest.raises(JobCancelledError):
        (await manager.submit(ask("large"))).open()
    assert [row.waiting for row in (await manager.status()).models] == [0]


async def test_cancelling_finished_request_spares_next_of_same_id(slots: Slots) -> None:
    manager = await serving("a")
    for _ in range(2):
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made)
        slots.made[0].may_answer.set()
        assert (await answer).open() == 0
        await manager.cancel("r")


async def test_request_is_refused_if_too_many_bytes_wait(slots: Slots) -> None:
    manager = await serving(most_waiting_bytes=10)
    waits = asyncio.ensure_future(manager.submit(replace(ask("r"), payload=b"12345678")))
    await until(lambda: len(manager._core.queue) == 1)
    with pytest.raises(SlotQueueFullError, match=r"8 bytes of requests wait already, and this one has 3"):
        (await manager.submit(replace(ask("s"), payload=b"123"))).open()
    waits.cancel()


async def test_slot_exceeding_its_memory_raises_alarm_once_a_minute(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Sequence[Any]] = []

    async def memory(processes: Sequence[Any]) -> int:
        seen.append(processes)
        return 70 * 10**9

    manager = await manager_of()
    watches = {"watch": Method(forever), "wait_gone": Method(lambda *_: true()), "alive": Method(all_of)}
    agent = SimpleNamespace(**watches, memory=Method(memory))
    here = host_here("c", agent, kind=DeviceKind.CPU)
    manager._background.start(manager.hold_host(here), "holding a host")
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
    (alarm,) = [record.message for record in caplog.records if "booked" in record.message]
    assert alarm == "runner c: device 0 uses 70,000,000,000 bytes, but slots have only 60,000,000,000 booked"


async def test_gpus_with_reported_memory_take_fitting_slots_and_show_use(
    slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    manager = await manager_of()
    unknown = SlotHosts(kind=DeviceKind.GPU, devices=2)
    assert SlotHosts(kind=DeviceKind.GPU, memory=5).runner.devices[0].memory == 5, "who gives it is believed"
    await manager.start([unknown], ["job"])
    await manager.register(order())
    await manager.register(order("large", memory={1: 90 * GB}))
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    large = asyncio.ensure_future(manager.submit(ask("l", "large")))
    await asyncio.sleep(0.05)
    assert not large.done(), "nobody knows yet how large the GPUs are"
    agent = stand_in_agent(80 * GB, 5)
    here = replace(host_here("gpu-0", agent), devices=2, gpus=("3", "5"), sizes=(80 * GB, 40 * GB))
    manager._background.start(manager.hold_host(here), "holding a host")
    await until(lambda: slots.made and slots.made[0].requests)
    with pytest.raises(InvalidSlotError, match=r"a runner has 80,000,000,000 \+ 40,000,000,000 bytes on 2\."):
        (await large).open()
    status = slot_processes.status_of(manager._core, {}, manager._now(), manager._in_use)
    assert status.memory == {"gpu-0": (80 * GB, 40 * GB)}
    assert status.in_use == {"gpu-0": (80 * GB, 5)}
    slots.made[0].may_answer.set()
    await answer
    assert "device 0 uses 80,000,000,000 bytes, but slots have only 0 booked" in caplog.text


async def test_slot_gets_its_share_of_the_whole_gpu(slots: Slots) -> None:
    manager = await serving()
    here = replace(host_here("gpu-0", stand_in_agent()), totals=(120 * GB,))
    manager._background.start(manager.hold_host(here), "holding a host")
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: slots.made)
    variables = {name: value for name, value in slots.variables[0].items() if name.startswith("IRIS_SLOT_MEMORY")}
    assert variables == {"IRIS_SLOT_MEMORY": str(60 * GB), "IRIS_SLOT_MEMORY_SHARE": "0.5000"}
    answer.cancel()


async def test_hanging_driver_keeps_no_slot_from_its_host(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_manager, "REPORT_TIMEOUT_S", 0.05)
    manager = await serving()
    agent = stand_in_agent()
    agent.gpu_memory_in_use = Method(forever)
    manager._background.start(manager.hold_host(host_here("gpu-0", agent)), "holding a host")
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    async with asyncio.timeout(3):  # less than until the next report
        await until(lambda: slots.made)
    answer.cancel()


async def test_requests_for_unusable_gpus_are_refused_with_reason(
    slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    manager = await manager_of()
    await manager.start([SlotHosts(kind=DeviceKind.GPU, count=2)], ["one", "two"])
    await manager.register(order())
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    for _ in range(2):
        await manager.give_up_runner("gpu-0", "nvidia-ml-py is not installed on that host")
    await asyncio.sleep(0)
    assert not answer.done(), "another host may come"
    await manager.give_up_runner("gpu-1", "nvidia-ml-py is not installed on that host")
    for asked in (answer, manager.submit(ask("later"))):
        with pytest.raises(
            InvalidSlotError, match="gpu-1 can hold no slots: nvidia-ml-py is not installed on that host"
        ):
            (await asked).open()
    assert caplog.text.count("gpu-0 can hold no slots") == 1


async def test_adapters_of_one_class_have_names_of_their_own(slots: Slots) -> None:
    manager = await manager_of("a", "b")
    await manager.register(order("llama+a", lora="/a"))
    await manager.register(order("llama+b", lora="/b"))
    answers = [asyncio.ensure_future(manager.submit(ask(name, name))) for name in ("llama+a", "llama+b")]
    await until(lambda: len(slots.made) == 2)
    for slot in slots.made:
        slot.may_answer.set()
    assert {(await answer).open() for answer in answers} == {0, 1}
    assert {slot.model for slot in manager._core.fleet.slots.values()} == {"llama+a", "llama+b"}


async def test_reused_request_id_is_not_forgotten_with_the_earlier(slots: Slots) -> None:
    manager = await serving("a", drain_s=0.05)
    first = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: slots.made and slots.made[0].requests)
    await manager.cancel("r")  # a function goes on all the same
    with pytest.raises(JobCancelledError):
        (await first).open()
    await manager.evict(*manager._core.fleet.slots)
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


# -- sessions ---------------------------------------------------------------------------------------------------------


async def open_session(manager: SlotManager, session_id: str) -> Grant:
    asked = Ask(session_id, "m", b"", kind=WorkloadKind.SESSION, idle_s=60.0)
    granted: Grant = (await manager.submit(asked)).open()
    return granted


async def test_closed_session_keeps_seat_until_its_call_ends(slots: Slots) -> None:
    manager = await serving("a")
    granted = await open_session(manager, "s")
    assert granted.slot_id in manager._core.fleet.slots
    await manager.cancel("s")
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: slots.made[0].stopped == ["s"])
    await asyncio.sleep(0.05)
    assert not slots.made[0].requests
    slots.made[0].may_answer.set()
    assert (await answer).open() == 0
    assert await manager.renew("", {"s": 0.0}) == {"s": "it was closed"}


async def test_slot_with_endless_call_is_killed_for_waiting_ones(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_processes, "UNLOAD_S", 0.01)
    for module in (slot_planner, reconciler):
        monkeypatch.setattr(module, "RECHECK_S", 0.02)
    manager = await serving("a", ageing_s=0.05, drain_s=0.1)
    await open_session(manager, "s")
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: len(slots.made) == 2)
    assert slots.made[0].killed.is_set()
    assert slots.made[0].stopped == ["s"]
    slots.made[1].may_answer.set()
    assert (await answer).open() == 1
    assert await manager.renew("", {"s": 0.0}) == {"s": "others have waited for m for 0.05 s"}


# -- streams ----------------------------------------------------------------------------------------------------------


async def test_pieces_of_two_slots_are_never_mixed(slots: Slots) -> None:
    manager = await serving("a", "b", drain_s=0.05)

    async def read() -> list[Any]:
        return [piece.open() async for piece in pieces_of(manager, ask("r"))]

    reads = asyncio.ensure_future(read())
    await until(lambda: slots.made)
    await asyncio.sleep(0.05)
    await manager.evict(*manager._core.fleet.slots)
    await asyncio.sleep(0.06)
    manager._hear(ev.Tick())  # it has overrun its time; the request is for another slot, and this one still runs
    await until(lambda: len(slots.made) == 2)
    await asyncio.sleep(0.05)
    for slot in slots.made:
        slot.may_answer.set()
    assert await reads == [(1, 0), (1, 1), (1, 2)]


async def stops_at(slot: Slot, pieces: int) -> None:
    await until(lambda: slot.sent == pieces)
    await asyncio.sleep(0.02)
    assert slot.sent == pieces


async def test_model_waits_for_slow_reader_but_not_for_gone_one(slots: Slots) -> None:
    manager = await serving("a")
    pieces = pieces_of(manager, ask("r"))
    first = asyncio.ensure_future(anext(pieces))
    await until(lambda: slots.made)
    slots.made[0].pieces = 300
    slots.made[0].may_answer.set()
    await first
    await stops_at(slots.made[0], MOST_PIECES)
    await manager.note_read("r", 10)
    await stops_at(slots.made[0], MOST_PIECES + 10)
    await manager.cancel("r")
    await until(lambda: slots.made[0].sent == 300)
    assert slots.made[0].stopped == ["r"]
    with pytest.raises(JobCancelledError):
        [piece.open() async for piece in pieces]
    await until(lambda: not manager._core.active.by_id)


async def test_partly_delivered_stream_does_not_run_again(slots: Slots) -> None:
    manager = await manager_of("a", "b")
    await manager.register(replace(order(), replicas=2))
    await until(lambda: [each.state.value for each in manager._core.fleet.slots.values()] == ["ready"] * 2)
    ran: list[Slot] = []

    def answers_until_killed(slot: Slot) -> None:
        async def stream(request: SlotRequest, payload: bytes) -> StreamEnd:
            ran.append(slot)
            slot.put("r", 0)
            await slot.killed.wait()
            raise RayError("killed")

        vars(slot)["stream"] = Method(stream)

    for slot in slots.made:
        answers_until_killed(slot)
    pieces = pieces_of(manager, ask("r"))
    (await anext(pieces)).open()
    ran[0].killed.set()  # the other slot has a free seat
    with pytest.raises(RequestLostError, match="cut off"):
        (await anext(pieces)).open()
    await asyncio.sleep(0.1)
    assert len(ran) == 1


# -- clients ----------------------------------------------------------------------------------------------------------


def test_client_is_gone_after_enough_failed_searches() -> None:
    clients = Clients(most_in_vain=2)
    for name in ("gone", "stays", "idle"):
        clients.heard(name)
    both = {"gone", "stays", ""}
    assert [clients.look(both), clients.look(both)] == [set(), set()]
    clients.heard("stays")
    assert clients.look(both) == {"gone"}
    assert clients.look({"idle"}) == set(), "it had no requests when it was silent"
