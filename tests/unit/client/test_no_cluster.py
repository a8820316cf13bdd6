"""Without a cluster there is a clear word."""

import pytest
from ray._private import services

from iris_ray import run_on_pod
from iris_ray.errors import NoClusterError


@pytest.fixture
def no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the clusters of other tests from Ray, which looks for them among the machine's processes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "_find_address_from_flag", lambda flag: frozenset())
    services.find_gcs_addresses.cache_clear()


@pytest.mark.usefixtures("no_cluster_on_this_machine")
def test_no_cluster_to_be_found_is_a_typed_error() -> None:
    with pytest.raises(NoClusterError, match="SimulatedCluster"):
        run_on_pod(print, "v4-16")
