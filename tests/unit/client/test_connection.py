"""A cluster of another Ray or Python is refused in words. Ray's own check says so."""

from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray._private.utils import check_version_info

from iris_ray.client.connection import connect, require_cluster
from iris_ray.errors import VersionMismatchError

OTHER = {"ray_version": "2.49.2", "python_version": "3.9.7"}


@pytest.mark.parametrize("join", [lambda: connect("auto"), require_cluster])
def test_cluster_of_other_ray_is_refused_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, join: Callable[[], None]
) -> None:
    def init(**_: Any) -> None:
        check_version_info(OTHER, "node 10.0.0.9")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(VersionMismatchError) as refused:
        join()
    for said in ("Ray: 2.49.2 Python: 3.9.7", f"Ray: {ray.__version__}", "of the cluster's image here"):
        assert said in str(refused.value)
