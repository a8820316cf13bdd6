"""Who runs where, who goes first, and why a job waits. Reads the state and proposes a plan; `planner.py` commits it.

May import: `model`, `state`, `errors`. No Ray, no clock, no I/O.
Start with `scheduler.py`; `fair_queue.py` says who goes first in the queue, `pending_reason.py` why a job waits.
"""

from iris_ray.scheduler.cycle import SchedulingResult
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Shortage
from iris_ray.scheduler.planner import Planner
from iris_ray.scheduler.scheduler import Scheduler

__all__ = ["Obstacle", "PendingKind", "PendingReason", "Planner", "Scheduler", "SchedulingResult", "Shortage"]
