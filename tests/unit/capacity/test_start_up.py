"""The start-up scripts, run by bash on a host whose metadata server, ray, docker and gcloud are simulated."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from ray._private.accelerators.tpu import TPUAcceleratorManager

from iris_ray.capacity.start_up import STARTUP_SCRIPT, script_for_docker, startup_script
from iris_ray.errors import InvalidRequestError
from iris_ray.testing.metadata_server import MetadataServers

IMAGE = "us-east5-docker.pkg.dev/my-project/images/iris-ray:1"
OF_CLOUD_TPU = {"agent-worker-number": "2", "accelerator-type": "v6e-16", "instance-id": "slice-a"}
OF_COMPUTE_ENGINE = {
    "created-by": "projects/123/zones/us-central1-c/instanceGroupManagers/slice-a",
    "tpu-env": "TPU_ACCELERATOR_TYPE: 'tpu7x-16'\nTOPOLOGY: '2x2x2'\nTPU_WORKER_ID: '1'\nHOST_BOUNDS: '1,1,2'\n",
}
TELLS = "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY"


@pytest.fixture
def servers() -> Iterator[MetadataServers]:
    running = MetadataServers()
    yield running
    running.close()


def run(
    script: str, address: str, tmp_path: Path, fails: Mapping[str, int] | None = None
) -> list[tuple[list[str], dict[str, str]]]:
    """Run a script; each program on the host notes its arguments and variables, and fails so often first."""
    for program in ("ray", "docker", "gcloud", "sleep"):
        (fake := tmp_path / program).write_text(
            "#!/usr/bin/env python3\nimport json, os, sys\n"
            f"name = {program!r}\n"
            f"fails = {dict(fails or {})!r}.get(' '.join([name, *sys.argv[1:2]]), 0)\n"
            f"path = {str(tmp_path / 'calls')!r}\n"
            "words = [name, *sys.argv[1:]]\n"
            "before = [json.loads(line)[0] for line in open(path)] if os.path.exists(path) else []\n"
            "print(json.dumps([words, dict(os.environ)]), file=open(path, 'a'))\n"
            "sys.exit(before.count(words) < fails)\n"
        )
        fake.chmod(0o755)
    (file := tmp_path / "start.sh").write_text(script)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GCE_METADATA_HOST": address}
    subprocess.run(["bash", "-n", str(file)], check=True)
    subprocess.run(["bash", str(file)], env=environment, timeout=60, check=True)
    return [tuple(json.loads(line)) for line in (tmp_path / "calls").read_text().splitlines()]


def host(servers: MetadataServers, attributes: Mapping[str, str]) -> str:
    values = {f"instance/attributes/{key}": value for key, value in attributes.items()}
    return servers.serve("127.0.0.1", values).address


def told(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in TELLS if name in environment}


def test_host_of_cloud_tpu_joins_once_head_is_there(servers: MetadataServers, tmp_path: Path) -> None:
    script = startup_script(STARTUP_SCRIPT, "10.0.0.2:6379")
    calls = run(script, host(servers, OF_CLOUD_TPU), tmp_path, {"ray start": 2})
    start = ["ray", "start", "--address=10.0.0.2:6379"]
    assert [words for words, _ in calls] == [start, ["sleep", "10"], start, ["sleep", "10"], start]
    assert told(calls[-1][1]) == {}, "Ray asks the metadata server itself"


def test_host_of_compute_engine_tells_ray_its_slice(servers: MetadataServers, tmp_path: Path) -> None:
    script = startup_script(STARTUP_SCRIPT, "10.0.0.2:6379")
    ((words, environment),) = run(script, host(servers, OF_COMPUTE_ENGINE), tmp_path)
    assert words == ["ray", "start", "--address=10.0.0.2:6379"]
    assert told(environment) == {
        "TPU_NAME": "slice-a",
        "TPU_WORKER_ID": "1",
        "TPU_ACCELERATOR_TYPE": "tpu7x-16",
        "TPU_TOPOLOGY": "2x2x2",
    }


def test_ray_understands_what_it_is_told(
    servers: MetadataServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = startup_script(STARTUP_SCRIPT, "10.0.0.2:6379")
    ((_, environment),) = run(script, host(servers, OF_COMPUTE_ENGINE), tmp_path)
    for name, value in told(environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TPUAcceleratorManager, "get_current_node_num_accelerators", lambda: 4)
    assert TPUAcceleratorManager.get_current_node_accelerator_labels() == {
        "ray.io/tpu-slice-name": "slice-a",
        "ray.io/tpu-worker-id": "1",
        "ray.io/tpu-topology": "2x2x2",
        "ray.io/tpu-pod-type": "v7x-16",
    }


def test_host_runs_ray_in_container_after_signing_in(servers: MetadataServers, tmp_path: Path) -> None:
    script = startup_script(script_for_docker(IMAGE), "10.0.0.2:6379")
    calls = run(script, host(servers, OF_COMPUTE_ENGINE), tmp_path, {"docker pull": 1})
    assert [words[:3] for words, _ in calls] == [
        ["docker", "pull", IMAGE],
        ["gcloud", "auth", "configure-docker"],
        ["sleep", "10"],
        ["docker", "pull", IMAGE],
        ["docker", "rm", "--force"],
        ["docker", "run", "--detach"],
    ]
    words, environment = calls[-1]
    assert words[words.index(IMAGE) :] == [IMAGE, "ray", "start", "--address=10.0.0.2:6379", "--block"]
    assert {f"--env={name}" for name in TELLS} <= set(words)
    assert told(environment)["TPU_NAME"] == "slice-a"


@pytest.mark.parametrize("image", ["iris-ray:1", "x y/z", "'; rm -rf /; '/i"])
def test_image_without_registry_is_refused(image: str) -> None:
    with pytest.raises(InvalidRequestError, match="--docker-image"):
        script_for_docker(image)
