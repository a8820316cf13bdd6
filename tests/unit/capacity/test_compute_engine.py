"""Slices by the emulated Compute Engine API, through the real client."""

import builtins
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import compute_v1

from iris_ray.capacity.compute_engine import VANISHED_S, ComputeEngine, machine_type, state_of
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, NewSlice, QueuedSlice, QueuedState, Source
from iris_ray.errors import InvalidRequestError, ProviderError
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing.compute_server import ComputeServer

PLACE = "projects/test/locations/us-central1-c"
RESERVATION = f"{PLACE}/reservations/res"
SPOT, ON_DEMAND, FLEX = (Source(PLACE, market) for market in (Market.SPOT, Market.ON_DEMAND, Market.FLEX))


@pytest.fixture
def server() -> Iterator[ComputeServer]:
    with ComputeServer() as running:
        yield running


@pytest.fixture
def cloud(server: ComputeServer) -> ComputeEngine:
    return ComputeEngine(PLACE, server.address)


def wanted(name: str = "s-1", tpu_type: str = "v7x-16", source: Source = SPOT, **changes: Any) -> NewSlice:
    values: dict[str, Any] = {"image": "", "labels": {OWNER_LABEL: "ann"}, "startup_script": "#!/bin/bash"} | changes
    return NewSlice(name, get_tpu_config(tpu_type), source, HostSettings(**values))


def the_slice(cloud: ComputeEngine) -> QueuedSlice:
    (found,) = cloud.queued_slices()
    return found


def body(server: ComputeServer, method: str) -> dict[str, Any]:
    """What the last call of a method sent."""
    return [sent for called, sent in server.calls if called == method][-1]


def test_slice_of_several_hosts_is_bulk_group_with_topology(server: ComputeServer, cloud: ComputeEngine) -> None:
    assert cloud.create(wanted()) is None
    policy = body(server, "resourcePolicies.insert")
    assert policy == {
        "name": "iris-2x2x2",
        "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": "2x2x2"},
    }
    group = body(server, "instanceGroupManagers.insert")
    assert (group["targetSize"], group["targetSizePolicy"]) == (2, {"mode": "BULK"})
    assert group["resourcePolicies"]["workloadPolicy"].endswith("/regions/us-central1/resourcePolicies/iris-2x2x2")
    properties = body(server, "regionInstanceTemplates.insert")["properties"]
    assert properties["machineType"] == "tpu7x-standard-4t"
    assert properties["scheduling"]["provisioningModel"] == "SPOT"
    disk = properties["disks"][0]["initializeParams"]
    assert disk["sourceImage"].endswith("/family/ubuntu-accel-2404-amd64-tpu-tpu7x")
    assert disk["diskType"] == "hyperdisk-balanced"


