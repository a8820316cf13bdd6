from .jobs import SimulatedJob, slice_spec, tasks_spec
from .report import Report, report_on
from .simulation import Simulation

__all__ = ["Report", "SimulatedJob", "Simulation", "report_on", "slice_spec", "tasks_spec"]
