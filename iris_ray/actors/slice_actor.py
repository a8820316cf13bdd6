"""One TPU slice: speaks for all its hosts, so that the pool asks one actor a slice and not one a host."""

import asyncio
from collections.abc import Mapping, Sequence

from ray.actor import ActorHandle

from iris_ray.actors.messages import TaskLaunch
from iris_ray.actors.resource_pool import ResourcePoolManager, Unreachable
from iris_ray.outcomes import EndKind, TaskEnd


class SliceActor(ResourcePoolManager[int]):
    """The hosts of one slice, by worker id.

    Args:
        name: the slice's name.
        hosts: its TPUHostActors, in the order of worker ids.
    """

    def __init__(self, name: str, hosts: Sequence[ActorHandle]) -> None:
        self._name = name
        self._hosts = dict(enumerate(hosts))

    def members(self) -> Mapping[int, ActorHandle]:
        return self._hosts

    def member_name(self, key: int) -> str:
        return f"{self._name} host {key}"

    async def healthy(self) -> dict[int, str | None]:
        """Why each host counts as lost; None for those that answer."""
        answers = await self.ask_all("healthy", timeout_s=3.0)
        return {key: a.reason if isinstance(a, Unreachable) else None for key, a in answers.items()}

    async def prepare(self, ports: int, avoid: frozenset[int], timeout_s: float) -> tuple[int, ...] | Unreachable:
        """Wait until every host could start a task at once; returns free ports of host 0."""
        calls = (self.ask(i, "prepare", ports if i == 0 else 0, avoid, timeout_s=timeout_s) for i in self._hosts)
        answers = await asyncio.gather(*calls)
        for unreachable in (a for a in answers if isinstance(a, Unreachable)):
            return unreachable
        return tuple(answers[0])

    async def run_remote_fn(self, launches: Sequence[TaskLaunch]) -> dict[int, TaskEnd | None]:
        """Start one task on every host; returns when all have returned, or at the first other end.

        The answer holds the ends known by then; None where a host no longer answers.
        """
        calls = {
            asyncio.ensure_future(self.ask(i, "run_remote_fn", launch, timeout_s=None)): i
            for i, launch in enumerate(launches)
        }
        ends: dict[int, TaskEnd | None] = {}
        pending = set(calls)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                outcome = call.result()
                ends[calls[call]] = None if isinstance(outcome, Unreachable) else outcome
            if any(end is None or end.kind is not EndKind.RETURNED for end in ends.values()):
                break
        for call in pending:
            call.cancel()
        return ends

    async def stop(self, reason: str | None) -> dict[int, TaskEnd | None]:
        """End every task that still runs and wait until all processes are gone; None where a host can't say."""
        answers = await self.ask_all("stop", reason, timeout_s=15.0)
        return {key: None if isinstance(a, Unreachable) else a for key, a in answers.items()}

    async def teardown(self) -> None:
        """End everything on the slice before its actors are ended."""
        await self.ask_all("teardown", timeout_s=15.0)
