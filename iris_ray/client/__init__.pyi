from .client import IrisClient
from .job_handle import JobHandle

__all__ = ["IrisClient", "JobHandle"]
