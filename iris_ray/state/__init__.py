"""The Controller's state, and the only function that changes it: events in, instructions out.

May import: `model`, `errors`. No Ray, no clock, no I/O: events carry the time.
Start with `controller_state.py`; `events.py` lists the events, and `instructions.py` their consequences.
"""

from iris_ray.model.job_spec import JobSpec
from iris_ray.state.controller_state import ControllerState
from iris_ray.state.instructions import Instructions

__all__ = ["ControllerState", "Instructions", "JobSpec"]
