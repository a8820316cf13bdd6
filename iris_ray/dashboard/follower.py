"""Asks the Controller what has changed, for all pages together."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.overview import Position
from iris_ray.dashboard.channel import Channel
from iris_ray.dashboard.cluster_view import ClusterView
from iris_ray.errors import IrisError

logger = logging.getLogger(__name__)

POLL_S = 0.5
IDLE_POLL_S = 2.0
"""How often it asks while no page is open, so that the events go on."""
ASK_AGAIN_S = 2.0


class Follower:
    """Keeps a view up to date and tells the channel what has changed.

    Args:
        connect: returns a connection to the Controller; blocks; raises `IrisError` if there is none.
        view: the tables.
        channel: the open pages.
        address: of the cluster, as people know it.
    """

    def __init__(
        self, connect: Callable[[], ControllerConnection], view: ClusterView, channel: Channel, address: str
    ) -> None:
        self._connect = connect
        self._view = view
        self._channel = channel
        self._address = address
        self._source: ControllerConnection | None = None
        self._position = Position()
        self._about: dict[str, Any] = {}

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            try:
                more = await self._step()
                pause_s = 0.05 if more else POLL_S if self._channel.has_readers else IDLE_POLL_S
                trouble = None
            except IrisError as error:
                pause_s, trouble = ASK_AGAIN_S, str(error)
            except Exception as error:
                logger.exception("asking the Controller failed; trying again")
                pause_s, trouble = ASK_AGAIN_S, f"{type(error).__name__}: {error}"
            about = {"address": self._address, "trouble": trouble, **self._about}
            self._channel.publish(self._view.take_changes(about))
            await self._channel.wait_for_reader(pause_s)

    async def _step(self) -> bool:
        """Ask once; return whether there is more to ask for at once."""
        if self._source is None:
            self._source = await asyncio.to_thread(self._connect)
        changes = await asyncio.to_thread(self._source.ask, ControllerInterface.changes, self._position)
        if not changes.begin_anew:
            self._view.apply(changes)
        else:
            about = await asyncio.to_thread(self._source.ask, ControllerInterface.about)
            self._about = {name: about[name] for name in ("epoch", "version", "started_at")}
            jobs = await asyncio.to_thread(self._source.ask_all, ControllerInterface.list_jobs)
            hosts = await asyncio.to_thread(self._source.ask_all, ControllerInterface.list_workers)
            self._view.begin(jobs, hosts)
        self._position = changes.position
        return changes.more or changes.begin_anew
