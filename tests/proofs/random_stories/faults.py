"""What happens to the cluster of a story."""

import asyncio
import random
from collections import Counter
from typing import Any

from iris_ray.actors.host.chips import NotFree
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.pool.slice_actor import SliceActor
from tests.support.virtual_cluster import VirtualCluster


class Faults:
    """Makes one thing happen at a time. Slices that are gone are replaced.

    Args:
        cluster: where.
        slices: how many v4-16 slices it has.
        chance: decides what happens.

    Attributes:
        happened: the faults so far, in words; a test that fails prints them.
        unwatched: names of slices on which nobody could end a task for a while, so that it may go on.
        killed: how many tasks of each job were killed.
    """

    def __init__(self, cluster: VirtualCluster, slices: int, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._slices = [f"v4-16-{number}" for number in range(slices)]
        self._made = slices
        self.happened: list[str] = []
        self.unwatched: set[str] = set()
        self.killed: Counter[str] = Counter()

    def happen(self) -> None:
        """Have one happen."""
        kinds = [
            self._kill_host, self._freeze, self._kill_slice_actor, self._kill_host_actor, self._drain, self._restart,
            self._kill_task, self._kill_waiting, self._restart_pool, self._take_chips, self._break_setup,
        ]  # fmt: skip
        fault, name, host = self._chance.choice(kinds), self._chance.choice(self._slices), self._chance.randrange(2)
        self.happened.append(f"{fault.__name__} {name} {host}")
        fault(name, host)

    def _kill_host(self, name: str, host: int) -> None:
        self._cluster.kill_host(name, host)
        self._replace(name)

    def _freeze(self, name: str, host: int) -> None:
        self.unwatched.add(name)
        self._cluster.freeze_host(name, host)
        asyncio.get_running_loop().call_later(self._chance.uniform(0.5, 15.0), self._cluster.thaw_host, name, host)

    def _kill_slice_actor(self, name: str, _: int) -> None:
        self._kill_actor(SliceActor, name, 0)

    def _kill_host_actor(self, name: str, host: int) -> None:
        self._kill_actor(TPUHostActor, name, host)

    def _kill_actor(self, kind: type, name: str, host: int) -> None:
        try:
            self._cluster.kill_actor(kind, name, host)
        except LookupError:
            return  # there is none

    def _drain(self, name: str, _: int) -> None:
        notice_s = self._chance.uniform(1.0, 20.0)
        self._cluster.drain(name, notice_s)
        self._replace(name)
        for host in range(2):
            asyncio.get_running_loop().call_later(notice_s, self._cluster.kill_host, name, host)

    def _kill_task(self, name: str, host: int) -> None:
        for task in self._cluster.tasks:
            if (task.info.slice_name, task.info.worker_id) == (name, host) and not task.process.gone.done():
                self.killed[task.info.job_id] += 1
                task.process.die()

    def _kill_waiting(self, name: str, host: int) -> None:
        """End the processes that wait on a host for their tasks, or some of them."""
        for process in list(self._cluster.node(self._cluster.node_id(name, host)).processes.values()):
            if process.task is None and not process.gone.done() and self._chance.random() < 0.7:
                process.die()

    def _restart(self, _: str, __: int) -> None:
        self._cluster.restart_controller()

    def _restart_pool(self, _: str, __: int) -> None:
        self._cluster.ray.restart(self._cluster.pool, takes_s=self._chance.uniform(0.1, 5.0))
        self.unwatched.update(self._slices)

    def _take_chips(self, name: str, host: int) -> None:
        """Have a stranger, or a task of iris_ray, hold a host's chips for a while."""
        self._spoil(name, host, "held_by", NotFree("somebody holds its chips", ours=self._chance.random() < 0.5))

    def _break_setup(self, name: str, host: int) -> None:
        """Let a host be unable for a while to set up what tasks ask for."""
        self._spoil(name, host, "setup_error", "its disk is full")

    def _spoil(self, name: str, host: int, what: str, value: Any) -> None:
        node = self._cluster.node(self._cluster.node_id(name, host))
        setattr(node, what, value)
        asyncio.get_running_loop().call_later(self._chance.uniform(1.0, 20.0), setattr, node, what, None)

    def _replace(self, name: str) -> None:
        self._slices.remove(name)
        self._slices.append(f"v4-16-{self._made}")
        self._made += 1
        self._cluster.add_slice(self._slices[-1])
