"""The service of metadata servers in the Controller: is announced maintenance called off on hosts that no pool holds?

A TPUHostActor watches the metadata server of its host, but ends with its slice when a gang has moved away. So the
Controller keeps a small actor of its own on such hosts.
"""

import asyncio
import logging

import ray

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.model.notices import HostNotice, NoticeKind
from iris_ray.model.workers import Worker
from iris_ray.state.events import MaintenanceCalledOffEvent

logger = logging.getLogger(__name__)

LOOK_S = 2.0
AGAIN_S = 10.0
"""The pause before a listener that is gone is replaced, if its host is still there."""


class MaintenanceListener:
    """Listens to the metadata server of its host."""

    async def called_off(self, announced: HostNotice) -> None:
        """Wait until a maintenance is called off."""
        from iris_ray.metadata.watch import MetadataWatch  # a slow import, which the Controller does not need

        heard = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:  # an error of the watch ends the waiting
            watch = tasks.create_task(MetadataWatch(lambda notice: None, heard.set, announced=announced).run())
            await heard.wait()
            watch.cancel()


_MaintenanceListener = ray.remote(MaintenanceListener)


class MetadataInController(ControllerPart):
    """Keeps a listener on every host that is closed for a maintenance and whose slice no pool holds."""

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._background = BackgroundTasks()
        self._listening: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        self._background.cancel()
        super().close()

    def _look(self) -> None:
        """Start listeners where they are needed now, and end the others."""
        state = self.controller.state
        wanted = [
            worker
            for worker in state.workers.values()
            if worker.notice is not None
            and worker.notice.kind is NoticeKind.MAINTENANCE
            and worker.final is None  # else the host goes anyway, and Ray may start no actor there
            and worker.slice_name is not None
            and state.fleet.holder_of(worker) is None  # else its TPUHostActor listens
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
                    self.controller.apply([MaintenanceCalledOffEvent(node_id)])
                    return
            except Exception:
                logger.exception("listening to the metadata server of %s failed; trying again", worker.name)
            finally:
                ray.kill(actor)
            await asyncio.sleep(AGAIN_S)
