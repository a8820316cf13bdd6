"""Without a cluster there is a clear word. Quick, but it needs a machine on which no Ray cluster runs."""

import psutil
import pytest

from iris_ray import run_on_pod
from iris_ray.errors import NoClusterError


def test_no_cluster_to_be_found_is_a_typed_error() -> None:
    if any(process.info["name"] == "gcs_server" for process in psutil.process_iter(["name"])):
        pytest.skip("a Ray cluster runs on this machine, and would be found")
    with pytest.raises(NoClusterError, match="SimulatedCluster"):
        run_on_pod(print, "v4-16")
