"""A cluster in virtual time: the Controller's own state, scheduler and planner, with simulated hosts, pools and jobs.

May import: `model`, `state`, `scheduler`, `errors`. No Ray, no clock, no I/O; random numbers come from seeds.
Start with `simulation.py`; `pools.py` simulates pools and tasks, `hosts.py` the loss and return of hosts.
`description.py` reads a study from TOML, `report.py` sums up its results.
"""

from iris_ray.study.jobs import SimulatedJob, slice_spec, tasks_spec
from iris_ray.study.report import Report, report_on
from iris_ray.study.simulation import Simulation

__all__ = ["Report", "SimulatedJob", "Simulation", "report_on", "slice_spec", "tasks_spec"]
