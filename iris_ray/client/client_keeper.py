"""Tells a SlotManager that a client is there, while it has requests or sessions."""

import asyncio
import logging
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, suppress

from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from iris_ray.actors.calls.actor import Actor
from iris_ray.actors.slots.slot_manager import SlotManager
from iris_ray.client.connection import this_connection
from iris_ray.client.lease import Lease
from iris_ray.errors import NoClusterError

RENEW_S = 5.0
"""A SlotManager waits six times as long: `ServingPolicy.silence_s`."""
logger = logging.getLogger(__name__)


class ClientKeeper:
    """Renews one client every few seconds, in a thread that is there while it has requests or sessions.

    Args:
        manager: the SlotManager.

    Attributes:
        client_id: what the manager knows the client by.
    """

    def __init__(self, manager: Actor[SlotManager]) -> None:
        self.client_id = uuid.uuid4().hex
        self._manager = manager
        self._connection = this_connection()
        self._leases: dict[str, Lease] = {}
        self._requests = 0
        self._lock = threading.Lock()
        self._runs = False

    @property
    def is_connected(self) -> bool:
        """Whether this process is still in the manager's cluster. If not, a call of the manager would have Ray join
        another cluster, or start one on this machine."""
        return this_connection() == self._connection

    def require_connection(self) -> None:
        """Raise NoClusterError if this process has left the manager's cluster."""
        if not self.is_connected:
            raise NoClusterError(
                "this process has left the cluster on which these models are served (ray.shutdown); connect again, and"
                " make another SlotClient"
            )

    def add(self, lease: Lease) -> None:
        """Renew a session from now on, until it is over."""
        with self._lock:
            self._leases[lease.session_id] = lease
            self._start()

    def remove(self, lease: Lease) -> None:
        """Renew a session no more."""
        with self._lock:
            self._leases.pop(lease.session_id, None)

    def add_request(self) -> None:
        """Count a request: the client is renewed while it has any. Raises like `require_connection`."""
        self.require_connection()
        with self._lock:
            self._requests += 1
            self._start()

    def remove_request(self) -> None:
        """Count a request no more."""
        with self._lock:
            self._requests -= 1

    @contextmanager
    def request(self, request_id: str) -> Iterator[None]:
        """Count a request while its answer is waited for. If that is given up, cancel the request."""
        self.add_request()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            self.cancel(request_id)
            raise
        finally:
            self.remove_request()

    def cancel(self, request_id: str) -> None:
        """Have the manager forget a request, and don't wait for that."""
        if self.is_connected:
            with suppress(RayError):  # the manager is gone
                self._manager.call(SlotManager.cancel, request_id)

    def _start(self) -> None:
        if not self._runs:
            self._runs = True
            threading.Thread(target=self._run, name="slot client", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(RENEW_S)
            with self._lock:
                leases = {name: each for name, each in self._leases.items() if not each.over}
                self._leases = leases.copy()
                if not leases and not self._requests:
                    self._runs = False
                    return
            if not self._renew(leases):
                return

    def _renew(self, leases: dict[str, Lease]) -> bool:
        """Return whether the manager is there."""
        if not self.is_connected:
            for each in leases.values():
                each.end("this process has left the cluster")
            return False
        idle = {name: each.idle_s() for name, each in leases.items()}
        try:  # a thread that waits in ray.get while the driver disconnects would crash the process
            over = self._manager.call(SlotManager.renew, self.client_id, idle).future().result(RENEW_S)
        except (NoAnswer, ActorUnavailableError) as error:
            logger.warning("a client of slots could not be renewed: %s; it is tried again", type(error).__name__)
        except RayTaskError:
            logger.exception("a client of slots could not be renewed, by a defect of iris_ray; it is tried again")
        except RayError:
            for each in leases.values():
                each.end("its SlotManager is gone")
            return False
        else:
            for name, reason in over.items():
                leases[name].end(reason)
        return True
