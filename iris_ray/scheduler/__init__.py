"""Scheduling: placement, the order of the queue, and pending reasons. Reads the state and proposes plans.

May import: `model`, `state`, `errors`. No Ray, no clock, no I/O.
Start with `scheduler.py`. `fair_queue.py` orders the queue, `pending_reason.py` explains why a job waits, and
`planner.py` commits plans to the state.
"""

from iris_ray.scheduler.cycle import SchedulingResult
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Shortage
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import Scheduler

__all__ = ["Obstacle", "PendingKind", "PendingReason", "Planner", "Scheduler", "SchedulingResult", "Shortage"]
