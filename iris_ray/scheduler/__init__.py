"""Scheduling: placement, the order of the queue, and pending reasons. Reads the state and proposes plans.

May import: `model`, `state`, `errors`. No Ray, no clock, no I/O.
Start with `scheduler.py`. `fair_queue.py` orders the queue, `pending_reason.py` explains why a job waits, and
`planner.py` commits plans to the state. Pools and clients import `pending_reason.py` only, so `__init__.pyi` lists the
names of this package, and each is imported when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
