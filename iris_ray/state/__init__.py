"""The Controller's state, and the only function that changes it: events in, instructions out.

May import: `model`, `errors`. No Ray, no clock, no I/O: events carry the time.
Start with `controller_state.py`; `events.py` lists the events, and `instructions.py` their consequences. Pools and
clients import `events.py` only, so the state itself is imported when it is first used.
"""

from typing import TYPE_CHECKING

import lazy_loader  # type: ignore[import-untyped]

from iris_ray.model.job_spec import JobSpec

if TYPE_CHECKING:
    from iris_ray.state.controller_state import ControllerState
    from iris_ray.state.instructions import Instructions

__all__ = ["ControllerState", "Instructions", "JobSpec"]
__getattr__, _, _ = lazy_loader.attach(
    __name__, submod_attrs={"controller_state": ["ControllerState"], "instructions": ["Instructions"]}
)
