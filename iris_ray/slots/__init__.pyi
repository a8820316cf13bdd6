from .actors.messages import ModelRow, SlotHosts, SlotRow, SlotStatus
from .actors.model_call import SlotRequest, slot_request
from .client.served_command import ProgramAnswer, ServedCommand
from .client.session import Session
from .client.slot_client import SlotClient
from .core.devices import DeviceKind
from .core.memory_estimates import GGUFModel, gguf_memory, read_gguf, split_memory, vllm_memory
from .core.models import ModelSpec
from .core.policy import IdleFor, PlacementPolicy, ServingPolicy
from .front.api_keys import ApiKey
from .front.http_front import HttpFront

__all__ = [
    "ApiKey",
    "DeviceKind",
    "GGUFModel",
    "HttpFront",
    "IdleFor",
    "ModelRow",
    "ModelSpec",
    "PlacementPolicy",
    "ProgramAnswer",
    "ServedCommand",
    "ServingPolicy",
    "Session",
    "SlotClient",
    "SlotHosts",
    "SlotRequest",
    "SlotRow",
    "SlotStatus",
    "gguf_memory",
    "read_gguf",
    "slot_request",
    "split_memory",
    "vllm_memory",
]
