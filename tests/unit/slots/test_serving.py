"""A file of models: what it says, and what follows when it changes."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from iris_ray.errors import InvalidSlotError
from iris_ray.slots import serving
from iris_ray.slots.cli import serve
from iris_ray.slots.client.served_command import ServedCommand
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.serving import ServedFile, read

FILE = """
port = 0
[[hosts]]
kind = "gpu"
devices = 2
memory_gb = 80
[models.llama]
command = "vllm serve org/llama --port {port}"
memory_gb = { 1 = 70, 2 = 40.5 }
load_s = 900
replicas = 1
concurrency = 256
aliases = ["gpt-4o"]
[models.shout]
class = "tests.unit.slots.test_serving:Shout"
memory_gb = 1
arguments = { mark = "!" }
[keys.alice]
variable = "ALICE"
models = ["llama"]
at_a_time = 8
[policy]
ageing_s = 5.0
"""
SECRETS = {"ALICE": "a" * 20}


class Shout:
    def __call__(self, request: Any) -> str:
        return "!"


class Client:
    """Notes what it is told to serve."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.removed: list[str] = []

    def register(self, model: Any, name: str, **_: Any) -> None:
        self.registered.append(name)

    def remove(self, name: str) -> None:
        self.removed.append(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "models.toml"
    found.write_text(FILE)
    return found


def test_file_says_hosts_models_keys_and_policy(path: Path) -> None:
    said = read(path, SECRETS)
    (hosts,) = said.hosts
    assert (hosts.kind, hosts.devices, hosts.memory) == (DeviceKind.GPU, 2, 80 * 10**9)
    llama, shout = said.models["llama"], said.models["shout"]
    assert isinstance(llama.model, ServedCommand)
    assert (llama.model.load_s, llama.memory) == (900, {1: 70 * 10**9, 2: 40_500_000_000})
    assert (llama.replicas, llama.spec, said.aliases) == (1, {"concurrency": 256}, {"gpt-4o": "llama"})
    assert (serving.class_at(str(shout.model)), shout.arguments) == (Shout, {"mark": "!"})
    assert (said.keys[0].secret, said.keys[0].models, said.keys[0].at_a_time) == ("a" * 20, ["llama"], 8)
    assert said.policy.ageing_s == 5.0


def test_gpus_say_their_memory_and_totals_are_divided(path: Path) -> None:
    path.write_text(FILE.replace("memory_gb = 80\n", "").replace("{ 1 = 70, 2 = 40.5 }", "{ total = 75, on = [1, 2] }"))
    said = read(path, SECRETS)
    assert said.hosts[0].memory is None
    assert said.models["llama"].memory == {1: 75 * 10**9, 2: 37_500_000_000}
    assert said.models["llama"].place(said.hosts) == "1 × 75 GB of gpu"
    path.write_text(FILE.replace("memory_gb = 80\n", "").replace('kind = "gpu"', 'kind = "cpu"'))
    with pytest.raises(InvalidSlotError, match="has no memory_gb"):
        read(path, SECRETS)


@pytest.mark.parametrize(
    ("part", "instead", "why"),
    [
        ("port = 0", "prot = 0", "there is no 'prot'; did you mean port"),
        ("port = 0", "port = ", "can't be read"),
        ("[[hosts]]", "[hosts]", r"write \[\[hosts\]\]"),
        ('kind = "gpu"', 'kind = "npu"', "kind is 'npu'; give one of"),
        ("replicas = 1", "replica = 1", r"\[models.llama\]: there is no 'replica'; did you mean replicas"),
        ("--port {port}", "", r"\[models.llama\]: ServedCommand: command has no {port}"),
        ("memory_gb = 1\n", "memory_gb = -1\n", r"\[models.shout\]: memory_gb is -1"),
        ("concurrency = 256", "concurrency = 0", "0 is no int of 1 or more"),
        ('class = "', 'command = "a {port}"\nclass = "', "give either command"),
        ('aliases = ["gpt-4o"]', 'aliases = ["shout"]', "shout is the name of two models"),
        ("replicas = 1", "idle_s = 0", r"\[models.llama\]: model llama: idle_s is 0; give seconds above 0"),
        ("replicas = 1", 'alone = "yes"', r"\[models.llama\]: model llama: alone is 'yes'"),
        ("replicas = 1", 'group = "big"', r"\[models.llama\]: group: no other model has group = 'big'"),
        (
            "memory_gb = 1\n",
            "memory_gb = 1\nalone = true\n",
            r"\[models.shout\]: alone: it may not be on a host with llama",
        ),
        ('models = ["llama"]', 'models = ["lama"]', "may use lama, and there is no such model"),
        ('"ALICE"', '"BOB"', r"\[keys.alice\]: the environment variable BOB is not set"),
        ("ageing_s = 5.0", "ageing_s = -5", "ageing_s is -5"),
    ],
)
def test_senseless_file_is_refused_with_the_place(path: Path, part: str, instead: str, why: str) -> None:
    path.write_text(FILE.replace(part, instead, 1))
    with pytest.raises(InvalidSlotError, match=why):
        read(path, SECRETS)


def test_groups_and_idle_limits_are_passed_on(path: Path) -> None:
    grouped = FILE.replace("replicas = 1", 'idle_s = 60\ngroup = "big"\nalone = true')
    path.write_text(grouped.replace("memory_gb = 1\n", 'memory_gb = 1\nidle_s = inf\ngroup = "big"\n'))
    llama, shout = (each.spec_on(()) for each in read(path, SECRETS).models.values())
    assert (llama.idle_s, llama.group, llama.alone) == (60, "big", True)
    assert (shout.idle_s, shout.group, shout.alone) == (float("inf"), "big", False)
    path.write_text(path.read_text().replace('group = "big"\nalone', 'group = "bigg"\nalone'))
    with pytest.raises(InvalidSlotError, match=r"group = 'bigg'; did you mean 'big'"):
        read(path, SECRETS)


def test_replicas_elsewhere_leave_a_host_to_the_group(path: Path) -> None:
    one = FILE.replace("replicas = 1", 'replicas = 1\ngroup = "g"').replace("_gb = 1\n", '_gb = 1\ngroup = "g"\n')
    path.write_text(one)
    with pytest.raises(InvalidSlotError, match="shout]: group: it may not be on a host with llama, whose replicas"):
        read(path, SECRETS)
    path.write_text(one.replace("[[hosts]]", "[[hosts]]\ncount = 2"))
    assert len(read(path, SECRETS).models) == 2


def test_only_what_changed_is_registered_anew(path: Path) -> None:
    client: Any = Client()
    served = ServedFile(client, read(path, SECRETS))
    assert client.registered == ["llama", "shout"]
    assert served.change(read(path, SECRETS)) == []
    other = FILE.replace('mark = "!"', 'mark = "?"').replace("[models.llama]", "[models.lama]")
    path.write_text(other.replace('models = ["llama"]', ""))
    words = served.change(read(path, SECRETS))
    assert words == ["lama is new", "shout is changed", "llama is served no more", "keys have changed"]
    assert (client.registered[2:], client.removed) == (["lama", "shout"], ["llama"])
    path.write_text(FILE.replace("devices = 2", "devices = 4"))
    with pytest.raises(InvalidSlotError, match="starts anew"):
        served.change(read(path, SECRETS))


def test_dry_run_says_where_models_fit(path: Path) -> None:
    done = CliRunner().invoke(serve, [str(path), "--dry-run"], env=SECRETS)
    assert done.exit_code == 0
    assert [line.split()[:2] for line in done.output.splitlines()] == [
        ["MODEL", "SERVES"],
        ["llama", "vllm"],
        ["shout", "tests.unit.slots.test_serving:Shout"],
    ]
    assert "1 × 70 GB of gpu" in done.output
    path.write_text(FILE.replace("{ 1 = 70, 2 = 40.5 }", "{ 1 = 90, 4 = 40 }"))
    failed = CliRunner().invoke(serve, [str(path), "--dry-run"], env=SECRETS)
    assert "llama would fit on none of the hosts" in str(failed.exception)
