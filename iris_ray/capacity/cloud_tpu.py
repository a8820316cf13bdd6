"""The client of Google's Cloud TPU API: asks about slices, creates and deletes them.

The Controller asks only if the cluster's setting ``cloud_tpu`` names a project and zone. google-cloud-tpu's own client
has neither timeouts nor retries; every call here has both. Calls block: `ProviderWords` makes them in threads.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from iris_ray.capacity.google_api import CLOUD_PLATFORM, FOR_CHANGES, GoogleApi, Patience, Reply, refusal
from iris_ray.capacity.provider import Market, NewSlice, QueuedSlice, QueuedState, new_request_id
from iris_ray.errors import InvalidRequestError, ProviderError
from iris_ray.model.outcomes import ProviderState, ProviderWord
from iris_ray.model.topology import TPUConfig
from iris_ray.settings import TEST_CLOUD_TPU_ENDPOINT

if TYPE_CHECKING:
    from google.cloud import tpu_v2


FOR_A_WORD = Patience(0.8, 1.6)
NO_NODE = ProviderWord(ProviderState.PREEMPTED, "the provider no longer has this node")

NOT_SERVED = ("v7x",)
"""Generations that this API does not serve (https://docs.cloud.google.com/tpu/docs/tpu7x). Compute Engine does."""


class CloudTpu(GoogleApi):
    """One zone of the Cloud TPU API, a `Provider`."""

    name, role, variable = "the Cloud TPU API", "roles/tpu.admin", TEST_CLOUD_TPU_ENDPOINT

    def __init__(self, location: str, endpoint: str | None = None) -> None:
        super().__init__(location, endpoint)
        self._made: Any = None
        self._making = threading.Lock()

    def prepare(self) -> None:
        """Make the client ahead of the first call, because the import and the credentials may take long.

        Errors are ignored here; the first call raises them again.
        """
        with contextlib.suppress(Exception):
            self._client()

    def slice_word(self, slice_name: str, patience: Patience = FOR_A_WORD) -> ProviderWord:
        """Return the provider's word about a slice; UNKNOWN if the provider can't be asked."""
        try:
            return self._word(slice_name, patience)
        except ProviderError as error:
            return ProviderWord(ProviderState.UNKNOWN, str(error))

    def queued_slices(self, patience: Patience = FOR_CHANGES) -> list[QueuedSlice]:
        """Return all queued resources of one node. See `Provider`."""
        found = self._call(self._all_queued, patience)
        return [queued_slice(resource) for resource in found or () if len(resource.tpu.node_spec) == 1]

    def _all_queued(self, client: Any, timeout: float) -> list[Any]:
        """Return all queued resources.

        Raises:
            ServiceUnavailable: Google says that the list is not complete, as it could not reach the zone.
        """
        from google.api_core.exceptions import ServiceUnavailable

        found: list[Any] = []
        for page in client.list_queued_resources(parent=self.location, timeout=timeout).pages:
            if page.unreachable:
                raise ServiceUnavailable(f"the list lacks {', '.join(page.unreachable)}")  # type: ignore[no-untyped-call]
            found += page.queued_resources
        return found

    def require_type(self, config: TPUConfig, patience: Patience = FOR_CHANGES) -> None:
        """Refuse a type that the zone does not have. See `Provider`."""
        kinds = self._call(
            lambda client, timeout: list(client.list_accelerator_types(parent=self.location, timeout=timeout)), patience
        )
        there = {kind.type_ for kind in kinds or ()}
        if config.accelerator_type not in there:
            alike = sorted(one for one in there if one.startswith(config.generation)) or sorted(there)
            raise InvalidRequestError(
                f"--location {self.location} has no {config.name} (--tpu); it has {', '.join(alike[:12]) or 'no TPUs'}"
            )

    def create(self, wanted: NewSlice, patience: Patience = FOR_CHANGES) -> str | None:
        """Request a slice. A repetition changes nothing, because Google knows the request id. See `Provider`."""
        from google.api_core import exceptions
        from google.cloud import tpu_v2

        request = tpu_v2.CreateQueuedResourceRequest(
            parent=self.location,
            queued_resource_id=wanted.name,
            queued_resource=_resource(wanted),
            request_id=wanted.request_id,
        )
        try:
            self._call(lambda client, timeout: client.create_queued_resource(request, timeout=timeout), patience)
        except ProviderError as error:
            if isinstance(error.__cause__, exceptions.AlreadyExists):
                return None  # it is an earlier request of ours, since names are used once
            return refusal(error)
        return None

    def delete(self, name: str, patience: Patience = FOR_CHANGES) -> str | None:
        """Delete a queued resource with its node, which frees its quota. See `Provider`."""
        from google.api_core.exceptions import InternalServerError, Unknown
        from google.cloud import tpu_v2

        request = tpu_v2.DeleteQueuedResourceRequest(name=self._queued(name), request_id=new_request_id(), force=True)
        try:
            self._call(lambda client, timeout: client.delete_queued_resource(request, timeout=timeout), patience, True)
        except ProviderError as error:
            if isinstance(error.__cause__, (InternalServerError, Unknown)):
                return str(error)  # it may fail for this resource alone
            return refusal(error)
        return None

    # -- its parts -------------------------------------------------------------------------------------------------

    def _word(self, slice_name: str, patience: Patience) -> ProviderWord:
        node_name = f"{self.location}/nodes/{slice_name}"
        node = self._call(lambda client, timeout: client.get_node(name=node_name, timeout=timeout), patience, True)
        if node is None:
            return NO_NODE
        word = word_of_node(node)
        if word.state is ProviderState.PREEMPTED:
            return word
        name = node.queued_resource or self._queued(slice_name)
        queued = self._call(
            lambda client, timeout: client.get_queued_resource(name=name, timeout=timeout), patience, True
        )
        return (word_of_queued(queued) if queued is not None else None) or word

    def _queued(self, name: str) -> str:
        return f"{self.location}/queuedResources/{name}"

    def _client(self) -> Any:
        with self._making:
            if self._made is None:
                from google.cloud import tpu_v2

                if self.endpoint is None:
                    self._made = tpu_v2.TpuClient()
                else:
                    import grpc
                    from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

                    channel = grpc.insecure_channel(self.endpoint)
                    self._made = tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=channel))
            return self._made

    def _call(
        self, call: Callable[[Any, float], Reply], patience: Patience, may_be_missing: bool = False
    ) -> Reply | None:
        return self.call(lambda timeout: call(self._client(), timeout), patience, may_be_missing)


