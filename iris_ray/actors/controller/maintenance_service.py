"""Watches whether announced maintenance is called off, on hosts that no pool holds any more.

A TPUHostActor watches the metadata server of its host, but ends with its slice when a gang has moved away. So the
Controller keeps a small actor of its own on such hosts.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Mapping

import ray

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.model.notices import HostNotice, NoticeKind
from iris_ray.model.workers import Worker

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""The pause before a listener that is gone is replaced, if its host is still there."""


class MaintenanceListener:
    """Listens to the metadata server of its host."""

    async def called_off(self, announced: HostNotice) -> None:
        """Wait until a maintenance is called off."""
        from iris_ray.actors.host.metadata import MetadataWatch  # a slow import, which the Controller does not need

        heard = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:  # an error of the watch ends the waiting
            watch = tasks.create_task(MetadataWatch(lambda notice: None, heard.set, announced=announced).run())
            await heard.wait()
            watch.cancel()


_MaintenanceListener = ray.remote(MaintenanceListener)


class MaintenanceService:
    """Keeps a listener on every host that is closed for a maintenance and whose slice no pool holds.

    Args:
        called_off: gets the id of a host whose maintenance is called off.
    """

    def __init__(self, called_off: Callable[[str], object]) -> None:
        self._called_off = called_off
        self._background = BackgroundTasks()
        self._listening: dict[str, asyncio.Task[None]] = {}

    def look_at(self, workers: Mapping[str, Worker], held: Container[str]) -> None:
        """Start listeners where they are needed now, and end the others.

        Args:
            workers: by node id.
            held: names of the slices that pools hold. Their TPUHostActors listen themselves.
        """
        wanted = [
            worker
            for worker in workers.values()
            if worker.notice is not None
            and worker.notice.kind is NoticeKind.MAINTENANCE
            and worker.final is None  # else the host goes anyway, and Ray may start no actor there
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
        node_id, notice = worker.node_id, worker.notice
        assert notice is not None
        announced = HostNotice(notice.kind, notice.reason, notice.deadline)
        while True:
            actor = _MaintenanceListener.options(**on_host(node_id, worker.address)).remote()
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
