"""A service that fails stops nobody: the kernel's timeline is the same to the second, whatever any service does.

Each hook of each service's parts in the Controller and in pools raises, hangs for a minute, returns garbage and exits,
in turn, while gangs run, wait, lose a slice and start again. In virtual time the moments are exact, so the timelines
are compared whole. Parts on hosts run by the same code; tests/unit/actors/calls/test_service_parts.py tries it.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.calls.service_parts import LONGEST_PAUSE_S, ServiceHealth
from iris_ray.actors.protocol.services import imported, installed_services
from tests.support import virtual_time
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import Stage, VirtualCluster, played

HOOKS = {
    "controller": ("__init__", "started", "happened", "run", "close", "admit", "slices_lost", "about_job"),
    "pool": ("__init__", "started", "happened", "run", "close", "prepared", "unfit"),
}
NOT_COROUTINES = {"__init__", "close", "about_job"}
HANG_S = 60.0


class Broken(Exception):
    """What a failing service raises."""


async def raises(*_: Any, **__: Any) -> Any:
    await asyncio.sleep(0.0)
    raise Broken("on purpose")


async def hangs(*_: Any, **__: Any) -> None:
    await asyncio.sleep(HANG_S)


def raises_at_once(*_: Any, **__: Any) -> Any:
    raise Broken("on purpose")


def returns_no_coroutine(*_: Any, **__: Any) -> Any:
    return {"garbage": object()}


async def returns_garbage(*_: Any, **__: Any) -> Any:
    return [object()]


async def exits(*_: Any, **__: Any) -> None:
    raise SystemExit(7)


WAYS = (raises, hangs, returns_no_coroutine, returns_garbage, raises_at_once, exits)


def failing_in_turn(hook: str, first: int) -> Callable[..., Any]:
    """Return a hook that fails at each call in another way, beginning with one of them."""
    possible = (raises_at_once, returns_no_coroutine) if hook in NOT_COROUTINES else WAYS
    ways = itertools.cycle((*possible[first:], *possible[:first]))

    def fails(*args: Any, **more: Any) -> Any:
        return next(ways)(*args, **more)

    return fails


@dataclass(slots=True)
class Timeline:
    """What the kernel has done, and when: seconds since the story began."""

    entries: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=virtual_time.now)

    def note(self, what: str) -> None:
        self.entries.append((round(virtual_time.now() - self.began, 2), what))


async def story(cluster: VirtualCluster) -> Timeline:
    """Gangs run, wait, are lost, move and start again. Return the timeline."""
    timeline = Timeline()

    async def work(task: Task) -> str:
        timeline.note(f"{task.info.task_id} attempt {task.info.attempt} begins on {task.info.slice_name}")
        for step in range(3 if task.info.attempt > 1 else 20):
            task.heartbeat(step)
            await asyncio.sleep(5.0)
        return task.info.slice_name

    async def end_of(job_id: str, results: Awaitable[Any]) -> None:
        timeline.note(f"{job_id} returns {await results}")

    ends = [end_of("long", cluster.run("long", (2,), work, max_retries_preemption=2, max_retries_failure=1))]
    await cluster.runs("long", 4)
    ends.append(end_of("beside", cluster.run("beside", (1,), work)))
    ends.append(end_of("waits", cluster.run("waits", (1,), work)))
    ends.append(end_of("tasks", cluster.run_tasks("tasks", 3, work)))
    ended = asyncio.gather(*ends)
    await asyncio.sleep(20.0)
    cluster.kill_host("v4-16-0", 1)
    timeline.note("a host is lost")
    await asyncio.sleep(30.0)
    cluster.drain("v4-16-1", 30.0)
    timeline.note("a slice gets notice")
    cluster.add_slice("later")
    await ended
    for job_id in ("long", "beside", "waits", "tasks"):
        status = await cluster.status(job_id)
        timeline.note(f"{job_id}: {status.state.value}, {status.attempt} attempts, {status.failures} failures")
    return timeline


def parts() -> Iterator[tuple[str, str, type]]:
    """Yield each service's part in the Controller and in pools: the service's name, the side, and the class."""
    for service in installed_services():
        for side in HOOKS:
            if (place := getattr(service, side)) is not None:
                yield service.name, side, imported(place)


CASES = [
    pytest.param(kind, hook, first, id=f"{name}, {side}: {hook}, from {first}")
    for name, side, kind in parts()
    for hook in HOOKS[side]
    for first in range(1 if hook in NOT_COROUTINES else 2)
]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[tuple[float, str]]]:
    """The timeline of the story when every service works, once it was played."""
    return {}


def play(stage: Stage) -> list[tuple[float, str]]:
    found: list[Timeline] = []

    async def play_it(cluster: VirtualCluster) -> None:
        found.append(await story(cluster))

    stage.play(play_it)
    return found[0].entries


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "hook", "first"), CASES)
def test_kernels_timeline_is_the_same_when_a_hook_fails(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, Any], kind: type, hook: str, first: int
) -> None:
    if not undisturbed:
        undisturbed["timeline"] = play(stage)
    monkeypatch.setattr(kind, hook, failing_in_turn(hook, first))
    assert play(stage) == undisturbed["timeline"]


@played()
async def test_failing_service_is_named_and_asked_again_with_growing_pauses(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, kind = next(one for one in parts() if one[1] == "controller")
    made = Counter[str]()

    async def fails(self: Any) -> None:
        made[name] += 1
        raise Broken("its disk is gone")

    monkeypatch.setattr(kind, "started", fails)
    cluster.restart_controller()
    await cluster.until(lambda: made[name])
    await asyncio.sleep(60.0)
    assert 5 <= made[name] <= 7, "after 1, 2, 4, 8 … s"
    assert (await health_of(cluster, name)).trouble == "Broken: its disk is gone"
    monkeypatch.undo()
    await asyncio.sleep(LONGEST_PAUSE_S)
    health = await health_of(cluster, name)
    assert (health.trouble, health.last_error) == (None, "Broken: its disk is gone")


async def health_of(cluster: VirtualCluster, service: str) -> ServiceHealth:
    health: list[ServiceHealth] = (await cluster.ask("about"))["service_health"]
    return next(one for one in health if one.service == service)
