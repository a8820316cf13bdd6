from .cycle import SchedulingResult
from .pending_reason import Obstacle, PendingKind, PendingReason, Shortage
from .planner import Planner
from .scheduler import Scheduler

__all__ = ["Obstacle", "PendingKind", "PendingReason", "Planner", "Scheduler", "SchedulingResult", "Shortage"]
