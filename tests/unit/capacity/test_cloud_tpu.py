"""The emulator of the Cloud TPU API through the real client, and what we make of the API's answers."""

import asyncio
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2

from iris_ray.capacity import cloud_tpu
from iris_ray.capacity.cloud_tpu import WORD_TIMEOUT_S, CloudTpu, ProviderWords
from iris_ray.capacity.google_api import FOR_CHANGES, Patience
from iris_ray.capacity.provider import HostSettings, Market, NewSlice, QueuedState, Source, request_id
from iris_ray.errors import InvalidRequestError, ProviderError
from iris_ray.model.outcomes import ProviderState
from iris_ray.model.topology import get_tpu_config
from iris_ray.settings import TEST_CLOUD_TPU_ENDPOINT
from iris_ray.testing.cloud_tpu_server import CloudTpuServer

PLACE = "projects/test/locations/here"
Code = grpc.StatusCode
Node = tpu_v2.Node
Queued = tpu_v2.QueuedResourceState.State
BRIEF = Patience(0.3, 0.6)


@pytest.fixture
def server() -> Iterator[CloudTpuServer]:
    with CloudTpuServer(PLACE) as running:
        yield running


@pytest.fixture
def cloud(server: CloudTpuServer) -> CloudTpu:
    return CloudTpu(PLACE, server.address)


RESERVATION = f"{PLACE}/reservations/res"


def wanted(name: str = "s-1", source: Source | None = None, **changes: Any) -> NewSlice:
    values: dict[str, Any] = {
        "image": "v2-alpha-tpuv6e",
        "labels": {"made-by": "test"},
        "startup_script": "ray start --address=10.0.0.2:6379",
    }
    source = source or Source(PLACE, Market.SPOT)
    return NewSlice(name, get_tpu_config("v6e-16"), source, HostSettings(**(values | changes)))


def queued_resource(name: str, tpu_type: str = "v4-16") -> tpu_v2.QueuedResource:
    node = tpu_v2.Node(accelerator_type=tpu_type, runtime_version="r")
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=PLACE, node_id=name, node=node)
    return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))


def create(client: tpu_v2.TpuClient, name: str, given_id: str = "", tpu_type: str = "v4-16") -> Any:
    return client.create_queued_resource(
        tpu_v2.CreateQueuedResourceRequest(
            parent=PLACE, queued_resource_id=name, queued_resource=queued_resource(name, tpu_type), request_id=given_id
        ),
        timeout=5,
    )


def delete(client: tpu_v2.TpuClient, name: str, force: bool) -> Any:
    request = tpu_v2.DeleteQueuedResourceRequest(name=f"{PLACE}/queuedResources/{name}", force=force)
    return client.delete_queued_resource(request, timeout=5)


# -- the emulator, through the real client -----------------------------------------------------------------------------


def test_queued_resource_passes_states_and_brings_node(server: CloudTpuServer) -> None:
    client = server.client()
    server.in_stock = False
    create(client, "a")
    seen = [server.queued_states()["a"]]
    for _ in range(2):
        server.advance()
        seen.append(server.queued_states()["a"])
    server.in_stock = True
    for _ in range(3):
        server.advance()
        seen.append(server.queued_states()["a"])
    assert seen == ["ACCEPTED", *["WAITING_FOR_RESOURCES"] * 2, "PROVISIONING", "ACTIVE", "ACTIVE"]
    node = client.get_node(name=f"{PLACE}/nodes/a", timeout=5)
    assert (node.state, node.queued_resource) == (Node.State.READY, f"{PLACE}/queuedResources/a")


def test_long_operation_is_done_after_its_time(server: CloudTpuServer) -> None:
    server.operation_s = 0.5
    operation = create(server.client(), "a")
    assert not operation.done()
    assert operation.result(timeout=20).name == f"{PLACE}/queuedResources/a"
    assert server.count("GetOperation") >= 2


def test_repeated_request_id_makes_one_resource(server: CloudTpuServer) -> None:
    client, same = server.client(), str(uuid.uuid4())
    first, again = create(client, "a", same), create(client, "a", same)
    assert first.operation.name == again.operation.name
    assert list(server.queued_states()) == ["a"]
    with pytest.raises(exceptions.AlreadyExists):
        create(client, "a", str(uuid.uuid4()))
    with pytest.raises(exceptions.InvalidArgument):
        create(client, "b", same)
    with pytest.raises(exceptions.InvalidArgument, match="UUID"):
        create(client, "b", "not one")


@pytest.mark.parametrize("state", [Queued.FAILED, Queued.SUSPENDED])
def test_quota_is_held_until_deletion_is_complete(server: CloudTpuServer, state: Queued) -> None:
    client, server.quota_chips = server.client(), 8
    create(client, "a")
    server.set_queued("a", state)
    with pytest.raises(exceptions.ResourceExhausted):
        create(client, "b")
    delete(client, "a", force=True)
    with pytest.raises(exceptions.ResourceExhausted):
        create(client, "b")
    server.advance()
    create(client, "b")


