"""Failures and delays of the API that a test asks for."""

from dataclasses import dataclass, field

import grpc


@dataclass(slots=True)
class Fault:
    """What happens to the next calls of a method (``*``: of all methods)."""

    method: str
    times: int
    delay_s: float = 0.0
    code: grpc.StatusCode | None = None


@dataclass(slots=True)
class Faults:
    """The faults to come; not thread-safe."""

    _faults: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def clear(self) -> None:
        self._faults.clear()

    def take(self, method: str) -> Fault | None:
        """Return the fault that this call of a method meets, or None. It counts as one of its ``times``."""
        for fault in self._faults:
            if fault.method in (method, "*"):
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
                return fault
        return None
