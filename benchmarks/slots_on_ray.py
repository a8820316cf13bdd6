"""Requests through slots, beside bare Ray actors and Ray Serve's model multiplexing; about four minutes.

    python benchmarks/slots_on_ray.py                # pip install 'ray[serve]' for the rows about Ray Serve
    python benchmarks/slots_on_ray.py warm           # or: cold, swap, streams

Everything runs on one simulated host with four chips, and is measured in turn: machines are noisy, ratios less so.

* **warm**: one after the other to a model that is loaded: requests, calls of a session, and of an actor that does the
  same.
* **cold**: from the first request to the answer, for 1, 2 and 4 models at once, each with a chip of its own and nothing
  to load; beside as many bare actors that start and answer.
* **swap**: three models in turn where two fit, so that each request evicts one and loads another, in 0.2 s. A slot is a
  process of its own, with its own device; Ray Serve loads models into the process of its replica.
* **streams**: callers who read streams of 20 pieces one after the other, which the model makes at once, or at the pace
  of a language model.
"""

import os

os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import argparse
import asyncio
import importlib.util
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray import SlotClient, SlotHosts
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.testing import SimulatedCluster

TPU_TYPE, CHIPS = "v4-8", 4
CHIP = 32 * 10**9
EAGER = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0))
LOAD_S = 0.2
SETTLE_S = 1.0
QUIET = {"enable_access_log": False, "log_level": "WARNING"}
SERVE_OPTIONS: dict[str, Any] = {
    "max_ongoing_requests": 100,
    "ray_actor_options": {"num_cpus": 0},
    "logging_config": QUIET,
}
WITH_SERVE = importlib.util.find_spec("starlette") is not None

PIECES = 20
STREAMS = ((20, 0.0), (60, 0.02))
"""Callers at a time, and the seconds from one piece of a stream to the next."""
STREAMS_S = 4.0

Samples = dict[str, list[float]]


class Shout:
    """A model that takes no time."""

    def __call__(self, text: str) -> str:
        return text.upper()


class Slow(Shout):
    """A model that loads for a while."""

    def load(self) -> None:
        time.sleep(LOAD_S)


class Words:
    """A model that answers in pieces."""

    async def __call__(self, pause_s: float) -> AsyncIterator[str]:
        for _ in range(PIECES):
            if pause_s:
                await asyncio.sleep(pause_s)
            yield "word"


class Bare(Shout):
    """What an actor does at least."""

    def call(self, text: str) -> str:
        return self(text)


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turn(actions: Mapping[str, Callable[[], object]], rounds: int, each: int = 1) -> Samples:
    """Seconds of each action, so many times in a row, in turn with the others."""
    samples: Samples = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            samples[name] += [timed(action) for _ in range(each)]
    return samples


