"""Hosts for slots: what is asked of them, how they come and go, and what the Controller hears of them."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from iris_ray import SlotHosts
from iris_ray.errors import InvalidSlotError, UnknownTPUTypeError
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.slots.actors import runner_agent, runners
from iris_ray.slots.actors.gpu_memory import GpuMemory
from iris_ray.slots.actors.runner_agent import RunnerAgent
from iris_ray.slots.actors.runners import HostHere, RunnerHere, Runners, Yielding, visible_devices
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.events import RunnerJoined, RunnerLost
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.core.reconciler import Reconciler
from tests.support.processes import earlier_than, identity_of
from tests.support.slots import host_here

# -- what is asked of hosts -------------------------------------------------------------------------------------------


def test_tpu_type_says_how_many_chips_hosts_have() -> None:
    hosts = SlotHosts(2, tpu_type="v4-16")
    assert (hosts.count, hosts.kind, hosts.devices) == (2, DeviceKind.TPU, 4)


def test_host_is_one_cpu_device_or_one_per_accelerator() -> None:
    assert len(SlotHosts(devices=8).runner.devices) == 1
    assert len(SlotHosts(kind=DeviceKind.GPU, devices=8).runner.devices) == 8
    assert len(SlotHosts(tpu_type="v4-8").runner.devices) == 4


def test_whole_slice_is_one_runner_used_by_one_slot() -> None:
    runner = SlotHosts(tpu_type="v4-16", whole_slices=True).runner
    assert (len(runner.devices), list(runner.sets(8)), list(runner.sets(4))) == (8, [tuple(range(8))], [])
    assert len(SlotHosts(tpu_type="v4-512", whole_slices=True).runner.devices) == 256
    assert SlotHosts(tpu_type="v4-8", whole_slices=True).runner == SlotHosts(tpu_type="v4-8").runner


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": 0}, "count is 0"),
        ({"count": 10**9}, "count is 1000000000; give an int from 1 to 10000"),
        ({"kind": DeviceKind.GPU, "devices": 10**9}, "devices is 1000000000"),
        ({"memory": 1.5}, "memory is 1.5"),
        (
            {"memory": [], "kind": DeviceKind.GPU},
            r"memory is \[\]; give bytes: an int of 1 or more, or one for each GPU",
        ),
        ({"memory": [5, 0], "kind": DeviceKind.GPU, "devices": 2}, r"memory is \[5, 0\]"),
        ({"memory": [5, 5], "kind": DeviceKind.GPU}, "memory lists 2 devices; a list is for hosts with as many GPUs"),
        ({"memory": [5]}, "with kind=DeviceKind.GPU and devices=1"),
        ({"memory": [5] * 4, "tpu_type": "v4-8"}, "memory lists 4 devices"),
        ({"kind": "gpu"}, "give a DeviceKind"),
        ({"kind": DeviceKind.TPU}, "say which slices"),
        ({"whole_slices": True}, "needs a type of slices"),
        ({"kind": DeviceKind.GPU, "tpu_type": "v4-8"}, "have no GPUs"),
    ],
)
def test_senseless_hosts_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSlotError, match=said):
        SlotHosts(**wrong)


def test_unknown_type_is_refused_with_nearest() -> None:
    with pytest.raises(UnknownTPUTypeError, match="v4-16"):
        SlotHosts(tpu_type="v4-161")


def test_runner_with_some_gpus_uses_the_hosts_names() -> None:
    assert visible_devices(DeviceKind.GPU, (0, 1), 2, ("4", "6"))["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert visible_devices(DeviceKind.GPU, (1,), 2)["CUDA_VISIBLE_DEVICES"] == "1"
    assert visible_devices(DeviceKind.CPU, (0,), 1, ("4",))["CUDA_VISIBLE_DEVICES"] == ""
    large_first = visible_devices(DeviceKind.GPU, (1, 0), 2, ("4", "6"))
    assert (large_first["CUDA_VISIBLE_DEVICES"], large_first["CUDA_DEVICE_ORDER"]) == ("6,4", "PCI_BUS_ID")


def test_hosts_with_unlike_gpus_say_the_memory_of_each() -> None:
    hosts = SlotHosts(kind=DeviceKind.GPU, devices=2, memory=[12, 6])
    assert [device.memory for device in hosts.runner.devices] == [12, 6]
    assert hosts == SlotHosts(kind=DeviceKind.GPU, devices=2, memory=(12, 6))


def test_partial_chips_are_a_rectangle() -> None:
    some = visible_devices(DeviceKind.TPU, (2, 3), 4)
    assert (some["TPU_VISIBLE_CHIPS"], some["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("2,3", "1,2,1")
    assert "TPU_VISIBLE_CHIPS" not in visible_devices(DeviceKind.TPU, (0, 1, 2, 3), 4)


def test_share_of_unlike_gpus_is_the_least() -> None:
    here = replace(host_here("r", None), devices=3, sizes=(80, 40, 10))
    assert here.share((0, 1), (20, 20)) == 0.25
    assert [device.memory for device in RunnerHere((here,)).runner().devices] == [80, 40, 10]


def test_share_is_one_of_the_whole_gpu_if_the_driver_says_its_size() -> None:
    here = replace(host_here("r", None), devices=2, memory=40, totals=(80, 50))
    assert here.share((0,), (20,)) == 0.25
    assert here.share((0, 1), (20, 20)) == 0.25
    assert replace(here, sizes=(40, 30)).share((1,), (20,)) == 0.4
    assert replace(here, totals=()).share((0,), (20,)) == 0.5
    assert [device.memory for device in RunnerHere((here,)).runner().devices] == [40, 40], "slots may use no more"


def test_slots_that_fill_a_gpu_get_no_more_than_all_of_it() -> None:
    here = host_here("r", None)
    assert 0.999 < 6 * here.share((0,), (here.memory // 6,)) <= 1
    assert here.share((0,), (here.memory * 2 // 3,)) == 0.6666
    assert [here.share((0,), (here.memory * part // 100,)) for part in (29, 57, 100)] == [0.29, 0.57, 1.0]


def test_share_of_a_gpu_smaller_than_said_is_all_of_it() -> None:
    assert replace(host_here("r", None), memory=80, totals=(79,)).share((0,), (80,)) == 1.0


# -- hosts that come and go -------------------------------------------------------------------------------------------


class Agent:
    """Stands for a host's agent, whose process dies when it is told to."""

    def __init__(self) -> None:
        self.dies = asyncio.Event()
        self.watch = SimpleNamespace(remote=self._watch)

    async def _watch(self) -> None:
        await self.dies.wait()
        raise RayError("the agent's process died")


