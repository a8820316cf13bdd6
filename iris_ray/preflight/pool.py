"""Tests the suspected hosts of a gang before it returns to them, beside the start of its processes."""

import asyncio
from collections.abc import Mapping, Sequence

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.pool.attempt_place import AttemptContext
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.pool.services import PoolPart
from iris_ray.actors.protocol.answers import Unfit, Unreachable
from iris_ray.actors.protocol.messages import HostPlace
from iris_ray.preflight.calls import Link, PreflightCalls

PREFLIGHT_S = 5.0
"""How long a host may take to pass the tests once it is ready to start a task."""
NEIGHBOURS = 2
"""The number of other hosts to which a suspected host's links are measured. A host fails only if all links are bad."""
MOST_LATENCY_S, LEAST_BYTES_S = 0.5, 256 << 10
"""The longest latency, and the fewest bytes a second, of a sound link. Healthy ones are a thousand times as fast, but
hosts may be busy."""


class PreflightInPool(PoolPart):
    """Tests the suspected hosts of each attempt."""

    async def unfit(
        self, context: AttemptContext, suspected: Mapping[str, str], ready: asyncio.Event
    ) -> dict[str, Unfit]:
        place = context.place
        if not place.on_slices and place.num_hosts == 1:
            return {}  # a task without peers and chips is tried at once
        hosts = [host for hosts in place.order.slices for host in hosts]
        others = [host for host in hosts if host.node_id not in suspected]
        tests = {  # they wait until the actors of their hosts have started
            asyncio.ensure_future(_problem(context.slices, host, others)): host
            for host in hosts
            if host.node_id in suspected
        }
        try:
            await ready.wait()
            if tests:
                await asyncio.wait(tests, timeout=PREFLIGHT_S)
            problems = {host: _result(test) for test, host in tests.items()}
        finally:
            for test in tests:
                test.cancel()
        return {
            host.slice_name: Unfit(
                f"{host.slice_name} host {host.host_index} was tested because of an earlier failure"
                f" ({suspected[host.node_id]}): {problem}",
                host.node_id,
                problem,
            )
            for host, problem in problems.items()
            if problem is not None
        }


def _result(test: "asyncio.Task[str | None]") -> str | None:
    if not test.done():
        return f"it has not passed a test within {PREFLIGHT_S:g} s"
    return f"its test failed: {error}" if (error := test.exception()) is not None else test.result()


async def _problem(slices: ReservedSlices, host: HostPlace, others: Sequence[HostPlace]) -> str | None:
    """Return why a host fails, as part of a sentence about it; None if it does not."""

    def actor_of(host: HostPlace) -> Actor[PreflightCalls]:
        actor = slices.host_actors(host.slice_name)[host.host_index]
        return Actor(actor.handle, actor.name)

    actor = actor_of(host)
    neighbours = sorted(others, key=lambda other: other.slice_name != host.slice_name)[:NEIGHBOURS]
    asks = (
        actor_of(other).ask_within(None, PreflightCalls.measure_link, actor.handle, actor.name) for other in neighbours
    )
    found, links = await asyncio.gather(
        actor.ask_within(None, PreflightCalls.preflight), asyncio.gather(*asks, return_exceptions=True)
    )
    if isinstance(found, Unreachable):
        return found.reason
    bad = [words for link in links if (words := _problem_of_link(link)) is not None]
    if found is None and bad and len(bad) == len(links):
        return f"its links to {len(bad)} other hosts are bad: {bad[0]}"
    return found


def _problem_of_link(link: Link | Unreachable | BaseException) -> str | None:
    if isinstance(link, BaseException):
        return f"{type(link).__name__}: {link}"
    if isinstance(link, Unreachable):
        return link.reason
    if link.latency_s > MOST_LATENCY_S:
        return f"an answer takes {link.latency_s:.2f} s"
    if link.bytes_per_s < LEAST_BYTES_S:
        return f"it carries {link.bytes_per_s / 1024:.0f} KiB/s"
    return None
