"""Whether the announced maintenance of hosts that no pool holds any more is still planned.

A TPUHostActor listens to the metadata server of its host, but ends with its slice. Once a gang has moved away, the
calling off of the maintenance would be missed. So the Controller keeps a small actor of its own on such hosts.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.model.notices import HostNotice, NoticeKind
from iris_ray.model.workers import Worker

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Before a listener that is gone is replaced, if its host is still there."""


class MaintenanceListener:
    """Listens to the metadata server of the host that it is on."""

    async def called_off(self, announced: HostNotice) -> None:
        """Wait until a maintenance is not planned any more."""
        from iris_ray.actors.host.metadata import MetadataWatch  # not in the Controller's process: it is slow

        heard = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:  # an error of the watch ends the waiting
            watch = tasks.create_task(MetadataWatch(lambda notice: None, heard.set, announced=announced).run())
            await heard.wait()
            watch.cancel()


_MaintenanceListener = ray.remote(MaintenanceListener)


class MaintenanceService:
    """Keeps a listener on every host that is closed for a maintenance and whose slice no pool holds.

    Args:
        called_off: gets the id of a host whose maintenance is not planned any more.
    """

    def __init__(self, called_off: Callable[[str], object]) -> None:
        self._called_off = called_off
        self._background = BackgroundTasks()
        self._listening: dict[str, asyncio.Task[None]] = {}

    def look_at(self, workers: Mapping[str, Worker], held: Container[str]) -> None:
        """Begin to listen where it is needed now, and end it where it is not.

        Args:
            workers: by id.
            held: names of the slices that pools hold, who listen themselves.
        """
        wanted = [
            worker
            for worker in workers.values()
            if worker.notice is not None
            and worker.notice.kind is NoticeKind.MAINTENANCE
            and worker.final is None  # else it goes anyway, and Ray may start nothing there
            and worker.slice_name is not None
            and worker.slice_name not in held
        ]
        for node_id in self._listening.keys() - {worker.node_id for worker in wanted}:
            self._listening.pop(node_id).cancel()
        for worker in wanted:
            listening = self._listening.get(worker.node_id)
            if listening is None or listening.done():
                self._listening[worker.node_id] = self._background.start(
                    self._listen(worker), f"listening for the maintenance of {worker.name}"
                )

    async def _listen(self, worker: Worker) -> None:
        """Listen until the maintenance is called off."""
        node_id, notice = worker.node_id, worker.notice
        assert notice is not None
        announced = HostNotice(notice.kind, notice.reason, notice.deadline)
        while True:
            # An actor that asks for no resource at all may be sent to a node that has just died (Ray 2.60).
            actor = _MaintenanceListener.options(
                num_cpus=0,
                resources={f"node:{worker.address}": 0.001},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            ).remote()
            listener = Actor[MaintenanceListener](actor, f"the listener on {worker.name}")
            try:
                reply = await listener.ask_within(None, MaintenanceListener.called_off, announced)
                if not isinstance(reply, Unreachable):
                    self._called_off(node_id)
                    return
            except Exception:
                logger.exception("listening to the metadata server of %s failed; trying again", worker.name)
            finally:
                ray.kill(actor)
            await asyncio.sleep(AGAIN_S)