def kept(dies: bool) -> tuple[bool, list[type]]:
    async def hold() -> bool:
        here = host_here("a", Agent())
        waits = asyncio.ensure_future(made.hold(here))
        await asyncio.sleep(0)
        here.agent.handle.dies.set() if dies else made.close()
        return await waits

    heard: list[Any] = []
    made = Runners(heard.append)
    return asyncio.run(hold()), [type(event) for event in heard]


def test_host_holder_hears_of_return_or_lost_agent() -> None:
    assert kept(dies=True) == (False, [RunnerJoined, RunnerLost])
    assert kept(dies=False)[0] is True


class Slices:
    """Runners of two hosts each."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.runners = Runners(self.heard.append)
        self._holds: list[asyncio.Future[bool]] = []

    async def arrives(self, host: int, attempt: int = 1) -> HostHere:
        here = host_here("t", Agent(), attempt, host, hosts=2)
        self._holds.append(asyncio.ensure_future(self.runners.hold(here)))
        await asyncio.sleep(0)
        return here

    async def goes(self, here: HostHere) -> None:
        here.agent.handle.dies.set()
        await asyncio.sleep(0.01)

    def new(self) -> list[type]:
        """What was heard since the last time."""
        found = [type(event) for event in self.heard]
        self.heard.clear()
        return found


async def test_runner_of_several_hosts_joins_and_leaves_whole() -> None:
    slices = Slices()
    first = await slices.arrives(1)
    assert slices.new() == []
    second = await slices.arrives(0)
    (joined,) = slices.heard
    assert (joined.runner.kind, len(joined.runner.devices)) == (DeviceKind.TPU, 8)
    assert joined.runner.legal_sets == (tuple(range(8)),)
    assert list(joined.runner.attributes) == ["zone"]  # the hosts are different nodes
    assert slices.runners.by_id["t"].hosts == (second, first)
    slices.new()
    await slices.goes(first)
    assert slices.new() == [RunnerLost]
    await slices.goes(second)
    assert slices.new() == []


async def test_hosts_of_different_attempts_make_no_runner() -> None:
    slices = Slices()
    old = await slices.arrives(0)
    new = await slices.arrives(1, attempt=2)
    assert slices.new() == []
    await slices.arrives(0, attempt=2)
    assert slices.new() == [RunnerJoined]
    await slices.goes(old)
    assert slices.new() == []
    await slices.goes(new)
    assert slices.new() == [RunnerLost]


# -- hosts that could be given to others ------------------------------------------------------------------------------


class Told(Yielding):
    """Remembers what it tells instead of telling it, and is told which jobs yield."""

    found: Mapping[str, bool]
    answers: bool = True

    def __init__(self) -> None:
        super().__init__(Reconciler(ServingPolicy(), lambda: "slot"), {}, ("job",), "me")
        self.heard: dict[str, bool] = {}

    async def _tell(self, changed: Mapping[str, bool]) -> None:
        self.heard |= changed
        if not self.answers:
            raise TimeoutError("the answer came late")

    def _found(self, now: float) -> dict[str, bool]:
        return dict(self.found)


def test_yielding_report_with_lost_answer_is_corrected() -> None:
    told = Told()
    for yields, answers in ((False, True), (True, False), (False, True)):
        told.found, told.answers = {"job": yields}, answers
        if answers:
            asyncio.run(told.report_changes(0.0))
        else:
            with pytest.raises(TimeoutError):
                asyncio.run(told.report_changes(0.0))
        assert told.heard == {"job": yields}


def test_unchanged_yielding_is_not_reported_again() -> None:
    told = Told()
    told.found = {"job": True}
    asyncio.run(told.report_changes(0.0))
    told.heard.clear()
    asyncio.run(told.report_changes(1.0))
    assert told.heard == {}


class Deaf(Told):
    """Tells a Controller that never answers."""

    async def _tell(self, changed: Mapping[str, bool]) -> None:
        await asyncio.sleep(3600)


def test_warning_about_silent_controller_says_for_how_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "LOOK_S", 0.0)
    monkeypatch.setattr(runners, "ANSWER_S", 0.05)

    deaf = Deaf()
    deaf.found = {"job": True}
    asyncio.run(deaf.report(lambda: 0.0))
    assert caplog.messages[0].endswith("idle: it did not answer within 0.05 s")


# -- agents -----------------------------------------------------------------------------------------------------------


async def test_hanging_driver_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(runner_agent, "join_task", lambda: None)
    monkeypatch.setattr(runner_agent, "gpu_memory", lambda names: [GpuMemory(9, 5)] if goes_on.wait(20) else [])
    agent = RunnerAgent({})
    first = asyncio.ensure_future(agent.gpu_memory_in_use(["0"]))
    await asyncio.sleep(0.01)
    assert [await agent.gpu_memory_in_use(["0"]) for _ in range(100)] == [[]] * 100
    goes_on.set()
    assert await first == await agent.gpu_memory_in_use(["0"]) == [5]


MB = 2**20
TAKES_MEMORY = f"""
import os
if os.fork() == 0:
    held = b"c" * (40 * {MB})
else:
    held = b"p" * (60 * {MB})
print("holds it", flush=True)
input()
"""


@pytest.fixture
def process() -> Iterator[ProcessIdentity]:
    """One that holds 60 MB, and its child 40 MB."""
    with subprocess.Popen([sys.executable, "-c", TAKES_MEMORY], stdin=-1, stdout=-1, text=True) as made:
        assert made.stdout is not None
        for _ in range(2):
            assert made.stdout.readline() == "holds it\n"
        yield identity_of(made)
        made.communicate("\n\n")


def test_memory_of_processes_includes_children(process: ProcessIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.slots.actors.runner_agent.join_task", lambda: None)
    agent = RunnerAgent({})
    used = asyncio.run(agent.memory([process]))
    assert 100 * MB < used < 150 * MB
    gone = earlier_than(process)
    assert asyncio.run(agent.memory([process, gone])) < 150 * MB, "another process has its pid"
