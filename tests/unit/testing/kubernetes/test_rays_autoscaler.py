"""Ray's own autoscaler, unmodified, reads and patches the emulated API server over HTTPS."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.pages import REPOSITORY
from tests.support.kubernetes import PlayedWorld, changed, played_world

HEAD = {"TPU": 4.0, "TPU-v6e-16-head": 1.0}


@pytest.fixture(scope="module")
def played() -> Iterator[PlayedWorld]:
    with played_world() as played:
        yield played


Gangs = list[list[dict[str, float]]]


def autoscale(played: PlayedWorld, gangs: Gangs, rounds: int = 3, **variables: str) -> int:
    """The replicas of the first group after some rounds of Ray's autoscaler."""
    arguments = [played.world.name, played.world.namespace, json.dumps(gangs), str(rounds)]
    command = [sys.executable, "-m", "tests.support.rays_autoscaler", *arguments]
    environment = {**os.environ, **played.world.client_environment(), **variables}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(played.world.raycluster()["spec"]["workerGroupSpecs"][0]["replicas"])


@pytest.mark.parametrize(
    ("gangs", "replicas"),
    [
        ([[HEAD]] * 3, 0),  # three hosts of slices that have four: 3 // 4
        ([[HEAD]] * 4, 1),
        ([[HEAD] * 4], 1),
        ([[HEAD] * 4] * 2, 2),
    ],
)
def test_ray_asks_for_hosts_and_gets_whole_slices(played: PlayedWorld, gangs: Gangs, replicas: int) -> None:
    played.set_group("v6e-16", replicas=0)
    assert autoscale(played, gangs) == replicas


@pytest.mark.parametrize(("limit", "replicas"), [("10", 0), ("1000", 1)])
def test_slice_larger_than_rays_launch_batch_never_comes(limit: str, replicas: int) -> None:
    def v6e_64(spec: Any) -> None:
        group = spec["workerGroupSpecs"][0]
        group.update(groupName="v6e-64", numOfHosts=16)
        group["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] = "8x8"

    with played_world(changed(v6e_64)) as played:
        gang = [{"TPU": 4.0, "TPU-v6e-64-head": 1.0}] * 16
        assert autoscale(played, [gang], 5, AUTOSCALER_MAX_CONCURRENT_LAUNCHES=limit) == replicas


def test_idle_slices_go_whole_and_new_one_comes(played: PlayedWorld) -> None:
    played.set_group("v6e-16", replicas=2)
    played.play(10)
    assert len(played.world.pods("v6e-16")) == 8
    assert autoscale(played, [], 6) == 0
    (to_delete,) = (
        group["scaleStrategy"]["workersToDelete"]
        for group in played.world.raycluster()["spec"]["workerGroupSpecs"]
        if group["groupName"] == "v6e-16"
    )
    assert sorted(to_delete) == sorted(played.names("v6e-16"))
    played.play(10)
    assert played.names("v6e-16") == []
    assert autoscale(played, [[HEAD] * 4]) == 1
    assert played.world.raycluster()["spec"]["workerGroupSpecs"][0]["scaleStrategy"]["workersToDelete"] == []
