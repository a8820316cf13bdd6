"""A cluster in virtual time: the Controller's own state, scheduler and planner, with simulated hosts, pools and jobs.

May import: `model`, `state`, `scheduler`, `errors`, and what finds other services. No Ray, no clock, no I/O; random
numbers come from seeds.
Start with `simulation.py`; `pools.py` simulates pools and tasks, `hosts.py` the loss and return of hosts.
`description.py` reads a study from TOML, `report.py` sums up its results.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
