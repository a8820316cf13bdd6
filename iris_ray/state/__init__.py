"""What the cluster's Controller knows, and the only function that changes it: events in, instructions out.

May import: `model`, `errors`. No Ray, no clock, no I/O: events bring the time.
Start with `controller_state.py`; `events.py` lists what can happen, `instructions.py` what follows from it.
"""

from iris_ray.model.job_spec import JobSpec
from iris_ray.state.controller_state import ControllerState
from iris_ray.state.instructions import Instructions

__all__ = ["ControllerState", "Instructions", "JobSpec"]
