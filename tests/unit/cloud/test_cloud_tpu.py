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

from iris_ray.cloud import cloud_tpu
from iris_ray.cloud.cloud_tpu import WORD_TIMEOUT_S, CloudTpu, Patience, ProviderWords
from iris_ray.cloud.provisioning import NewSlice, QueuedState, request_id
from iris_ray.errors import InvalidRequestError, ProviderError
from iris_ray.model.outcomes import ProviderState
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


def wanted(name: str = "s-1", **changes: Any) -> NewSlice:
    values: dict[str, Any] = {
        "name": name,
        "accelerator_type": "v6e-16",
        "runtime_version": "v2-alpha-tpuv6e",
        "labels": {"made-by": "test"},
        "startup_script": "ray start --address=10.0.0.2:6379",
        "spot": True,
        "external_ips": False,
    }
    return NewSlice(**(values | changes))


def queued_resource(name: str, tpu_type: str = "v4-16") -> tpu_v2.QueuedResource:
    node = tpu_v2.Node(accelerator_type=tpu_type, runtime_version="r")
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=PLACE, node_id=name, node=node)
    return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))


def create(client: tpu_v2.TpuClient, name: str, given_id: str = "", tpu_type: str = "v4-16") -> Any:
    return client.create_queued_resource(
        tpu_v2.CreateQueuedResourceRequest(
            parent=PLACE,
            queued_resource_id=name,
            queued_resource=queued_resource(name, tpu_type),
            request_id=given_id,
        ),
        timeout=5,
    )


def delete(client: tpu_v2.TpuClient, name: str, force: bool) -> Any:
    request = tpu_v2.DeleteQueuedResourceRequest(name=f"{PLACE}/queuedResources/{name}", force=force)
    return client.delete_queued_resource(request, timeout=5)


# -- the emulator, through the real client -----------------------------------------------------------------------------


def test_queued_resource_goes_through_its_states_and_brings_its_node(server: CloudTpuServer) -> None:
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


def test_long_running_operation_is_done_after_its_time(server: CloudTpuServer) -> None:
    server.operation_s = 0.5
    operation = create(server.client(), "a")
    assert not operation.done()
    assert operation.result(timeout=20).name == f"{PLACE}/queuedResources/a"
    assert server.count("GetOperation") >= 2


def test_same_request_id_makes_one_resource_and_another_is_refused(server: CloudTpuServer) -> None:
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
def test_quota_is_held_until_the_resource_is_deleted_and_gone(server: CloudTpuServer, state: Queued) -> None:
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


def test_delete_without_force_wants_the_nodes_gone(server: CloudTpuServer) -> None:
    client = server.client()
    server.add_queued("a")
    with pytest.raises(exceptions.FailedPrecondition):
        delete(client, "a", force=False)
    delete(client, "a", force=True)
    server.advance()
    assert (server.queued_states(), server.node_states()) == ({}, {})


def test_lists_come_in_pages_and_other_places_are_refused(server: CloudTpuServer) -> None:
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
def test_errors_that_are_asked_for_come_as_the_clients_exceptions_and_pass(
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
def test_word_follows_the_nodes_state_and_health(
    server: CloudTpuServer, cloud: CloudTpu, state: Node.State, health: Node.Health, expected: ProviderState
) -> None:
    server.add_node("s")
    server.set_node("s", state, health)
    assert cloud.slice_word("s").state is expected


def test_word_about_a_node_that_is_gone_is_preempted(cloud: CloudTpu) -> None:
    assert cloud.slice_word("s").state is ProviderState.PREEMPTED


@pytest.mark.parametrize("state", [Queued.SUSPENDING, Queued.SUSPENDED])
@pytest.mark.parametrize("by_service", [True, False])
def test_word_of_the_queued_resource_counts_if_the_service_suspends_it(
    server: CloudTpuServer, cloud: CloudTpu, state: Queued, by_service: bool
) -> None:
    server.add_queued("s")
    server.set_queued("s", state, by_service)
    server.add_node("s")  # as READY as ever
    expected = ProviderState.PREEMPTED if by_service else ProviderState.FAILED
    assert cloud.slice_word("s").state is expected


def test_word_survives_a_passing_error(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_node("s")
    cloud.slice_word("s")
    server.fail(Code.UNAVAILABLE, "GetNode", times=2)
    assert cloud.slice_word("s").state is ProviderState.READY
    assert server.count("GetNode") == 4


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.PERMISSION_DENIED])
def test_word_of_an_api_that_refuses_is_unknown_with_the_reason(
    server: CloudTpuServer, cloud: CloudTpu, code: grpc.StatusCode
) -> None:
    server.add_node("s")
    server.fail(code, times=1000)
    word = cloud.slice_word("s", BRIEF)
    assert word.state is ProviderState.UNKNOWN
    assert code.name in word.reason


