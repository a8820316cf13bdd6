"""A cluster in virtual time: the Controller's own state, scheduler and planner, with simulated hosts, pools and jobs.

May import: `model`, `state`, `scheduler`, `slots`, `errors`. No Ray, no clock, no I/O; chance comes from seeds.
Start with `simulation.py`; `pools.py` says what pools and tasks do, `hosts.py` what happens to hosts.
`slot_traffic.py` plays requests for slots.
"""

from iris_ray.study.jobs import SimulatedJob
from iris_ray.study.simulation import Simulation

__all__ = ["SimulatedJob", "Simulation"]
