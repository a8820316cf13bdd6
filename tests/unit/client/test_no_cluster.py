"""Without a cluster there is a clear word."""

import pytest
from ray._private import services

from iris_ray import IrisClient, run_on_pod
from iris_ray.errors import InvalidModeError, InvalidRequestError, IrisError, NoClusterError
from tests.support.command_line import address_of_nobody


@pytest.fixture
def no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the clusters of other tests from Ray, which looks for them among the machine's processes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "_find_address_from_flag", lambda flag: frozenset())
    services.find_gcs_addresses.cache_clear()


@pytest.mark.usefixtures("no_cluster_on_this_machine")
def test_missing_cluster_is_a_typed_error() -> None:
    with pytest.raises(NoClusterError, match="SimulatedCluster"):
        run_on_pod(print, "v4-16")


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        (address_of_nobody(), NoClusterError, "nothing answers at 127.0.0.2:"),
        ("a..b:6379", NoClusterError, "nothing answers at a..b:6379"),
        ("http://10.0.0.2:8265", InvalidRequestError, "give HOST:PORT of the cluster's head"),
    ],
    ids=["nobody", "no name", "a dashboard"],
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