def test_slice_passes_states_until_active(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.create(wanted(source=FLEX, max_run_s=3600))
    states = []
    for _ in range(3):
        states.append(the_slice(cloud).state)
        server.advance()
    assert states == [QueuedState.WAITING_FOR_RESOURCES, QueuedState.PROVISIONING, QueuedState.ACTIVE]
    found = the_slice(cloud)
    assert (found.accelerator_type, found.location, found.market, found.chips) == ("tpu7x-16", PLACE, Market.FLEX, 8)
    assert found.labels == {OWNER_LABEL: "ann"}
    assert abs(time.time() - found.asked_at) < 60


def test_single_host_needs_no_policy(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.create(wanted(tpu_type="v7x-8"))
    server.advance(2)
    assert server.count("resourcePolicies.insert") == 0
    assert the_slice(cloud).state is QueuedState.ACTIVE


def test_equal_slices_share_policy_and_template(server: ComputeServer, cloud: ComputeEngine) -> None:
    for name in ("s-1", "s-2"):
        assert cloud.create(wanted(name)) is None
    assert cloud.create(wanted("s-3", startup_script="another")) is None
    assert (len(server.policies), len(server.templates), len(server.groups)) == (1, 2, 3)


def test_request_that_is_repeated_makes_one_group(server: ComputeServer, cloud: ComputeEngine) -> None:
    for _ in range(2):
        assert cloud.create(wanted()) is None
    assert list(server.groups) == ["s-1"]


def test_hosts_get_network_account_tags_and_script(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.create(
        wanted(
            image="my-image", network="net", subnetwork="sub", service_account="a@b", tags=("tpu",), external_ips=True
        )
    )
    properties = body(server, "regionInstanceTemplates.insert")["properties"]
    (interface,) = properties["networkInterfaces"]
    assert interface["subnetwork"] == "projects/test/regions/us-central1/subnetworks/sub"
    assert interface["accessConfigs"][0]["type"] == "ONE_TO_ONE_NAT"
    assert properties["serviceAccounts"][0]["email"] == "a@b"
    assert properties["tags"] == {"items": ["tpu"]}
    assert properties["metadata"]["items"] == [{"key": "startup-script", "value": "#!/bin/bash"}]
    assert properties["disks"][0]["initializeParams"]["sourceImage"] == "my-image"


def test_subnetwork_of_another_project_is_named_by_its_path(server: ComputeServer, cloud: ComputeEngine) -> None:
    path = "projects/host/regions/us-central1/subnetworks/shared"
    cloud.create(wanted(subnetwork=path))
    (interface,) = body(server, "regionInstanceTemplates.insert")["properties"]["networkInterfaces"]
    assert interface["subnetwork"] == path


@pytest.mark.parametrize(
    ("waits", "age_s", "is_making", "state"),
    [
        (False, VANISHED_S + 1, False, QueuedState.SUSPENDED),
        (False, VANISHED_S + 1, True, QueuedState.WAITING_FOR_RESOURCES),
        (False, 1.0, False, QueuedState.WAITING_FOR_RESOURCES),
        (True, VANISHED_S + 1, False, QueuedState.WAITING_FOR_RESOURCES),
    ],
)
def test_old_group_without_vms_was_taken(waits: bool, age_s: float, is_making: bool, state: QueuedState) -> None:
    """Else a provisioner that never saw it whole, after a restart, would count it as coming for ever."""
    group = compute_v1.InstanceGroupManager(target_size=2)
    group.status.bulk_instance_operation.in_progress = is_making
    assert state_of(group, [], 2, waits, age_s) == (state, "")


def test_flex_start_has_maximum_run_and_no_repairs(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.create(wanted(source=FLEX, max_run_s=3600))
    scheduling = body(server, "regionInstanceTemplates.insert")["properties"]["scheduling"]
    assert (scheduling["provisioningModel"], scheduling["maxRunDuration"]) == ("FLEX_START", {"seconds": "3600"})
    policy = body(server, "instanceGroupManagers.insert")["instanceLifecyclePolicy"]
    assert policy["defaultActionOnFailure"] == "DO_NOTHING"


@pytest.mark.parametrize(
    ("source", "state"),
    [(SPOT, QueuedState.FAILED), (ON_DEMAND, QueuedState.FAILED), (FLEX, QueuedState.WAITING_FOR_RESOURCES)],
)
def test_stock_out_fails_slice_unless_google_queues(
    server: ComputeServer, cloud: ComputeEngine, source: Source, state: QueuedState
) -> None:
    server.in_stock = False
    cloud.create(wanted(source=source, max_run_s=3600))
    server.advance()
    found = the_slice(cloud)
    assert found.state is state
    assert found.error.startswith("ZONE_RESOURCE_POOL_EXHAUSTED: ") == (state is QueuedState.FAILED)


def test_used_up_quota_fails_slice_also_with_flex_start(server: ComputeServer, cloud: ComputeEngine) -> None:
    server.quota_chips = 4
    cloud.create(wanted(source=FLEX, max_run_s=3600))
    server.advance()
    assert (the_slice(cloud).state, the_slice(cloud).error[:15]) == (QueuedState.FAILED, "QUOTA_EXCEEDED:")


def test_reservation_counts_once_for_sizes_cut_from_it(server: ComputeServer, cloud: ComputeEngine) -> None:
    server.reservations, server.in_stock = {"res": 12}, False
    source = Source.reserved(RESERVATION)
    cloud.create(wanted("s-1", "v7x-16", source))
    cloud.create(wanted("s-2", "v7x-8", source))
    cloud.create(wanted("s-3", "v7x-8", source))
    server.advance(2)
    found = {one.name: one for one in cloud.queued_slices()}
    assert [found[name].state for name in ("s-1", "s-2", "s-3")] == [QueuedState.ACTIVE] * 2 + [QueuedState.FAILED]
    assert (found["s-1"].source, found["s-1"].market) == (RESERVATION, Market.RESERVED)
    assert "reservation res has 12 chips" in found["s-3"].error
    assert "was not found" in str(cloud.create(wanted("s-4", source=Source.reserved(f"{PLACE}/reservations/gone"))))


def test_taken_host_suspends_whole_slice(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.create(wanted())
    server.advance(2)
    server.take("s-1")
    assert (the_slice(cloud).state, the_slice(cloud).by_service) == (QueuedState.SUSPENDED, True)


def test_partial_group_is_not_active(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.create(wanted())
    server.strand("s-1", 1)
    assert the_slice(cloud).state is QueuedState.PROVISIONING


def test_delete_takes_group_and_may_be_repeated(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.create(wanted())
    assert cloud.delete("s-1") is None
    assert the_slice(cloud).state is QueuedState.DELETING
    assert cloud.delete("s-1") is None
    server.advance()
    assert cloud.queued_slices() == []
    assert cloud.delete("never-there") is None


@pytest.mark.parametrize(
    "description", ["web servers", f"{OWNER_LABEL}=ann", f"{OWNER_LABEL}=ann type=v7x-16 hosts=two market=spot"]
)
def test_groups_of_others_are_not_listed(server: ComputeServer, cloud: ComputeEngine, description: str) -> None:
    cloud.create(wanted())
    server.groups["s-1"].resource["description"] = description
    assert cloud.queued_slices() == []


def test_zone_or_generation_without_machines_is_refused(server: ComputeServer, cloud: ComputeEngine) -> None:
    cloud.require_type(get_tpu_config("v7x-16"))
    with pytest.raises(InvalidRequestError, match=r"has no v5p-16 \(--tpu\): it lacks ct5p-hightpu-4t"):
        cloud.require_type(get_tpu_config("v5p-16"))
    with pytest.raises(InvalidRequestError, match="Compute Engine has no --tpu v4-16, only v5p, v6e, v7x"):
        cloud.require_type(get_tpu_config("v4-16"))


def test_missing_permission_names_role_and_command(server: ComputeServer, cloud: ComputeEngine) -> None:
    server.fail(403, "instanceGroupManagers.insert")
    refused = str(cloud.create(wanted()))
    assert refused.startswith("the Compute Engine API refuses: Forbidden")
    assert "--role=roles/compute.instanceAdmin.v1" in refused
    server.fail(403, "instanceGroupManagers.list")
    with pytest.raises(ProviderError, match=r"roles/compute\.instanceAdmin"):
        cloud.queued_slices()


def test_request_waits_until_policy_and_template_are_made(server: ComputeServer, cloud: ComputeEngine) -> None:
    server.operation_s = 0.2
    started = time.monotonic()
    assert cloud.create(wanted()) is None
    assert time.monotonic() - started > 3 * 0.2
    assert list(server.groups) == ["s-1"]


def test_operation_that_ends_with_quota_error_is_refusal_without_role(
    server: ComputeServer, cloud: ComputeEngine
) -> None:
    server.operation_fails = "QUOTA_EXCEEDED", "Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0 in region us-central1."
    refused = str(cloud.create(wanted(tpu_type="v7x-8")))
    assert "Quota 'TPUS_PER_TPU_FAMILY' exceeded" in refused
    assert "roles/" not in refused


def test_passing_errors_are_retried(server: ComputeServer, cloud: ComputeEngine) -> None:
    server.fail(503, "instanceGroupManagers.insert", times=2)
    assert cloud.create(wanted()) is None
    assert list(server.groups) == ["s-1"]


@pytest.mark.parametrize(
    ("tpu_type", "machine"),
    [("v7x-2", "tpu7x-standard-1t"), ("v7x-8", "tpu7x-standard-4t"), ("v6e-8", "ct6e-standard-8t"),
     ("v6e-16", "ct6e-standard-4t"), ("v5p-8", "ct5p-hightpu-4t")],
)  # fmt: skip
def test_machine_types_have_the_chips_of_hosts(tpu_type: str, machine: str) -> None:
    assert machine_type(get_tpu_config(tpu_type)) == machine


def test_absent_client_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_compute(name: str, *rest: Any, **named: Any) -> Any:
        if name == "google.cloud" and "compute_v1" in (rest[2] or ()):
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_compute)
    with pytest.raises(InvalidRequestError, match=r"pip install google-cloud-compute"):
        ComputeEngine(PLACE)


# -- the emulator, through the real client -----------------------------------------------------------------------------


def client(server: ComputeServer, service: str) -> Any:
    from google.auth.credentials import AnonymousCredentials

    kind = getattr(compute_v1, f"{service}Client")
    transport = kind.get_transport_class("rest")
    return kind(transport=transport(host=server.address, credentials=AnonymousCredentials(), url_scheme="http"))


def insert(server: ComputeServer, template: dict[str, Any], **group: Any) -> None:
    """Make a template and a group of it, from JSON as Google documents it."""
    properties = {"machineType": "tpu7x-standard-4t", "scheduling": {"onHostMaintenance": "TERMINATE"} | template}
    made = compute_v1.InstanceTemplate.from_json(json.dumps({"name": "t", "properties": properties}))
    client(server, "RegionInstanceTemplates").insert(
        project="test", region="us-central1", instance_template_resource=made
    ).result(timeout=5)
    values = {"name": "g", "baseInstanceName": "g", "targetSize": 2, "instanceTemplate": "x/t"} | group
    client(server, "InstanceGroupManagers").insert(
        project="test",
        zone="us-central1-c",
        instance_group_manager_resource=compute_v1.InstanceGroupManager.from_json(json.dumps(values)),
    ).result(timeout=5)


URL = "https://www.googleapis.com/compute/v1/projects/test/regions/us-central1/resourcePolicies/p"
BULK = {"targetSizePolicy": {"mode": "BULK"}, "resourcePolicies": {"workloadPolicy": URL}}


@pytest.mark.parametrize(
    ("template", "group", "said"),
    [
        ({"provisioningModel": "SPOT"}, BULK | {"targetSizePolicy": {}}, "require BULK mode in target size policy"),
        ({"provisioningModel": "SPOT"}, BULK | {"resourcePolicies": {"workloadPolicy": "p"}}, "The URL is malformed"),
        ({"provisioningModel": "SPOT"}, BULK | {"targetSize": 3}, "3 VMs of 4 chips do not form the topology 2x2x2"),
        ({"provisioningModel": "FLEX_START"}, BULK, "maxRunDuration is required"),
        ({"provisioningModel": "FLEX_START", "maxRunDuration": {"seconds": 60}}, BULK, "DO_NOTHING"),
        ({"provisioningModel": "RESERVATION_BOUND"}, BULK, "requires a specific reservation"),
    ],
)
def test_emulator_refuses_what_google_refuses(
    server: ComputeServer, template: dict[str, Any], group: dict[str, Any], said: str
) -> None:
    server.add_policy({"name": "p", "workloadPolicy": {"acceleratorTopology": "2x2x2"}})
    with pytest.raises(exceptions.BadRequest, match=said):
        insert(server, template, **group)


def test_emulator_refuses_resize_requests_of_tpu_groups(server: ComputeServer) -> None:
    server.add_policy({"name": "p", "workloadPolicy": {"acceleratorTopology": "2x2x2"}})
    insert(server, {"provisioningModel": "SPOT"}, **BULK)
    with pytest.raises(exceptions.BadRequest, match="resize requests for managed instance group with TPU"):
        client(server, "InstanceGroupManagerResizeRequests").insert(
            project="test",
            zone="us-central1-c",
            instance_group_manager="g",
            instance_group_manager_resize_request_resource=compute_v1.InstanceGroupManagerResizeRequest(name="r"),
        )