def test_error_that_does_not_pass_is_not_tried_again(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.fail(Code.PERMISSION_DENIED, times=1000)
    cloud.slice_word("s")
    assert server.count("GetNode") == 1


def test_word_of_a_server_that_is_gone_is_unknown() -> None:
    with CloudTpuServer(PLACE) as server:
        cloud = CloudTpu(PLACE, server.address)
    assert cloud.slice_word("s", BRIEF).state is ProviderState.UNKNOWN


def test_word_without_credentials_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/at/all.json")
    word = CloudTpu(PLACE).slice_word("s", BRIEF)
    assert word.state is ProviderState.UNKNOWN
    assert "DefaultCredentialsError" in word.reason


def test_words_of_several_slices_come_together_and_share_a_question(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_node("a")
    server.add_node("b")
    server.set_node("b", Node.State.PREEMPTED)

    async def ask_twice() -> Any:
        words = ProviderWords(cloud)
        return await asyncio.gather(words.about(["a", "b"]), words.about(["a"]))

    both, one = asyncio.run(ask_twice())
    assert {name: word.state.name for name, word in both.items()} == {"a": "READY", "b": "PREEMPTED"}
    assert one["a"] is both["a"]
    assert server.count("GetNode") == 2


def test_words_do_not_wait_for_an_api_that_hangs(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.delay(3 * WORD_TIMEOUT_S, times=1000)
    started = time.monotonic()
    words = asyncio.run(_about(ProviderWords(cloud), "a"))
    server.heal()
    assert words["a"].state is ProviderState.UNKNOWN
    assert time.monotonic() - started < 2 * WORD_TIMEOUT_S


def test_words_do_not_wait_for_credentials_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_provider_is_asked_at_the_zone_that_was_named_last(
    server: CloudTpuServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TEST_CLOUD_TPU_ENDPOINT, server.address)
    server.add_node("a")
    words = ProviderWords()
    assert asyncio.run(_about(words, "a")) == {}
    words.ask_at(server.location)
    assert asyncio.run(_about(words, "a"))["a"].state is ProviderState.READY
    words.ask_at(None)
    assert asyncio.run(_about(words, "a")) == {}


def test_nobody_is_asked_at_a_malformed_zone(caplog: pytest.LogCaptureFixture) -> None:
    words = ProviderWords()
    words.ask_at("somewhere")
    assert asyncio.run(_about(words, "a")) == {}
    assert "projects/PROJECT/locations/ZONE" in caplog.text


@pytest.mark.parametrize("endpoint", ["10.0.0.1:80", "example.com:443", "127.0.0.1", "localhost.example.com:1"])
def test_endpoint_beyond_loopback_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEST_CLOUD_TPU_ENDPOINT, endpoint)
    with pytest.raises(InvalidRequestError, match=TEST_CLOUD_TPU_ENDPOINT):
        CloudTpu.at(PLACE)


# -- slices asked for and given back -----------------------------------------------------------------------------------


def test_create_asks_for_one_node_with_script_and_labels(server: CloudTpuServer, cloud: CloudTpu) -> None:
    cloud.create(wanted())
    resource = server.queued("s-1")
    (spec,) = resource.tpu.node_spec
    assert "spot" in resource
    assert (spec.node_id, spec.node.accelerator_type) == ("s-1", "v6e-16")
    assert dict(spec.node.metadata) == {"startup-script": "ray start --address=10.0.0.2:6379"}
    (found,) = cloud.queued_slices()
    assert (found.name, found.state, found.labels) == ("s-1", QueuedState.ACCEPTED, {"made-by": "test"})


def test_create_on_demand_says_nothing_of_spot(server: CloudTpuServer, cloud: CloudTpu) -> None:
    cloud.create(wanted(spot=False))
    assert "spot" not in server.queued("s-1")


def test_create_whose_answer_is_lost_makes_one_slice(server: CloudTpuServer, cloud: CloudTpu) -> None:
    cloud.queued_slices()
    server.delay(0.6, "CreateQueuedResource")  # carried out after we have given up waiting for it
    cloud.create(wanted(), Patience(0.3, 10.0))
    asked = [request for method, request in server.calls if method == "CreateQueuedResource"]
    assert len(asked) >= 2
    assert {request.request_id for request in asked} == {request_id("create", "s-1")}
    time.sleep(0.5)
    assert list(server.queued_states()) == ["s-1"]


def test_delete_forces_and_may_come_twice(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_queued("s-1")
    for _ in range(2):
        cloud.delete("s-1", request_id("delete", "s-1"))
    server.advance()
    cloud.delete("s-1", request_id("delete", "other"))
    assert server.queued_states() == {}


def test_refusal_is_an_answer_and_an_api_that_is_away_an_error(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.quota_chips = 8
    assert "refuses: ResourceExhausted: 429 quota: 0 + 16 chips of 8" in str(cloud.create(wanted()))
    assert server.count("CreateQueuedResource") == 1
    server.fail(Code.UNAVAILABLE, times=1000)
    with pytest.raises(ProviderError, match="can't be asked: ServiceUnavailable"):
        cloud.create(wanted(), BRIEF)


def test_create_of_what_is_there_already_is_fine(server: CloudTpuServer, cloud: CloudTpu) -> None:
    """Google forgets request ids after a while."""
    server.add_queued("s-1")
    assert cloud.create(wanted()) is None


def test_failed_slice_tells_why(server: CloudTpuServer, cloud: CloudTpu) -> None:
    server.add_queued("s")
    server.set_queued("s", Queued.FAILED, error="no more capacity")
    (found,) = cloud.queued_slices()
    assert (found.state, found.error) == (QueuedState.FAILED, "no more capacity")
