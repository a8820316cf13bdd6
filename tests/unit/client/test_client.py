"""What a client refuses before it asks anybody: bad arguments, and no cluster; and `run`, over `submit`."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from ray._private import services

from iris_ray import IrisClient, ResourceSpec, run_on_pod, tpu_device
from iris_ray.client import connection
from iris_ray.errors import InvalidModeError, InvalidRequestError, IrisError, NoClusterError, UnknownTPUTypeError
from tests.support.command_line import address_of_nobody

# -- arguments of IrisClient ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["3", -1, True, 1.0, [1]])
@pytest.mark.parametrize("name", ["task_index", "attempt", "offset", "max_bytes", "tail_lines"])
def test_invalid_task_attempt_or_byte_is_refused_by_name(name: str, value: Any) -> None:
    client = IrisClient.__new__(IrisClient)  # what is refused at once needs no cluster
    with pytest.raises(InvalidRequestError, match=rf"{name} is .*; give an int of 0 or more"):
        client.fetch_task_logs("job-1", **{"task_index": 0, name: value})
    if name == "task_index":
        with pytest.raises(InvalidRequestError, match="task_index is"):
            client.task_status("job-1", value)


@pytest.mark.parametrize("address", [None, 6379, "", "10.0.0.2"])
def test_invalid_head_address_is_refused(address: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"the address is .*; give HOST:PORT"):
        IrisClient.remote(address)


class Submitted:
    """A job that prints and returns, or is interrupted."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted
        self.calls: list[str] = []

    def wait(self, stream_logs: bool) -> None:
        self.calls.append(f"wait, logs: {stream_logs}")
        if self.interrupted:
            raise KeyboardInterrupt

    def results(self) -> list[int]:
        return [1, 2]

    def cancel(self) -> None:
        self.calls.append("cancel")


@pytest.mark.parametrize("interrupted", [False, True])
def test_run_streams_logs_and_returns_results_or_cancels(monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    job, asked = Submitted(interrupted), dict[str, Any]()

    def submit(self: IrisClient, fn: object, name: str | None, **options: Any) -> Submitted:
        asked.update(options, name=name)
        return job

    monkeypatch.setattr(IrisClient, "submit", submit)
    client, need = IrisClient.__new__(IrisClient), ResourceSpec(replicas=2)
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        assert client.run(lambda: None, "mine", resources=need, spares=1) == [1, 2]
    assert job.calls == ["wait, logs: True"] + ["cancel"] * interrupted
    assert (asked["name"], asked["resources"], asked["spares"]) == ("mine", need, 1)
    assert asked["max_retries_failure"] == 0, "the defaults of submit"


@pytest.mark.parametrize("workspace", [5, b".", "no/such/directory"])
def test_invalid_workspace_directory_is_refused(workspace: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"workspace is .*, which is not a directory"):
        IrisClient.remote("10.0.0.2:6379", workspace)


# -- resources and endpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cpu": -1}, "cpu"),
        ({"cpu": True}, "cpu"),
        ({"memory_gb": float("nan")}, "memory_gb"),
        ({"memory_gb": "3"}, "memory_gb"),
        ({"gpu": -1}, "gpu"),
        ({"gpu": 0.5}, "gpu"),
        ({"gpu": True}, "gpu"),
        ({"gpu": 1, "device": tpu_device("v4-8")}, "a v4-8 slice have no GPUs"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 1.5}, "replicas"),
        ({"device": "v4-8"}, r"tpu_device\("),
    ],
    ids=str,
)
def test_impossible_resources_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        ResourceSpec(**values)


def test_unknown_device_is_refused_with_nearest() -> None:
    with pytest.raises(UnknownTPUTypeError, match="v4-32"):
        tpu_device("v4-31")


# -- no cluster -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide other clusters from Ray, which looks for them among the machine's processes and in a file."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "_find_address_from_flag", lambda flag: frozenset())
    services.find_gcs_addresses.cache_clear()


@pytest.mark.usefixtures("no_cluster_on_this_machine")
def test_missing_cluster_is_a_typed_error() -> None:
    with pytest.raises(NoClusterError, match="SimulatedCluster"):
        run_on_pod(print, "v4-16")


@pytest.mark.usefixtures("no_cluster_on_this_machine")
def test_address_left_by_ended_cluster_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray would wait for minutes"))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address_of_nobody())
    for join in (lambda: run_on_pod(print, "v4-16"), lambda: connection.connect(connection.AUTO)):
        with pytest.raises(NoClusterError, match=r"nothing answers at 127\.0\.0\.2:.* `ray stop` deletes the note"):
            join()


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        (address_of_nobody(), NoClusterError, "nothing answers at 127.0.0.2:"),
        ("a..b:6379", NoClusterError, "nothing answers at a..b:6379"),
        ("http://10.0.0.2:8265", InvalidRequestError, "give HOST:PORT of the cluster's head"),
        ("ray://10.0.0.2:10001", InvalidRequestError, r"Ray Client can't .* URL of its dashboard, such as http://"),
        ("htp://10.0.0.2:8265", InvalidRequestError, "the address is .* URL of its dashboard, such as http://"),
    ],
    ids=["nobody", "no name", "a dashboard", "Ray Client", "a typo"],
)
def test_silent_address_from_environment_is_refused_at_once(
    address: str, error: type[IrisError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray would wait for minutes"))
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(error, match=said):
        run_on_pod(print, "v4-16")


def test_client_excluded_by_local_mode_joins_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_RAY_MODE", "simple")
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("it would stay connected"))
    with pytest.raises(InvalidModeError, match=r"IrisClient\.local"):
        IrisClient.remote(address_of_nobody())
