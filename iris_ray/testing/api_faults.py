"""The calls of an emulated API, and the failures and delays that a test asks for."""

import threading
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Code = TypeVar("Code")


@dataclass(slots=True)
class ApiFault(Generic[Code]):
    """A failure or delay of the next calls of a method (``*``: of all methods)."""

    method: str
    times: int
    delay_s: float = 0.0
    code: Code | None = None


class FaultyApi(Generic[Code]):
    """The base of the servers of emulated APIs. A ``Code`` is how their API calls an error."""

    __slots__ = ()
    lock: threading.RLock
    calls: list[tuple[str, Any]]
    _faults: list[ApiFault[Code]]

    def fail(self, code: Code, method: str = "*", times: int = 1) -> None:
        """Answer the next calls of a method, such as ``"GetNode"`` or ``"instances.delete"``, with an error."""
        with self.lock:
            self._faults.append(ApiFault(method, times, code=code))

    def delay(self, seconds: float, method: str = "*", times: int = 1) -> None:
        """Delay the next calls of a method by so many seconds."""
        with self.lock:
            self._faults.append(ApiFault(method, times, delay_s=seconds))

    def heal(self) -> None:
        """Cancel the failures and delays that have not happened yet."""
        with self.lock:
            self._faults.clear()

    def count(self, method: str) -> int:
        """Return how many calls of a method have come."""
        with self.lock:
            return sum(called == method for called, _ in self.calls)

    def take_fault(self, method: str, request: Any) -> ApiFault[Code] | None:
        """Note a call. Return the fault that it meets, or None, and count it down."""
        with self.lock:
            self.calls.append((method, request))
            fault = next((one for one in self._faults if one.method in (method, "*")), None)
            if fault is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
            return fault