def test_delete_without_force_requires_nodes_gone(server: CloudTpuServer) -> None:
    client = server.client()
    server.add_queued("a")
    with pytest.raises(exceptions.FailedPrecondition):
        delete(client, "a", force=False)
    delete(client, "a", force=True)
    server.advance()
    assert (server.queued_states(), server.node_states()) == ({}, {})


def test_lists_are_paged_and_other_zones_refused(server: CloudTpuServer) -> None:
    client = server.client()
    for number in range(5):
        server.add_queued(f"q{number}")
    request = tpu_v2.ListNodesRequest(parent=PLACE, page_size=2)
    assert len(list(client.list_nodes(request, timeout=5))) == 5
    assert server.count("ListNodes") == 3
    with pytest.raises(exceptions.PermissionDenied):
        client.list_nodes(parent="projects/other/locations/here", timeout=5)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=f"{PLACE}/nodes/nobody", timeout=5)


def test_unknown_type_is_refused(server: CloudTpuServer) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="not a TPU type"):
        create(server.client(), "a", tpu_type="v4-17")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (Code.UNAVAILABLE, exceptions.ServiceUnavailable),
        (Code.DEADLINE_EXCEEDED, exceptions.DeadlineExceeded),
        (Code.PERMISSION_DENIED, exceptions.PermissionDenied),
        (Code.RESOURCE_EXHAUSTED, exceptions.ResourceExhausted),
        (Code.NOT_FOUND, exceptions.NotFound),
    ],
)
def test_injected_errors_arrive_as_client_exceptions(
    server: CloudTpuServer, code: grpc.StatusCode, error: type[Exception]
) -> None:
    client = server.client()
    server.add_node("n")
    server.fail(code, "GetNode")
    assert list(client.list_nodes(parent=PLACE, timeout=5))
    with pytest.raises(error):
        client.get_node(name=f"{PLACE}/nodes/n", timeout=5)
    assert client.get_node(name=f"{PLACE}/nodes/n", timeout=5).name


# -- the provider's word -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "health", "expected"),
    [
        (Node.State.READY, Node.Health.HEALTHY, ProviderState.READY),
        (Node.State.READY, Node.Health.HEALTH_UNSPECIFIED, ProviderState.READY),
        (Node.State.READY, Node.Health.UNHEALTHY_MAINTENANCE, ProviderState.FAILED),
        (Node.State.READY, Node.Health.TIMEOUT, ProviderState.FAILED),
        (Node.State.PREEMPTED, Node.Health.HEALTHY, ProviderState.PREEMPTED),
        (Node.State.PREEMPTED, Node.Health.UNHEALTHY_MAINTENANCE, ProviderState.PREEMPTED),
        (Node.State.TERMINATED, Node.Health.HEALTHY, ProviderState.PREEMPTED),
        (Node.State.REPAIRING, Node.Health.HEALTHY, ProviderState.FAILED),
        (Node.State.STOPPED, Node.Health.HEALTHY, ProviderState.FAILED),
        (Node.State.UNKNOWN, Node.Health.HEALTHY, ProviderState.UNKNOWN),
    ],
)
def test_providers_word_follows_node_state_and_health(
    server: CloudTpuServer, cloud: CloudTpu, state: Node.State, health: Node.Health, expected: ProviderState
) -> None:
    server.add_node("s")
    server.set_node("s", state, health)
    assert cloud.slice_word("s", FOR_CHANGES).state is expected


def test_word_about_missing_node_is_preempted(cloud: CloudTpu) -> None:
    assert cloud.slice_word("s", FOR_CHANGES).state is ProviderState.PREEMPTED


@pytest.mark.parametrize("state", [Queued.SUSPENDING, Queued.SUSPENDED])
@pytest.mark.parametrize("by_service", [True, False])
def test_suspended_queued_resource_overrides_node_state(
    server: CloudTpuServer, cloud: CloudTpu, state: Queued, by_service: bool
) -> None:
    server.add_queued("s")
    server.set_queued("s", state, by_service)
    server.add_node("s")  # as READY as ever
    expected = ProviderState.PREEMPTED if by_service else ProviderState.FAILED
    assert cloud.slice_word("s", FOR_CHANGES).state is expected


