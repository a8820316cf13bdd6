"""Who runs where, who goes first, and why a job waits. Reads the state and proposes; it changes nothing.

May import: `model`, `state`. No Ray, no clock, no I/O.
Start with `scheduler.py`; `fair_queue.py` is the order of the queue, `pending_reason.py` the reasons.
"""

from iris_ray.scheduler.scheduler import Scheduler, SchedulingResult

__all__ = ["Scheduler", "SchedulingResult"]
