"""Slices by the Compute Engine API, for types and ways to pay that the Cloud TPU API does not have.

A slice is a managed instance group of its own, in bulk mode: Google creates all of its VMs or none. Sources of the
rules here: docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice, …/instance-groups/about-bulk-mode.

- A workload policy has the topology of a slice of several hosts. Policies and instance templates cost nothing and are
  kept: their names say what they are for, and equal slices share them.
- A group with a topology must be in bulk mode; resize requests are refused for it. Flex-start is in the template.
- Groups are never repaired: a slice that lost a host is deleted, and another one is requested.
- Groups have no labels. The description of a group says whose it is.

It needs google-cloud-compute: ``pip install google-cloud-compute``.
"""

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from iris_ray.capacity.google_api import CLOUD_PLATFORM, FOR_CHANGES, GoogleApi, Reply, refusal
from iris_ray.capacity.provider import OWNER_LABEL, Market, NewSlice, QueuedSlice, QueuedState, new_request_id
from iris_ray.errors import InvalidRequestError, ProviderError
from iris_ray.model.topology import TPUConfig, default_topology
from iris_ray.settings import TEST_COMPUTE_ENDPOINT

if TYPE_CHECKING:
    from google.cloud import compute_v1

MACHINES: Mapping[str, str] = {"v5p": "ct5p-hightpu", "v6e": "ct6e-standard", "v7x": "tpu7x-standard"}
"""The machine types of generations, without their chips: https://docs.cloud.google.com/compute/docs/tpus/tpu-machines."""
IMAGES: Mapping[str, str] = {
    "v5p": "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "v6e": "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    "v7x": "ubuntu-accel-2404-amd64-tpu-tpu7x",
}
"""The families of Google's images for TPUs, in the project ubuntu-os-accelerator-images."""
DISK_GB = 200
OPERATION_POLL_S = 0.5
NEEDS = "--api compute-engine needs Google's client: pip install google-cloud-compute"
_GONE = {"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED", "DEPROVISIONING"}
_MAKING = {"CREATING", "CREATING_WITHOUT_RETRIES", "RECREATING", "VERIFYING"}
VANISHED_S = 600.0
"""The age from which a group without VMs counts as one that has lost them, unless some are being made."""
_NO_STOCK = "ZONE_RESOURCE_POOL_EXHAUSTED"


def machine_type(config: TPUConfig) -> str:
    """Return the machine type of a slice's hosts, such as ``tpu7x-standard-4t``.

    Raises:
        InvalidRequestError: Compute Engine has no such TPUs.
    """
    if config.generation not in MACHINES:
        raise InvalidRequestError(
            f"Compute Engine has no --tpu {config.name}, only {', '.join(MACHINES)}: use --api cloud-tpu"
        )
    return f"{MACHINES[config.generation]}-{config.chips_per_vm}t"


