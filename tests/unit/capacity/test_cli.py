"""The arguments of ``iris-ray cluster provision``, and its start-up script."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from click.testing import CliRunner, Result

from iris_ray.capacity import cli
from iris_ray.capacity.cli import head_of_the_cluster
from iris_ray.capacity.cloud_tpu import CloudTpu
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.start_up import HEAD_MARK, STARTUP_SCRIPT, startup_script
from iris_ray.cli.main import main
from iris_ray.errors import InvalidRequestError
from iris_ray.model.topology import TPUConfig
from iris_ray.settings import TEST_CLOUD_TPU_ENDPOINT

TYPE = "v6e-16"
RESERVATION = "projects/p/locations/z/reservations/r"


def test_startup_script_contains_only_the_address() -> None:
    script = startup_script(STARTUP_SCRIPT, "10.0.0.2:6379")
    assert "ray start --address='10.0.0.2:6379'" in script
    assert HEAD_MARK not in script
    assert startup_script("echo $HOME", "auto") == "echo $HOME"


@pytest.mark.parametrize("head", ["auto", "10.0.0.2", "10.0.0.2:1'; rm -rf /; '", "ray://10.0.0.2:10001"])
def test_startup_script_with_unreachable_address_is_refused(head: str) -> None:
    with pytest.raises(InvalidRequestError, match="--head"):
        startup_script(STARTUP_SCRIPT, head)


def invoke(*changes: str) -> Result:
    command = ["cluster", "provision", "--tpu", TYPE, "--max", "2", "--runtime-version", "v"]
    place = ["--location", "projects/p/locations/z", "--head", "10.0.0.2:6379"]
    return CliRunner().invoke(main, [*command, *place, *changes], env={TEST_CLOUD_TPU_ENDPOINT: "127.0.0.1:1"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--min", "3"], "--max is 2"),
        (["--budget", "15"], "--budget is 15 chips, and one slice of --tpu v6e-16 has 16"),
        (["--budget", "32", "--min", "1", "--tpu", "v6e-32"], "--budget is 32 chips, and --min 1 keeps 48"),
        (["--reservation", "res"], "--reservation is 'res'; give projects/PROJECT/locations/ZONE/reservations/NAME"),
        (["--tpu", "v7x-8"], "Google's Cloud TPU API does not serve --tpu v7x-8: use --api compute-engine"),
        (["--tpu", "tpu7x-8"], "pip install google-cloud-compute, or GKE"),
        (["--flex-start", "3600"], "knows no --flex-start: use --api compute-engine"),
        (["--flex-start", "3600", "--spot"], "--spot and --flex-start"),
        (["--vm-image", "i"], "--vm-image is for --api compute-engine"),
        (["--docker-image", "iris-ray:1"], "--docker-image is 'iris-ray:1'; give it with its registry"),
        (["--name", "Ann"], "--name is 'Ann'"),
        (["--tpu", "v6e-17", "--location", ""], "--tpu 'v6e-17' is not a TPU type"),
        (["--location", "us-east5-a"], "--location is 'us-east5-a'; give projects/PROJECT/locations/ZONE"),
        (["--location", ""], "--location is ''; give"),
        (["--head", "somewhere"], "--head HOST:PORT"),
        (["--head", "10.0.0.2:99999"], "--head HOST:PORT"),
        (["--reservation", "projects/p/locations/z/reservations/r:0"], "--reservation is"),
        (["--reservation", f"{RESERVATION}:8", "--reservation", RESERVATION], "a --reservation is given twice"),
        (["--location", "projects/p/locations/z:8", "--location", "projects/p/locations/z:9"], "two numbers of chips"),
        (["--runtime-version", ""], "--runtime-version is ''"),
        (["--network", "My net"], "--network is 'My net'; give a name"),
        (["--subnetwork", "subnetworks/x"], "--subnetwork is 'subnetworks/x'; give a name"),
        (["--service-account", "hosts"], "--service-account is 'hosts'; give its email"),
        (["--tag", "A tag"], "--tag is 'A tag'; give small letters"),
        (["--take-back", "all"], "Invalid value for '--take-back': 'all' is not one of 'idle', 'lower-bands', 'held'"),
    ],
)
def test_impossible_arguments_are_refused_before_any_call(changes: list[str], said: str) -> None:
    done = invoke(*changes)
    assert done.exit_code == 2
    assert re.search(re.escape(said), done.stderr)


@pytest.mark.parametrize("given", [(), *(("--take-back", reach.value) for reach in Reach)])
def test_chips_are_taken_back_as_far_as_told(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def provisioner(settings: Settings, *_: object) -> SimpleNamespace:
        found.append(settings)
        return SimpleNamespace(run=lambda once: None)

    def take_every_type(zone: CloudTpu, config: TPUConfig) -> None: ...

    found: list[Settings] = []
    monkeypatch.setattr(cli, "Provisioner", provisioner)
    monkeypatch.setattr(cli, "cluster", nullcontext)
    monkeypatch.setattr(CloudTpu, "require_type", take_every_type)
    done = invoke(*given)
    assert done.exit_code == 0, done.output
    assert [one.take_back for one in found] == [Reach(given[1]) if given else Reach.LOWER_BANDS]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "0", "1e10", "2d"])
def test_endless_interval_is_refused(seconds: str) -> None:
    done = invoke("--every", seconds)
    assert done.exit_code == 2
    assert done.stderr.startswith("iris-ray: Invalid value for '--every': ")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_invalid_idle_time_is_refused(seconds: str) -> None:
    done = invoke("--idle", seconds)
    assert done.exit_code == 2
    assert done.stderr.startswith("iris-ray: Invalid value for '--idle': ")


def test_startup_script_is_shown_without_a_cluster() -> None:
    done = invoke("--docker-image", "us-docker.pkg.dev/p/i/iris-ray:1", "--show-startup-script")
    assert done.exit_code == 0
    assert done.stdout.startswith("#!/bin/bash")
    assert "ray start --address='10.0.0.2:6379' --block" in done.stdout


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "localhost:6379"])
def test_head_that_only_its_own_machine_reaches_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
    with pytest.raises(InvalidRequestError, match="--head HOST:PORT"):
        head_of_the_cluster()


@pytest.mark.parametrize(
    ("flag", "content", "said"),
    [
        ("--startup-script", b"\xff", "can't be read: it is not text in UTF-8"),
        ("--prices", b"\xff", "can't be read: it is not text in UTF-8"),
        ("--prices", b'["v6e-3"."*"]\nspot = 1', "file: 'v6e-3' is not a TPU type"),
    ],
)
def test_file_of_another_kind_is_refused_by_name(tmp_path: Path, flag: str, content: bytes, said: str) -> None:
    (tmp_path / "file").write_bytes(content)
    done = invoke(flag, str(tmp_path / "file"))
    assert done.exit_code == 2
    assert said in done.stderr
    assert str(tmp_path / "file") in done.stderr


def test_type_that_compute_engine_lacks_is_refused_at_once() -> None:
    command = ["cluster", "provision", "--tpu", "v5litepod-16", "--max", "1", "--api", "compute-engine"]
    done = CliRunner().invoke(main, [*command, "--location", "projects/p/locations/z"])
    assert done.exit_code == 2
    assert "Compute Engine has no --tpu v5litepod-16" in done.stderr


def test_compute_engine_is_chosen_by_flag() -> None:
    done = invoke("--api", "compute-engine", "--tpu", "v7x-8")
    assert "--runtime-version is for --api cloud-tpu; give --vm-image, or neither" in done.stderr