def show(title: str, samples: Samples) -> None:
    """Print medians, and ratios to the first."""
    print(f"\n{title}", flush=True)
    first = statistics.median(next(iter(samples.values())))
    for name, seconds in samples.items():
        ordered, median = sorted(seconds), statistics.median(seconds)
        p99 = ordered[len(ordered) * 99 // 100]
        print(f"  {name:<34} {median * 1e3:>9.2f} ms   p99 {p99 * 1e3:>9.2f} ms   {median / first:>5.2f} ×", flush=True)


class Actors:
    """Bare actors on the host, as slots are."""

    def __init__(self, node_id: str) -> None:
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self._options = {"num_cpus": 0, "scheduling_strategy": where}

    def start(self, **options: Any) -> Any:
        return ray.remote(Bare).options(**self._options, **options).remote()


def serve_handle(models: Sequence[str], at_once: int, load_s: float) -> Any:
    """A Ray Serve deployment of one replica that holds so many models at once."""
    from ray import serve

    class Multiplexed:
        async def model(self, name: str) -> Shout:
            time.sleep(load_s)
            return Shout()

        async def __call__(self, text: str) -> Any:
            return (await self.model(serve.get_multiplexed_model_id()))(text)

    Multiplexed.model = serve.multiplexed(max_num_models_per_replica=at_once)(Multiplexed.model)  # type: ignore[method-assign]
    deployment = serve.deployment(**SERVE_OPTIONS)(Multiplexed)
    serve.start(proxy_location="Disabled")
    handle = serve.run(deployment.bind(), route_prefix=None)
    for model in models:
        handle.options(multiplexed_model_id=model).remote("").result()
    return handle


def warm(actors: Actors) -> None:
    """Requests to what is loaded."""
    bare = actors.start()
    with SlotClient([hosts()]) as client:
        client.register(Shout, memory={1: CHIP}, concurrency=2)
        with client.session("Shout") as session:
            actions: dict[str, Callable[[], object]] = {
                "a bare actor": lambda: ray.get(bare.call.remote("words")),
                "a request": lambda: client.submit("Shout", "words").result(),
                "a call of a session": lambda: session.call("words"),
            }
            if WITH_SERVE:
                handle = serve_handle(["Shout"], 2, 0.0).options(multiplexed_model_id="Shout")
                actions["Ray Serve, multiplexed"] = lambda: handle.remote("words").result()
            in_turn(actions, rounds=2, each=50)
            show("warm: one after the other", in_turn(actions, rounds=10, each=50))
    stop_serve()
    ray.kill(bare)


def cold(actors: Actors) -> None:
    """First requests."""
    names = (f"model-{number}" for number in count())
    for models in (1, 2, CHIPS):
        with SlotClient([hosts()], policy=EAGER) as client:
            while not client.status().runners:
                time.sleep(0.05)
            samples: Samples = {"bare actors": [], "slots": []}
            for _ in range(6):
                samples["bare actors"].append(start_actors(actors, models))
                time.sleep(SETTLE_S)
                samples["slots"].append(start_slots(client, [next(names) for _ in range(models)]))
                time.sleep(SETTLE_S)
            show(f"cold: {models} at once", {name: taken[1:] for name, taken in samples.items()})


def start_actors(actors: Actors, number: int) -> float:
    """Seconds until so many actors have started and answered."""
    started = time.perf_counter()
    made = [actors.start() for _ in range(number)]
    ray.get([each.call.remote("") for each in made])
    taken = time.perf_counter() - started
    for each in made:
        ray.kill(each)
    return taken


def start_slots(client: SlotClient, models: Sequence[str]) -> float:
    """Seconds until the first requests to these models are answered."""
    for model in models:
        client.register(Shout, model, memory={1: CHIP})
    started = time.perf_counter()
    for answer in [client.submit(model, "") for model in models]:
        answer.result()
    taken = time.perf_counter() - started
    for model in models:
        client.remove(model)
    while client.status().slots:
        time.sleep(0.02)
    return taken


def swap() -> None:
    """Requests that evict."""
    models = ["one", "two", "three"]
    with SlotClient([hosts()], policy=EAGER) as client:
        for model in models:
            client.register(Slow, model, memory={2: CHIP})
        turn = iter(models * 100)
        actions: dict[str, Callable[[], object]] = {"slots": lambda: client.submit(next(turn), "words").result()}
        if WITH_SERVE:
            handle, other = serve_handle(models, 2, LOAD_S), iter(models * 100)
            actions["Ray Serve, multiplexed"] = lambda: (
                handle.options(multiplexed_model_id=next(other)).remote("words").result()
            )
        in_turn(actions, rounds=3)
        show(f"swap: each request loads for {LOAD_S} s", in_turn(actions, rounds=9))
    stop_serve()


def streams() -> None:
    """Streams, as many as the machine can."""
    with SlotClient([hosts()]) as client:
        client.register(Words, memory={1: CHIP}, concurrency=100)
        ways: dict[str, Callable[[float], AsyncIterator[str]]] = {"slots": lambda pause: client.astream("Words", pause)}
        if WITH_SERVE:
            from ray import serve

            serve.start(proxy_location="Disabled")
            handle = serve.run(serve.deployment(**SERVE_OPTIONS)(Words).bind(), route_prefix=None).options(stream=True)
            ways["Ray Serve"] = lambda pause: handle.remote(pause)
        for callers, pause_s in STREAMS:
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(4):
                for name, ask in ways.items():
                    rates[name].append(asyncio.run(streams_per_s(ask, callers, pause_s)))
            print(f"\nstreams: {callers} callers, {PIECES} pieces, one each {pause_s} s", flush=True)
            for name, found in rates.items():
                print(f"  {name:<34} {statistics.median(found[1:]):>9.0f} streams/s", flush=True)
    stop_serve()


async def streams_per_s(ask: Callable[[float], AsyncIterator[str]], callers: int, pause_s: float) -> float:
    """Have callers read streams for some seconds. Return the number of streams a second."""
    began, read = time.perf_counter(), 0

    async def caller() -> None:
        nonlocal read
        while time.perf_counter() < began + STREAMS_S:
            assert len([piece async for piece in ask(pause_s)]) == PIECES
            read += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    return read / (time.perf_counter() - began)


def stop_serve() -> None:
    if WITH_SERVE:
        from ray import serve

        serve.shutdown()


def hosts() -> SlotHosts:
    return SlotHosts(tpu_type=TPU_TYPE, memory=CHIP)


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests through slots beside bare actors and Ray Serve.")
    parser.add_argument("which", nargs="?", default="all", choices=["all", "warm", "cold", "swap", "streams"])
    which = parser.parse_args().which
    if not WITH_SERVE:
        print("Ray Serve isn't installed; pip install 'ray[serve]' to compare with it")
    with SimulatedCluster({TPU_TYPE: 1}) as cluster:
        actors = Actors(cluster.node_id(cluster.slice_names[0], 0))
        if which in ("all", "warm"):
            warm(actors)
        if which in ("all", "cold"):
            cold(actors)
        if which in ("all", "swap"):
            swap()
        if which in ("all", "streams"):
            streams()


if __name__ == "__main__":
    main()
