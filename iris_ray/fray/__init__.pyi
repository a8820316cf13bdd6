from .actor_group import ActorGroup
from .actor_handle import ActorHandle
from .client import Client
from .job_handle import JobHandle

__all__ = ["ActorGroup", "ActorHandle", "Client", "JobHandle"]