def test_word_survives_transient_error(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_node("s")
    cloud.slice_word("s", FOR_CHANGES)
    server.fail(Code.UNAVAILABLE, "GetNode", times=2)
    assert cloud.slice_word("s").state is ProviderState.READY
    assert server.count("GetNode") == 4


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.PERMISSION_DENIED])
def test_word_of_refusing_api_is_unknown_with_reason(
    server: CloudTpuServer, cloud: CloudTpu, code: grpc.StatusCode
) -> None:
    server.add_node("s")
    server.fail(code, times=1000)
    word = cloud.slice_word("s", BRIEF)
    assert word.state is ProviderState.UNKNOWN
    assert code.name in word.reason


def test_permanent_error_is_not_retried(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.fail(Code.PERMISSION_DENIED, times=1000)
    cloud.slice_word("s", FOR_CHANGES)
    assert server.count("GetNode") == 1


def test_word_of_missing_server_is_unknown() -> None:
    with CloudTpuServer(PLACE) as server:
        cloud = CloudTpu(PLACE, server.address)
    assert cloud.slice_word("s", BRIEF).state is ProviderState.UNKNOWN


def test_word_without_credentials_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/at/all.json")
    word = CloudTpu(PLACE).slice_word("s", BRIEF)
    assert word.state is ProviderState.UNKNOWN
    assert "DefaultCredentialsError" in word.reason


async def test_words_of_several_slices_share_one_request(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_node("a")
    server.add_node("b")
    server.set_node("b", Node.State.PREEMPTED)
    words = ProviderWords(cloud)
    both, one = await asyncio.gather(words.about(["a", "b"]), words.about(["a"]))
    assert {name: word.state.name for name, word in both.items()} == {"a": "READY", "b": "PREEMPTED"}
    assert one["a"] is both["a"]
    assert server.count("GetNode") == 2


def test_words_do_not_wait_for_hanging_api(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.delay(3 * WORD_TIMEOUT_S, times=1000)
    started = time.monotonic()
    words = asyncio.run(_about(ProviderWords(cloud), "a"))
    server.heal()
    assert words["a"].state is ProviderState.UNKNOWN
    assert time.monotonic() - started < 2 * WORD_TIMEOUT_S


def test_words_do_not_wait_for_hanging_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Looking for them means to ask a metadata server, which here takes the call and never answers."""
    for variable in ("GOOGLE_APPLICATION_CREDENTIALS", "NO_GCE_CHECK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setattr(cloud_tpu, "WORD_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        words = asyncio.run(_about(ProviderWords(CloudTpu(PLACE)), "a"))
        took = time.monotonic() - started
    assert words["a"].state is ProviderState.UNKNOWN
    assert "did not answer within 0.3 s" in words["a"].reason
    assert 0.3 <= took < 2.0


async def _about(words: ProviderWords, name: str) -> Any:
    return await words.about([name])


def test_provider_is_asked_at_last_named_zone(server: CloudTpuServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_CLOUD_TPU_ENDPOINT, server.address)
    server.add_node("a")
    words = ProviderWords()
    assert asyncio.run(_about(words, "a")) == {}
    words.ask_at((server.location,))
    assert asyncio.run(_about(words, "a"))["a"].state is ProviderState.READY
    words.ask_at(())
    assert asyncio.run(_about(words, "a")) == {}


def test_slice_is_looked_for_in_all_zones(server: CloudTpuServer, cloud: CloudTpu) -> None:
    with CloudTpuServer("projects/test/locations/there") as other:
        there = CloudTpu(other.location, other.address)
        other.add_node("a")
        assert asyncio.run(_about(ProviderWords(cloud, there), "a"))["a"].state is ProviderState.READY
        assert asyncio.run(_about(ProviderWords(cloud, there), "b"))["b"].state is ProviderState.PREEMPTED
        server.fail(Code.PERMISSION_DENIED, times=100)
        assert asyncio.run(_about(ProviderWords(cloud, there), "a"))["a"].state is ProviderState.READY
        assert asyncio.run(_about(ProviderWords(cloud, there), "b"))["b"].state is ProviderState.UNKNOWN


def test_malformed_zone_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    words = ProviderWords()
    words.ask_at(("somewhere",))
    assert asyncio.run(_about(words, "a")) == {}
    assert "projects/PROJECT/locations/ZONE" in caplog.text


@pytest.mark.parametrize("endpoint", ["10.0.0.1:80", "example.com:443", "127.0.0.1", "localhost.example.com:1"])
def test_endpoint_outside_loopback_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_CLOUD_TPU_ENDPOINT, endpoint)
    with pytest.raises(InvalidRequestError, match=TEST_CLOUD_TPU_ENDPOINT):
        CloudTpu.at(PLACE)


# -- slices asked for and given back -----------------------------------------------------------------------------------


def test_create_requests_one_node_with_script_and_labels(server: CloudTpuServer, cloud: CloudTpu) -> None:
    cloud.create(wanted())
    resource = server.queued("s-1")
    (spec,) = resource.tpu.node_spec
    assert "spot" in resource
    assert (spec.node_id, spec.node.accelerator_type) == ("s-1", "v6e-16")
    assert dict(spec.node.metadata) == {"startup-script": "ray start --address=10.0.0.2:6379"}
    (found,) = cloud.queued_slices()
    assert (found.name, found.state, found.labels) == ("s-1", QueuedState.ACCEPTED, {"made-by": "test"})


def test_create_on_demand_does_not_mention_spot(server: CloudTpuServer, cloud: CloudTpu) -> None:
    cloud.create(wanted(source=Source(PLACE, Market.ON_DEMAND)))
    assert "spot" not in server.queued("s-1")


def test_create_from_reservation_names_it_and_its_network(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.reservations = {RESERVATION: 32}
    cloud.create(
        wanted(
            source=Source.reserved(RESERVATION), network="net", subnetwork="sub", tags=("tpu",),
            service_account="hosts@p.iam.gserviceaccount.com",
        )
    )  # fmt: skip
    resource = server.queued("s-1")
    node = resource.tpu.node_spec[0].node
    assert resource.reservation_name == RESERVATION
    assert "guaranteed" in resource
    assert (node.network_config.network, node.network_config.subnetwork, list(node.tags)) == ("net", "sub", ["tpu"])
    assert (node.service_account.email, list(node.service_account.scope)) == (
        "hosts@p.iam.gserviceaccount.com",
        ["https://www.googleapis.com/auth/cloud-platform"],
    )
    (found,) = cloud.queued_slices()
    assert (found.location, found.market, found.reservation) == (PLACE, Market.RESERVED, RESERVATION)
    assert time.time() - found.asked_at < 60


def test_full_reservation_fails_slice(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.reservations = {RESERVATION: 16}
    for name in ("s-1", "s-2"):
        cloud.create(wanted(name, source=Source.reserved(RESERVATION)))
    server.advance()
    assert {one.name: one.error for one in cloud.queued_slices()} == {
        "s-1": "",
        "s-2": f"reservation {RESERVATION} is full",
    }
    assert "was not found" in str(cloud.create(wanted("s-3", source=Source.reserved(f"{PLACE}/reservations/gone"))))


def test_zone_without_type_is_refused_with_what_it_has(server: CloudTpuServer, cloud: CloudTpu) -> None:
    cloud.require_type(get_tpu_config("v6e-16"))
    with pytest.raises(InvalidRequestError, match=r"--location .*here has no v6e-64 \(--tpu\); it has v6e-16, v6e-256"):
        cloud.require_type(get_tpu_config("v6e-64"))
    server.types = ["v4-16"]
    with pytest.raises(InvalidRequestError, match="it has v4-16"):
        cloud.require_type(get_tpu_config("v6e-16"))


def test_missing_permission_names_role_and_command(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.fail(Code.PERMISSION_DENIED)
    refused = str(cloud.create(wanted()))
    assert "refuses: PermissionDenied" in refused
    assert "gcloud projects add-iam-policy-binding test --member=serviceAccount:EMAIL --role=roles/tpu.admin" in refused


def test_create_with_lost_answer_makes_one_slice(server: CloudTpuServer, cloud: CloudTpu) -> None:
    cloud.queued_slices()
    server.delay(0.6, "CreateQueuedResource")  # carried out after we have given up waiting for it
    cloud.create(wanted(), Patience(0.3, 10.0))
    asked = [request for method, request in server.calls if method == "CreateQueuedResource"]
    assert len(asked) >= 2
    assert {request.request_id for request in asked} == {request_id("create", "s-1")}
    time.sleep(0.5)
    assert list(server.queued_states()) == ["s-1"]


def test_delete_forces_and_may_be_repeated(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_queued("s-1")
    for _ in range(2):
        cloud.delete("s-1")
    server.advance()
    cloud.delete("s-1")
    cloud.delete("never-there")
    assert server.queued_states() == {}


def test_refusal_is_an_answer_and_absent_api_an_error(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.quota_chips = 8
    assert "refuses: ResourceExhausted: 429 quota: 0 + 16 chips of 8" in str(cloud.create(wanted()))
    assert server.count("CreateQueuedResource") == 1
    server.fail(Code.UNAVAILABLE, times=1000)
    with pytest.raises(ProviderError, match="can't be asked: ServiceUnavailable"):
        cloud.create(wanted(), BRIEF)


def test_create_of_existing_slice_succeeds(server: CloudTpuServer, cloud: CloudTpu) -> None:
    """Google forgets request ids after a while."""
    server.add_queued("s-1")
    assert cloud.create(wanted()) is None


def test_failed_slice_tells_why(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_queued("s")
    server.set_queued("s", Queued.FAILED, error="no more capacity")
    (found,) = cloud.queued_slices()
    assert (found.state, found.error) == (QueuedState.FAILED, "no more capacity")
