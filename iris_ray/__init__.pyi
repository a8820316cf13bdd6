from .actors.protocol.status import HostCondition, JobStatus, TaskAttempt, TaskStatus, WorkerStatus
from .client.client import IrisClient
from .client.job_group import GroupHandle, JobGroup
from .client.job_handle import JobHandle
from .client.run_on_pod import (
    release,
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from .dev.notebook import load_ipython_extension
from .docker.client import run_docker_on_pod
from .endpoints.task import lookup_endpoint, register_endpoint
from .errors import IrisError
from .logs.core import TaskLog
from .model.constraints import AttributeValue, Constraint, ConstraintOp
from .model.job_info import JobInfo
from .model.job_spec import CoschedulingConfig
from .model.lifecycle import JobState, TaskState
from .model.multislice import MultisliceInfo
from .model.notices import NoticeKind
from .model.options import PriorityBand
from .model.outcomes import RunErrorKind, TpuCancelled, TpuFailed, TpuPreempted, TpuRunError, TpuSuccess
from .model.requirement import ResourceSpec, tpu_device
from .model.topology import TPUConfig, get_tpu_config
from .remote.ray_jobs import RayJobConfig, RayJobs, RayJobStatus, submit_tpu_job_on_ray
from .secrets.client import Secret
from .slots.actors.messages import SlotHosts
from .slots.actors.model_call import SlotRequest, slot_request
from .slots.client.session import Session
from .slots.client.slot_client import SlotClient
from .slots.core.devices import DeviceKind
from .slots.core.policy import ServingPolicy
from .task.job_info import get_job_info
from .task.preemption import PreemptionNotice, on_preemption, preemption_notice
from .task.progress import heartbeat, report_status, unproductive

__version__: str
__all__ = [
    "AttributeValue",
    "Constraint",
    "ConstraintOp",
    "CoschedulingConfig",
    "DeviceKind",
    "GroupHandle",
    "HostCondition",
    "IrisClient",
    "IrisError",
    "JobGroup",
    "JobHandle",
    "JobInfo",
    "JobState",
    "JobStatus",
    "MultisliceInfo",
    "NoticeKind",
    "PreemptionNotice",
    "PriorityBand",
    "RayJobConfig",
    "RayJobStatus",
    "RayJobs",
    "ResourceSpec",
    "RunErrorKind",
    "Secret",
    "ServingPolicy",
    "Session",
    "SlotClient",
    "SlotHosts",
    "SlotRequest",
    "TPUConfig",
    "TaskAttempt",
    "TaskLog",
    "TaskState",
    "TaskStatus",
    "TpuCancelled",
    "TpuFailed",
    "TpuPreempted",
    "TpuRunError",
    "TpuSuccess",
    "WorkerStatus",
    "get_job_info",
    "get_tpu_config",
    "heartbeat",
    "load_ipython_extension",
    "lookup_endpoint",
    "on_preemption",
    "preemption_notice",
    "register_endpoint",
    "release",
    "report_status",
    "run_docker_on_pod",
    "run_on_pod",
    "run_on_pod_multislice",
    "run_on_pod_multislice_resumable",
    "run_on_pod_ray",
    "run_on_pod_resumable",
    "slot_request",
    "submit_tpu_job_on_ray",
    "tpu_device",
    "unproductive",
]