def _resource(wanted: NewSlice) -> "tpu_v2.QueuedResource":
    from google.cloud import tpu_v2

    hosts = wanted.hosts
    node = tpu_v2.Node(
        accelerator_type=wanted.config.accelerator_type,
        runtime_version=hosts.image,
        labels=dict(hosts.labels),
        metadata={"startup-script": hosts.startup_script},
        network_config=tpu_v2.NetworkConfig(
            enable_external_ips=hosts.external_ips, network=hosts.network, subnetwork=hosts.subnetwork
        ),
        tags=list(hosts.tags),
    )
    if hosts.service_account:
        node.service_account = tpu_v2.ServiceAccount(email=hosts.service_account, scope=[CLOUD_PLATFORM])
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=wanted.source.location, node_id=wanted.name, node=node)
    resource = tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))
    match wanted.source.market:
        case Market.SPOT:
            resource.spot = tpu_v2.QueuedResource.Spot()
        case Market.RESERVED:
            resource.guaranteed = tpu_v2.QueuedResource.Guaranteed()
            resource.reservation_name = wanted.source.reservation
    return resource


# -- replies of the API ------------------------------------------------------------------------------------------------


def word_of_node(node: "tpu_v2.Node") -> ProviderWord:
    """Return the verdict on a slice from its node's state, by the rules of the API's documentation."""
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
    """Return the verdict from the queued resource, which goes before its node's; None if it has none."""
    state, who = resource.state.state.name, resource.state.state_initiator.name
    if state in ("SUSPENDING", "SUSPENDED") and who == "SERVICE":
        return ProviderWord(ProviderState.PREEMPTED, f"the provider says that it has it {state}")
    if state in ("SUSPENDING", "SUSPENDED", "DELETING"):
        return ProviderWord(ProviderState.FAILED, f"the provider says that a user has it {state}")
    return None


