from .client import IrisClient, JobHandle

__all__ = ["IrisClient", "JobHandle"]
