from .client import Client
from .job_handle import JobHandle

__all__ = ["Client", "JobHandle"]
