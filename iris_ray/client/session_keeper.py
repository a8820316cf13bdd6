"""Tells a SlotManager that the client of some sessions is there, beside their calls."""

import logging
import threading
from concurrent.futures import TimeoutError as NoAnswer

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from iris_ray.client.lease import Lease

RENEW_S = 5.0
"""A SlotManager waits six times as long: `ServingPolicy.silence_s`."""
logger = logging.getLogger(__name__)


class SessionKeeper:
    """Renews the sessions of one client every few seconds, in a thread that is there while there are any.

    Args:
        manager: the SlotManager.
    """

    def __init__(self, manager: ActorHandle) -> None:
        self._manager = manager
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._runs = False

    def add(self, lease: Lease) -> None:
        """Renew a session from now on, until it is over."""
        with self._lock:
            self._leases[lease.session_id] = lease
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="slot sessions", daemon=True).start()

    def remove(self, lease: Lease) -> None:
        """Renew a session no more."""
        with self._lock:
            self._leases.pop(lease.session_id, None)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(RENEW_S)
            with self._lock:
                leases = {name: each for name, each in self._leases.items() if not each.over}
                self._leases = leases.copy()
                if not leases:
                    self._runs = False
                    return
            self._renew(leases)

    def _renew(self, leases: dict[str, Lease]) -> None:
        idle = {name: each.idle_s() for name, each in leases.items()}
        try:  # a thread that waits in ray.get while the driver disconnects would crash the process
            over = self._manager.renew_sessions.remote(idle).future().result(RENEW_S)
        except (NoAnswer, ActorUnavailableError) as error:
            logger.warning("sessions with models could not be renewed: %s; it is tried again", type(error).__name__)
        except RayError:
            for each in leases.values():
                each.end("its SlotManager is gone")
        else:
            for name, reason in over.items():
                leases[name].end(reason)