def queued_slice(resource: "tpu_v2.QueuedResource") -> QueuedSlice:
    """Return a queued resource of one node in the provisioner's form."""
    spec, state = resource.tpu.node_spec[0], resource.state
    error = state.failed_data.error.message if state.state.name == "FAILED" else ""
    unreserved = Market.SPOT if "spot" in resource else Market.ON_DEMAND
    market = Market.RESERVED if resource.reservation_name else unreserved
    return QueuedSlice(
        name=resource.name.rpartition("/")[2],
        accelerator_type=spec.node.accelerator_type,
        state=QueuedState.__members__.get(state.state.name, QueuedState.UNKNOWN),
        labels=dict(spec.node.labels),
        by_service=state.state_initiator.name == "SERVICE",
        error=error,
        location=resource.name.partition("/queuedResources/")[0],
        market=market,
        reservation=resource.reservation_name,
        asked_at=resource.create_time.timestamp() if resource.create_time else 0.0,
    )


# -- provider words ----------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

WORD_TIMEOUT_S = 2.0
"""How long a verdict waits for the provider's word about the slices of an attempt."""
WORD_KEPT_S = 5.0
"""How long an answer is reused."""


class ProviderWords:
    """Asks the provider about several slices at once. It takes `WORD_TIMEOUT_S` at most, whatever the API does.

    Args:
        clouds: the zones whose API it asks; none: it asks nobody.
    """

    def __init__(self, *clouds: CloudTpu) -> None:
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="cloud-tpu")
        self._asked: dict[str, asyncio.Future[ProviderWord]] = {}
        self._ask_of(clouds)

    def close(self) -> None:
        """End the threads that wait for no answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask_at(self, locations: tuple[str, ...]) -> None:
        """Ask the API of these zones from now on; none: ask nobody."""
        if locations == tuple(cloud.location for cloud in self._clouds):
            return
        self._asked.clear()
        try:
            self._ask_of([CloudTpu.at(location) for location in locations])
        except InvalidRequestError as error:
            logger.error("the provider is not asked about lost slices: %s", error)
            self._ask_of(())

    def _ask_of(self, clouds: Sequence[CloudTpu]) -> None:
        self._clouds = tuple(clouds)
        for cloud in clouds:
            self._threads.submit(cloud.prepare)

    async def about(self, slice_names: Iterable[str]) -> dict[str, ProviderWord]:
        """Return the provider's word about each slice; nothing if no zone is configured."""
        if not self._clouds:
            return {}
        asked = {name: self._ask(name) for name in slice_names}
        if asked:
            await asyncio.wait(asked.values(), timeout=WORD_TIMEOUT_S)
        late = ProviderWord(ProviderState.UNKNOWN, f"the provider did not answer within {WORD_TIMEOUT_S:g} s")
        words = {name: answer.result() if answer.done() else late for name, answer in asked.items()}
        for name, word in words.items():
            logger.info("the provider says about %s: %s (%s)", name, word.state.value, word.reason)
        return words

    def _ask(self, name: str) -> "asyncio.Future[ProviderWord]":
        """Return the future answer. The hosts of a slice are lost at about the same time, and share one answer."""
        if name not in self._asked:
            loop = asyncio.get_running_loop()
            self._asked[name] = answer = loop.run_in_executor(self._threads, _word_or_defect, self._clouds, name)
            answer.add_done_callback(lambda _: loop.call_later(WORD_KEPT_S, self._asked.pop, name, None))
        return self._asked[name]


def _word_or_defect(clouds: Sequence[CloudTpu], name: str) -> ProviderWord:
    """Return the word of the zone that has the slice. If one zone can't be asked, nobody knows that it has gone."""
    try:
        words = [NO_NODE]
        for cloud in clouds:
            word = cloud.slice_word(name)
            if word.state is not ProviderState.UNKNOWN and word != NO_NODE:
                return word
            words.append(word)
        return next((word for word in words if word.state is ProviderState.UNKNOWN), NO_NODE)
    except Exception as error:  # a bug here must not prevent a verdict
        logger.exception("asking the provider about %s failed", name)
        return ProviderWord(ProviderState.UNKNOWN, repr(error))
