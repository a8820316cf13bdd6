"""What the replies of the Cloud TPU API mean. Pure."""

from typing import TYPE_CHECKING

from iris_ray.cloud.queued_slices import QueuedSlice, QueuedState
from iris_ray.model.outcomes import ProviderState, ProviderWord

if TYPE_CHECKING:
    from google.cloud import tpu_v2


def word_of_node(node: "tpu_v2.Node") -> ProviderWord:
    """Return what a node's own state says, by the rules of the API's documentation."""
    state, health = node.state.name, node.health.name
    described = f" ({node.health_description})" if node.health_description else ""
    if state in ("PREEMPTED", "TERMINATED"):
        return ProviderWord(ProviderState.PREEMPTED, f"the provider says that its node is {state}")
    if state in ("STATE_UNSPECIFIED", "UNKNOWN"):
        return ProviderWord(ProviderState.UNKNOWN, f"the provider says that its node is {state}{described}")
    if state != "READY":
        return ProviderWord(ProviderState.FAILED, f"the provider says that its node is {state}{described}")
    if health not in ("HEALTHY", "HEALTH_UNSPECIFIED"):
        return ProviderWord(ProviderState.FAILED, f"the provider says that its node is {health}{described}")
    return ProviderWord(ProviderState.READY, "the provider says that its node is READY")


def word_of_queued(resource: "tpu_v2.QueuedResource") -> ProviderWord | None:
    """Return what the queued resource says ahead of its node, or None."""
    state, who = resource.state.state.name, resource.state.state_initiator.name
    if state in ("SUSPENDING", "SUSPENDED") and who == "SERVICE":
        return ProviderWord(ProviderState.PREEMPTED, f"the provider says that it has it {state}")
    if state in ("SUSPENDING", "SUSPENDED", "DELETING"):
        return ProviderWord(ProviderState.FAILED, f"the provider says that a user has it {state}")
    return None


def queued_slice(resource: "tpu_v2.QueuedResource") -> QueuedSlice:
    """Return a queued resource, which has one node, as what a provisioner needs of it."""
    spec, state = resource.tpu.node_spec[0], resource.state
    error = state.failed_data.error.message if state.state.name == "FAILED" else ""
    return QueuedSlice(
        name=resource.name.rpartition("/")[2],
        accelerator_type=spec.node.accelerator_type,
        state=QueuedState.__members__.get(state.state.name, QueuedState.UNKNOWN),
        labels=dict(spec.node.labels),
        by_service=state.state_initiator.name == "SERVICE",
        error=error,
    )