class ComputeEngine(GoogleApi):
    """One zone of the Compute Engine API, a `Provider`.

    Raises:
        InvalidRequestError: the location or endpoint is malformed, or Google's client is not installed.
    """

    name, role = "the Compute Engine API", "roles/compute.instanceAdmin.v1"
    variable = TEST_COMPUTE_ENDPOINT

    def __init__(self, location: str, endpoint: str | None = None) -> None:
        super().__init__(location, endpoint)
        try:
            from google.cloud import compute_v1
        except ImportError:
            raise InvalidRequestError(NEEDS) from None
        self._types = compute_v1
        _, self._project, _, self._zone = location.split("/")
        self._region = self._zone.rpartition("-")[0]

    # -- the seam --------------------------------------------------------------------------------------------------

    def require_type(self, config: TPUConfig) -> None:
        """Refuse a type that the zone does not have. See `Provider`."""
        kind = machine_type(config)
        place = {"project": self._project, "zone": self._zone}
        found = self._call(lambda t: self._client("MachineTypes").get(machine_type=kind, **place, **t))
        if found is None:
            raise InvalidRequestError(f"--location {self.location} has no {config.name} (--tpu): it lacks {kind}")

    def queued_slices(self) -> list[QueuedSlice]:
        """Return the slices that provisioners have made in the zone. See `Provider`."""
        groups = self._call(lambda t: list(self._groups.list(project=self._project, zone=self._zone, **t)))
        ours = ((group, _DESCRIPTION.fullmatch(group.description)) for group in groups or ())
        return [self._slice(group, found) for group, found in ours if found]

    def create(self, wanted: NewSlice) -> str | None:
        """Request a slice. See `Provider`."""
        config, types = wanted.config, self._types
        group = types.InstanceGroupManager(
            name=wanted.name,
            base_instance_name=wanted.name,
            description=_description(wanted),
            target_size=config.vm_count,
            target_size_policy=types.InstanceGroupManagerTargetSizePolicy(mode="BULK"),
            instance_lifecycle_policy=types.InstanceGroupManagerInstanceLifecyclePolicy(
                default_action_on_failure="DO_NOTHING"
            ),
        )
        try:
            group.instance_template = self._template(wanted)
            if config.vm_count > 1:
                group.resource_policies.workload_policy = self._policy(config)
            request = types.InsertInstanceGroupManagerRequest(
                project=self._project,
                zone=self._zone,
                instance_group_manager_resource=group,
                request_id=wanted.request_id,
            )
            self._made(lambda t: self._groups.insert_unary(request, **t))
        except ProviderError as error:
            return refusal(error)
        return None

    def delete(self, name: str) -> str | None:
        """Delete a group with its VMs. See `Provider`."""
        request = self._types.DeleteInstanceGroupManagerRequest(
            project=self._project, zone=self._zone, instance_group_manager=name, request_id=new_request_id()
        )
        try:
            self._call(lambda t: self._groups.delete_unary(request, **t))
        except ProviderError as error:
            return refusal(error)
        return None

    # -- parts of a group ------------------------------------------------------------------------------------------

    def _policy(self, config: TPUConfig) -> str:
        """Make the workload policy of a topology, unless it is there. Return its URL."""
        topology, types = default_topology(config), self._types
        about = types.ResourcePolicyWorkloadPolicy(type_="HIGH_THROUGHPUT", accelerator_topology=topology)
        policy = types.ResourcePolicy(name=f"iris-{topology}", workload_policy=about)
        return self._regional("ResourcePolicies", "resourcePolicies", resource_policy_resource=policy)

    def _template(self, wanted: NewSlice) -> str:
        """Make the template of a slice's hosts, unless it is there. Return its URL."""
        properties = self._properties(wanted)
        text = type(properties).to_json(properties, sort_keys=True)
        name = f"iris-{wanted.config.generation}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        template = self._types.InstanceTemplate(name=name, properties=properties)
        return self._regional("RegionInstanceTemplates", "instanceTemplates", instance_template_resource=template)

    def _regional(self, service: str, kind: str, **resource: Any) -> str:
        place, (made,) = {"project": self._project, "region": self._region}, resource.values()
        self._made(lambda t: self._client(service).insert_unary(**place, **resource, **t))
        root = "https://www.googleapis.com/compute/v1"
        return f"{root}/projects/{self._project}/regions/{self._region}/{kind}/{made.name}"

    def _properties(self, wanted: NewSlice) -> "compute_v1.InstanceProperties":
        types, hosts, config = self._types, wanted.hosts, wanted.config
        family = f"projects/ubuntu-os-accelerator-images/global/images/family/{IMAGES[config.generation]}"
        disk = types.AttachedDiskInitializeParams(source_image=hosts.image or family, disk_size_gb=DISK_GB)
        if config.generation == "v7x":
            disk.disk_type = "hyperdisk-balanced"
        interface = types.NetworkInterface(nic_type="GVNIC")
        if hosts.subnetwork:
            interface.subnetwork = self._path(f"regions/{self._region}/subnetworks", hosts.subnetwork)
        else:
            interface.network = self._path("global/networks", hosts.network or "default")
        if hosts.external_ips:
            interface.access_configs = [types.AccessConfig(name="External NAT", type_="ONE_TO_ONE_NAT")]
        properties: compute_v1.InstanceProperties = types.InstanceProperties(
            machine_type=machine_type(config),
            disks=[types.AttachedDisk(boot=True, auto_delete=True, initialize_params=disk)],
            network_interfaces=[interface],
            labels=dict(hosts.labels),
            tags=types.Tags(items=list(hosts.tags)),
            metadata=types.Metadata(items=[types.Items(key="startup-script", value=hosts.startup_script)]),
            service_accounts=[types.ServiceAccount(email=hosts.service_account or "default", scopes=[CLOUD_PLATFORM])],
            scheduling=self._scheduling(wanted),
        )
        if wanted.source.market is Market.RESERVED:
            name = wanted.source.reservation.rpartition("/")[2]
            properties.reservation_affinity = types.ReservationAffinity(
                consume_reservation_type="SPECIFIC_RESERVATION",
                key="compute.googleapis.com/reservation-name",
                values=[f"projects/{wanted.source.location.split('/')[1]}/reservations/{name}"],
            )
        return properties

    def _path(self, kind: str, name: str) -> str:
        return name if "/" in name else f"projects/{self._project}/{kind}/{name}"

    def _scheduling(self, wanted: NewSlice) -> "compute_v1.Scheduling":
        models = {Market.SPOT: "SPOT", Market.RESERVED: "RESERVATION_BOUND", Market.FLEX: "FLEX_START"}
        scheduling = self._types.Scheduling(
            on_host_maintenance="TERMINATE",
            automatic_restart=False,
            provisioning_model=models.get(wanted.source.market, "STANDARD"),
        )
        if wanted.source.market is not Market.ON_DEMAND:
            scheduling.instance_termination_action = "DELETE"
        if wanted.source.market is Market.FLEX:
            scheduling.max_run_duration = self._types.Duration(seconds=wanted.hosts.max_run_s)
        return scheduling

    # -- the state of a group --------------------------------------------------------------------------------------

    def _slice(self, group: "compute_v1.InstanceGroupManager", about: re.Match[str]) -> QueuedSlice:
        hosts = self._call(
            lambda t: list(
                self._groups.list_managed_instances(
                    project=self._project, zone=self._zone, instance_group_manager=group.name, **t
                )
            )
        )
        asked_at = _seconds(group.creation_timestamp)
        age_s = time.time() - asked_at if asked_at else 0.0
        state, error = state_of(group, hosts or (), int(about["hosts"]), about["market"] == Market.FLEX.value, age_s)
        return QueuedSlice(
            name=group.name,
            accelerator_type=about["type"],
            state=state,
            labels={OWNER_LABEL: about["owner"]},
            by_service=True,
            error=error,
            location=self.location,
            market=Market(about["market"]),
            reservation=about["reservation"] or "",
            asked_at=asked_at,
        )

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[Mapping[str, Any]], Reply]) -> Reply | None:
        """Return the reply, or None if the resource does not exist."""
        return self.call(lambda timeout: call({"timeout": timeout, "retry": None}), FOR_CHANGES, may_be_missing=True)

    def _made(self, insert: Callable[[Mapping[str, Any]], Any]) -> None:
        """Wait until a resource is made; one that exists already is an earlier one of ours with the same meaning.

        Raises:
            ProviderError: the API refuses, at once or in the operation's end, or can't be reached.
        """
        from google.api_core.exceptions import Conflict

        def make(timeout: float) -> None:
            self._finish(insert({"timeout": timeout, "retry": None}), timeout)

        try:
            self.call(make, FOR_CHANGES)
        except ProviderError as error:
            if not isinstance(error.__cause__, Conflict):
                raise

    def _finish(self, operation: "compute_v1.Operation", timeout: float) -> None:
        """Wait for the end of an operation, which `call` does again if it takes too long."""
        from google.api_core.exceptions import DeadlineExceeded, from_http_status

        deadline = time.monotonic() + timeout
        place = {"region": self._region} if operation.region else {"zone": self._zone}
        client = self._client("RegionOperations" if operation.region else "ZoneOperations")
        while operation.status is not self._types.Operation.Status.DONE:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{operation.name} is not done after {timeout:g} s")  # type: ignore[no-untyped-call]
            time.sleep(OPERATION_POLL_S)
            operation = client.get(
                project=self._project, operation=operation.name, timeout=timeout, retry=None, **place
            )
        if operation.error.errors:
            first = operation.error.errors[0]
            status = operation.http_error_status_code or 400
            raise from_http_status(status, f"{first.code}: {first.message}")  # type: ignore[no-untyped-call]

    @cache  # noqa: B019 - a process has a few zones
    def _client(self, service: str) -> Any:
        client = getattr(self._types, f"{service}Client")
        if self.endpoint is None:
            return client()
        from google.auth.credentials import AnonymousCredentials

        transport = client.get_transport_class("rest")
        return client(
            transport=transport(host=self.endpoint, credentials=AnonymousCredentials(), url_scheme="http")  # type: ignore[no-untyped-call]
        )

    @property
    def _groups(self) -> Any:
        return self._client("InstanceGroupManagers")


