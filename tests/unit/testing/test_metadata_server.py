"""The metadata servers of simulated hosts, read by clients that other people wrote."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from iris_ray.metadata.watch import UPCOMING_MAINTENANCE
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing.metadata_server import PREEMPTED, HostMetadata, MetadataFault, MetadataServers, MetadataValue
from iris_ray.testing.tpu_host import tpu_host
from tests.support.waiting import wait_until

FLAVOR = {"Metadata-Flavor": "Google"}


def ask(host: HostMetadata, key: str, headers: dict[str, str] = FLAVOR, **query: str | float) -> requests.Response:
    return requests.get(f"http://{host.address}/computeMetadata/v1/{key}", query, headers=headers, timeout=10)


def test_answers_carry_flavor_and_changing_etag(host_metadata: HostMetadata) -> None:
    before, again = ask(host_metadata, PREEMPTED), ask(host_metadata, PREEMPTED)
    host_metadata.preempt()
    after = ask(host_metadata, PREEMPTED)
    assert (before.text, after.text) == ("FALSE", "TRUE")
    assert before.headers["Metadata-Flavor"] == "Google"
    assert before.headers["ETag"] == again.headers["ETag"] != after.headers["ETag"]


def test_misdirected_questions_are_refused(host_metadata: HostMetadata) -> None:
    assert ask(host_metadata, PREEMPTED, {}).status_code == 403
    assert ask(host_metadata, PREEMPTED, FLAVOR | {"X-Forwarded-For": "10.0.0.1"}).status_code == 403
    assert requests.get(f"http://{host_metadata.address}/", timeout=10).headers["Metadata-Flavor"] == "Google"


def test_missing_path_is_404_and_no_maintenance_503(host_metadata: HostMetadata) -> None:
    assert ask(host_metadata, "instance/nothing").status_code == 404
    assert ask(host_metadata, "instance/service-accounts/default/token").status_code == 404
    none = ask(host_metadata, UPCOMING_MAINTENANCE, alt="json")
    assert (none.status_code, list(none.json())) == (503, ["error"])
    host_metadata.set(UPCOMING_MAINTENANCE, None)
    assert ask(host_metadata, UPCOMING_MAINTENANCE).status_code == 404


def test_long_poll_waits_for_a_change(host_metadata: HostMetadata) -> None:
    etag = ask(host_metadata, PREEMPTED).headers["ETag"]
    questions: list[dict[str, Any]] = [{"last_etag": etag}, {}]
    for known in questions:
        host_metadata.set(PREEMPTED, MetadataValue("FALSE", etag=etag))
        timer = threading.Timer(0.1, host_metadata.preempt)
        began = time.monotonic()
        timer.start()
        assert ask(host_metadata, PREEMPTED, wait_for_change="true", timeout_sec=8, **known).text == "TRUE"
        assert 0.1 <= time.monotonic() - began < 5
        timer.join()


def test_long_poll_with_old_etag_answers_at_once(host_metadata: HostMetadata) -> None:
    etag = ask(host_metadata, PREEMPTED).headers["ETag"]
    host_metadata.preempt()
    assert ask(host_metadata, PREEMPTED, wait_for_change="true", last_etag=etag).text == "TRUE"


def test_long_poll_without_a_change_answers_after_its_timeout(host_metadata: HostMetadata) -> None:
    began = time.monotonic()
    assert ask(host_metadata, PREEMPTED, wait_for_change="true", timeout_sec=0.3).text == "FALSE"
    assert time.monotonic() - began >= 0.3


def test_server_misbehaves_on_request(host_metadata: HostMetadata) -> None:
    host_metadata.misbehave(MetadataFault.UNAVAILABLE)
    assert ask(host_metadata, PREEMPTED).status_code == 503
    host_metadata.misbehave(MetadataFault.HANGS)
    with pytest.raises(requests.Timeout):
        requests.get(f"http://{host_metadata.address}/", timeout=0.3)
    host_metadata.misbehave(MetadataFault.HANGS_UP)
    with pytest.raises(requests.ConnectionError):
        ask(host_metadata, PREEMPTED)
    host_metadata.misbehave(None)
    assert ask(host_metadata, PREEMPTED).text == "FALSE"


def test_closing_does_not_wait_for_long_polls(capfd: pytest.CaptureFixture[str]) -> None:
    servers = MetadataServers()
    host = servers.serve("127.0.0.1", {})
    failed: list[Exception] = []

    def poll() -> None:
        try:
            ask(host, PREEMPTED, wait_for_change="true")
        except requests.RequestException as error:
            failed.append(error)

    waiting = threading.Thread(target=poll)
    waiting.start()
    wait_until(lambda: host.asked[PREEMPTED] == 1)
    servers.close()
    servers.close()
    waiting.join()
    assert [type(error) for error in failed] == [requests.ConnectionError], "the question does not time out"
    assert capfd.readouterr().err == ""


def test_google_auth_finds_server_without_credentials(host_metadata: HostMetadata) -> None:
    script = """
        import google.auth.exceptions, google.auth.compute_engine._metadata as metadata, google.auth.transport.requests
        request = google.auth.transport.requests.Request()
        print(metadata.ping(request), metadata.get_project_id(request))
        try:
            metadata.get_service_account_token(request)
        except google.auth.exceptions.TransportError:
            print("no token")
    """
    assert run_python(
        script, GCE_METADATA_HOST=host_metadata.address, GCE_METADATA_IP=host_metadata.address
    ).splitlines() == ["True my-project", "no token"]


def test_ray_reads_the_same_from_metadata_and_environment(servers: MetadataServers) -> None:
    """Ray asks metadata.google.internal, so this server is its proxy. No environment variable helps it here."""
    script = """
        from ray._private.accelerators import TPUAcceleratorManager as manager
        print(manager.get_current_node_accelerator_labels())
        print(manager.get_current_node_accelerator_type(), manager.get_current_node_additional_resources())
    """
    addresses = ["127.1.2.0", "127.1.2.1", "127.1.2.2", "127.1.2.3"]
    tpu = tpu_host("my-slice", 3, get_tpu_config("v4-32"), "ab" * 28, addresses, Path("/tmp/nowhere"))
    address = servers.serve("127.0.0.1", tpu.metadata).address
    told = run_python(script, **tpu.variables)
    assert "my-slice" in told
    assert run_python(script, http_proxy=f"http://{address}", no_proxy="") == told


def run_python(script: str, **environment: str) -> str:
    """What a script prints, in an environment without a TPU and a proxy but for what is given."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "GCE_")) and "proxy" not in k.lower()}
    lines = [line.removeprefix("        ") for line in script.splitlines()]
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.run(command, env=kept | environment, text=True, stdout=subprocess.PIPE, check=True).stdout
