"""The state of a zone: groups of TPU VMs, policies, templates, reservations and quota, which a test changes."""

import math
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

CHIPS = re.compile(r"(ct5p-hightpu|ct6e-standard|tpu7x-standard)-(\d)t")
"""A machine type of TPU VMs and its chips."""
RESERVED_BY = "compute.googleapis.com/reservation-name"
NO_STOCK, NO_QUOTA, FULL = "ZONE_RESOURCE_POOL_EXHAUSTED", "QUOTA_EXCEEDED", "RESERVATION_EXHAUSTED"

Json = dict[str, Any]


class ComputeRefusal(Exception):
    """The status that answers a call instead of a result."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Vm:
    """A VM of a group, or one that is to be made: then it has no status."""

    name: str
    action: str = "CREATING"
    status: str = ""
    errors: list[Json] = field(default_factory=list)

    def as_json(self, zone: str) -> Json:
        shown: Json = {"name": self.name, "instance": f"{zone}/instances/{self.name}", "currentAction": self.action}
        if self.status:
            shown["instanceStatus"] = self.status
        if self.errors:
            shown["lastAttempt"] = {"errors": {"errors": self.errors}}
        return shown


@dataclass(slots=True)
class InstanceGroup:
    """A managed instance group.

    Attributes:
        resource: as it was requested, with what the API adds.
        vms: its VMs by name.
        chips: of each VM.
        model: the provisioning model of its template.
        reservation: the name of the reservation that its template asks for, or "".
        is_going: whether it is being deleted.
    """

    resource: Json
    chips: int
    model: str
    reservation: str
    vms: dict[str, Vm] = field(default_factory=dict)
    waits_for: Json | None = None
    is_going: bool = False

    @property
    def all_chips(self) -> int:
        return self.chips * len(self.vms)

    @property
    def has_vms(self) -> bool:
        return any(vm.status for vm in self.vms.values())


@dataclass
class ComputeZone:
    """One zone: a test sets its state, and the API reads and changes it. All methods are thread-safe.

    Args:
        project, zone: of its only valid paths.
        quota_chips: the limit of chips that all VMs hold together; None: no limit.
        machine_types: that it has.
        reservations: the chips of each reservation, by its name.
        operation_s: seconds until an operation is done.

    Attributes:
        operation_fails: the code and the message with which the next operation ends.
        in_stock: whether there is free capacity; if not, groups wait.
    """

    project: str = "test"
    zone: str = "us-central1-c"
    quota_chips: int | None = None
    in_stock: bool = True
    machine_types: tuple[str, ...] = ("tpu7x-standard-4t", "ct6e-standard-4t")
    reservations: dict[str, int] = field(default_factory=dict)
    operation_s: float = 0.0
    operation_fails: tuple[str, str] | None = None
    groups: dict[str, InstanceGroup] = field(default_factory=dict)
    policies: dict[str, Json] = field(default_factory=dict)
    templates: dict[str, Json] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def location(self) -> str:
        """The zone as the Cloud TPU API would name it."""
        return f"projects/{self.project}/locations/{self.zone}"

    @property
    def path(self) -> str:
        return f"projects/{self.project}/zones/{self.zone}"

    # -- what a test does ------------------------------------------------------------------------------------------

    def advance(self, steps: int = 1) -> None:
        """Take every group one step further: waiting → its VMs STAGING → RUNNING; and one that goes, away."""
        with self.lock:
            for _ in range(steps):
                for name in list(self.groups):
                    self._advance(name)

    def take(self, group: str, count: int = 1) -> None:
        """Preempt VMs of a group: with this provisioning model and no repairs, they stay TERMINATED."""
        with self.lock:
            running = [vm for vm in self.groups[group].vms.values() if vm.status == "RUNNING"]
            for vm in running[:count]:
                vm.status, vm.action = "TERMINATED", "NONE"

    def strand(self, group: str, count: int) -> None:
        """Make some VMs of a waiting group and leave the others to be made, as outside of bulk mode."""
        with self.lock:
            for vm in list(self.groups[group].vms.values())[:count]:
                vm.status, vm.action = "RUNNING", "NONE"

    def statuses(self) -> dict[str, list[str]]:
        """Return the statuses of the VMs of every group."""
        with self.lock:
            return {name: [vm.status for vm in group.vms.values()] for name, group in self.groups.items()}

    def _advance(self, name: str) -> None:
        group = self.groups[name]
        if group.is_going:
            del self.groups[name]
            return
        waiting = [vm for vm in group.vms.values() if not vm.status]
        if waiting:
            group.waits_for = self._lack(group)
            for vm in waiting:
                vm.errors = [group.waits_for] if group.waits_for else []
                vm.status = "" if group.waits_for else "STAGING"
            return
        for vm in group.vms.values():
            if vm.status == "STAGING":
                vm.status, vm.action = "RUNNING", "NONE"

    def _lack(self, group: InstanceGroup) -> Json | None:
        """Return why no VMs can be made for a group now, or None."""
        held = sum(other.all_chips for other in self._with_vms())
        if self.quota_chips is not None and held + group.all_chips > self.quota_chips:
            return _error(NO_QUOTA, f"Quota 'TPUS' exceeded. Limit: {self.quota_chips} in region {self.region}.")
        if group.reservation:
            used = sum(other.all_chips for other in self._with_vms() if other.reservation == group.reservation)
            if used + group.all_chips > self.reservations[group.reservation]:
                return _error(FULL, f"reservation {group.reservation} has {self.reservations[group.reservation]} chips")
        elif not self.in_stock:
            return _error(NO_STOCK, f"The zone '{self.path}' does not have enough resources available.")
        return None

    def _with_vms(self) -> Iterator[InstanceGroup]:
        return (group for group in self.groups.values() if group.has_vms)

    # -- rules that the API holds to; each raises ComputeRefusal -------------------------------------------------------

    def add_group(self, resource: Json) -> None:
        """Make a group, whose VMs are still to be made."""
        name = resource["name"]
        if name in self.groups:
            raise ComputeRefusal(409, f"The resource '{self.path}/instanceGroupManagers/{name}' already exists")
        template = self.templates.get(resource.get("instanceTemplate", "").rpartition("/")[2])
        if template is None:
            raise ComputeRefusal(404, f"The resource '{resource.get('instanceTemplate')}' was not found")
        properties, size = template["properties"], int(resource["targetSize"])
        machine = CHIPS.fullmatch(properties["machineType"])
        if machine is None or machine[0] not in self.machine_types:
            raise ComputeRefusal(
                400, f"Machine type with name '{properties['machineType']}' does not exist in {self.zone}."
            )
        group = InstanceGroup(
            resource, int(machine[2]), properties["scheduling"]["provisioningModel"], _reservation(properties)
        )
        self._require_bulk(group, size)
        if group.reservation and group.reservation not in self.reservations:
            raise ComputeRefusal(404, f"The resource '{self.path}/reservations/{group.reservation}' was not found")
        group.vms = {vm.name: vm for vm in (Vm(f"{resource['baseInstanceName']}-{n:04x}") for n in range(size))}
        resource["creationTimestamp"] = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        self.groups[name] = group

    def _require_bulk(self, group: InstanceGroup, size: int) -> None:
        is_bulk = group.resource.get("targetSizePolicy", {}).get("mode") == "BULK"
        policy_url = group.resource.get("resourcePolicies", {}).get("workloadPolicy")
        if policy_url is not None:
            if not policy_url.startswith("https://www.googleapis.com/compute/v1/projects/"):
                raise ComputeRefusal(400, "The URL is malformed.")
            policy = self.policies.get(policy_url.rpartition("/")[2])
            if policy is None:
                raise ComputeRefusal(404, f"The resource '{policy_url}' was not found")
            if not is_bulk:
                raise ComputeRefusal(400, "MIGs with TPU accelerator topology require BULK mode in target size policy")
            topology = policy["workloadPolicy"]["acceleratorTopology"]
            if math.prod(map(int, topology.split("x"))) != size * group.chips:
                raise ComputeRefusal(400, f"{size} VMs of {group.chips} chips do not form the topology {topology}")
        elif is_bulk and size > 1:
            raise ComputeRefusal(400, "several TPU VMs without a workload policy are not a slice")
        on_failure = group.resource.get("instanceLifecyclePolicy", {}).get("defaultActionOnFailure")
        if group.model == "FLEX_START" and on_failure != "DO_NOTHING":
            raise ComputeRefusal(400, "flex-start in bulk mode requires defaultActionOnFailure DO_NOTHING")

    def add_template(self, resource: Json) -> None:
        scheduling = resource["properties"]["scheduling"]
        if scheduling["provisioningModel"] == "FLEX_START" and "maxRunDuration" not in scheduling:
            raise ComputeRefusal(400, "maxRunDuration is required with the provisioning model FLEX_START")
        if scheduling["provisioningModel"] == "RESERVATION_BOUND" and not _reservation(resource["properties"]):
            raise ComputeRefusal(400, "the provisioning model RESERVATION_BOUND requires a specific reservation")
        if scheduling.get("onHostMaintenance") != "TERMINATE":
            raise ComputeRefusal(400, "TPU VMs can't be migrated: onHostMaintenance has to be TERMINATE")
        _add(self.templates, "instanceTemplates", resource)

    def add_policy(self, resource: Json) -> None:
        _add(self.policies, "resourcePolicies", resource)

    def group(self, name: str) -> InstanceGroup:
        if name not in self.groups:
            raise ComputeRefusal(404, f"The resource '{self.path}/instanceGroupManagers/{name}' was not found")
        return self.groups[name]


def shown(group: InstanceGroup) -> Json:
    """Return a group as the API shows it."""
    actions = [vm.action for vm in group.vms.values()]
    waits: Json = {"inProgress": any(not vm.status for vm in group.vms.values())}
    if group.waits_for is not None:
        waits["lastProgressCheck"] = {"error": {"errors": [group.waits_for]}}
    return {
        **group.resource,
        "currentActions": {"creating": actions.count("CREATING"), "none": actions.count("NONE")},
        "status": {"isStable": set(actions) == {"NONE"}, "bulkInstanceOperation": waits},
    }


def _add(among: dict[str, Json], kind: str, resource: Json) -> None:
    if resource["name"] in among:
        raise ComputeRefusal(409, f"The resource '{kind}/{resource['name']}' already exists")
    among[resource["name"]] = resource


def _reservation(properties: Json) -> str:
    affinity = properties.get("reservationAffinity", {})
    if affinity.get("consumeReservationType") != "SPECIFIC_RESERVATION" or affinity.get("key") != RESERVED_BY:
        return ""
    return str(affinity["values"][0]).rpartition("/")[2]


def _error(code: str, message: str) -> Json:
    return {"code": code, "message": message}