_DESCRIPTION = re.compile(
    rf"{OWNER_LABEL}=(?P<owner>\S+) type=(?P<type>\S+) hosts=(?P<hosts>\d+)"
    rf" market=(?P<market>{'|'.join(market.value for market in Market)})(?: reservation=(?P<reservation>\S+))?"
)
"""The description of a group that a provisioner has made; others may have any."""


def _description(wanted: NewSlice) -> str:
    """Return the description of a group, which `_DESCRIPTION` reads."""
    config, source = wanted.config, wanted.source
    owner = f"{OWNER_LABEL}={wanted.hosts.labels[OWNER_LABEL]}"
    reservation = f" reservation={source.reservation}" if source.reservation else ""
    return f"{owner} type={config.accelerator_type} hosts={config.vm_count} market={source.market.value}{reservation}"


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def state_of(
    group: "compute_v1.InstanceGroupManager",
    hosts: Sequence["compute_v1.ManagedInstance"],
    size: int,
    waits: bool,
    age_s: float = 0.0,
) -> tuple[QueuedState, str]:
    """Return the state of a slice, and why it failed, from its group and the group's VMs.

    Args:
        group: the managed instance group.
        hosts: its VMs, planned ones included.
        size: how many it is to have.
        waits: whether Google queues for capacity, so that a lack of it is not a failure.
        age_s: seconds since the group was requested.
    """
    statuses = [host.instance_status for host in hosts]
    actions = [host.current_action for host in hosts]
    running = statuses.count("RUNNING")
    if group.target_size == 0 or (hosts and set(actions) == {"DELETING"}):
        return QueuedState.DELETING, ""
    if running == size:
        return QueuedState.ACTIVE, ""
    is_made = any(status for status in statuses)
    if _GONE.intersection(statuses) or (is_made and not {"CREATING", "VERIFYING"}.intersection(actions)):
        return QueuedState.SUSPENDED, ""  # hosts were taken: groups are not repaired
    errors = [f"{one.code}: {one.message}" for host in hosts for one in host.last_attempt.errors.errors]
    bulk = group.status.bulk_instance_operation
    errors += [f"{one.code}: {one.message}" for one in bulk.last_progress_check.error.errors]
    fatal = [error for error in errors if not (waits and error.startswith(_NO_STOCK))]
    if fatal:
        return QueuedState.FAILED, fatal[0]
    if not waits and age_s > VANISHED_S and not (is_made or bulk.in_progress or _MAKING.intersection(actions)):
        return QueuedState.SUSPENDED, ""  # VMs that end are deleted: they leave an empty group
    return QueuedState.PROVISIONING if is_made else QueuedState.WAITING_FOR_RESOURCES, ""
