from .actor_handle import ActorGroup, ActorHandle
from .client import Client
from .job_handle import JobHandle

__all__ = ["ActorGroup", "ActorHandle", "Client", "JobHandle"]
