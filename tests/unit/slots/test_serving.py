"""A file of models: what it says, and what follows when it changes."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ray.exceptions import RayActorError

from iris_ray.errors import InvalidSlotError
from iris_ray.slots import serving
from iris_ray.slots.actors.messages import ModelOrder
from iris_ray.slots.cli import serve
from iris_ray.slots.client.served_command import ServedCommand
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.memory_estimates import gguf_memory, read_gguf
from iris_ray.slots.serving import ServedFile, read
from tests.support.gguf_files import write_gguf

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
    def __init__(self, mark: str = "!") -> None:
        self.mark = mark

    def __call__(self, request: Any) -> str:
        return "!"


class Client:
    """Notes the models that it is told to serve. Its SlotManager may die, or only its answer may be lost."""

    def __init__(self) -> None:
        self.served: dict[str, ModelOrder] = {}
        self.registered: list[str] = []
        self.fails = ""

    def _change(self, orders: Sequence[ModelOrder], gone: Sequence[str] = ()) -> None:
        if self.fails == "before":
            raise RayActorError
        self.registered += [order.spec.name for order in orders]
        self.served |= {order.spec.name: order for order in orders}
        self.served = {name: order for name, order in self.served.items() if name not in gone}
        if self.fails == "after":
            raise RayActorError


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
    assert (llama.model.load_s, said.aliases) == (900, {"gpt-4o": "llama"})
    assert llama.how == {"memory": {1: 70 * 10**9, 2: 40_500_000_000}, "replicas": 1, "concurrency": 256}
    assert (serving.class_at(str(shout.model)), shout.how["arguments"]) == (Shout, {"mark": "!"})
    assert (said.keys[0].secret, said.keys[0].models, said.keys[0].at_a_time) == ("a" * 20, ("llama",), 8)
    assert said.policy.ageing_s == 5.0


def test_gpus_say_their_memory_and_totals_are_divided(path: Path) -> None:
    path.write_text(FILE.replace("memory_gb = 80\n", "").replace("{ 1 = 70, 2 = 40.5 }", "{ total = 75, on = [1, 2] }"))
    said = read(path, SECRETS)
    assert said.hosts[0].memory is None
    assert said.models["llama"].how["memory"] == {1: 75 * 10**9, 2: 37_500_000_000}
    assert said.place("llama") == "1 × 75 GB of gpu"
    path.write_text(FILE.replace("memory_gb = 80\n", "").replace('kind = "gpu"', 'kind = "cpu"'))
    with pytest.raises(InvalidSlotError, match="has no memory_gb"):
        read(path, SECRETS)


UNEVEN = FILE.replace("memory_gb = 80", "memory_gb = [6, 12]").replace("replicas = 1\n", "")


def test_model_of_uneven_parts_fits_on_uneven_gpus(path: Path) -> None:
    path.write_text(UNEVEN.replace("{ 1 = 70, 2 = 40.5 }", "{ 1 = 14, 2 = [12, 6] }"))
    said = read(path, SECRETS)
    assert said.hosts[0].memory == (6 * 10**9, 12 * 10**9)
    assert said.place("llama") == "12 + 6 GB of gpu"
    path.write_text(UNEVEN.replace("{ 1 = 70, 2 = 40.5 }", "{ 1 = 14, 2 = [12, 7] }"))
    needs = "needs 1 × 14 GB or 12 \\+ 7 GB, and a host has 6 \\+ 12 GB; give it less memory_gb"
    with pytest.raises(InvalidSlotError, match=rf"\[models.llama\]: it would fit on none of the hosts: it {needs}"):
        read(path, SECRETS)


@pytest.mark.parametrize(("memory", "most"), [("{ 2 = [6, 3] }", 2), ("{ 1 = 5 }", 3), ("{ 1 = 5, 2 = [6, 2] }", 3)])
def test_replicas_are_counted_on_uneven_gpus(path: Path, memory: str, most: int) -> None:
    for replicas in (most, most + 1):
        path.write_text(UNEVEN.replace("{ 1 = 70, 2 = 40.5 }", f"{memory}\nreplicas = {replicas}"))
        if replicas == most:
            assert read(path, SECRETS).place("llama")
            continue
        with pytest.raises(InvalidSlotError, match=f"all hosts together have room for {most}"):
            read(path, SECRETS)


def test_too_few_gpus_of_unknown_memory_are_named(path: Path) -> None:
    path.write_text(FILE.replace("memory_gb = 80\n", "").replace("{ 1 = 70, 2 = 40.5 }", "{ 3 = [3, 2, 1] }"))
    with pytest.raises(InvalidSlotError, match=r"needs 3 \+ 2 \+ 1 GB, and a host has 2 devices of unknown size"):
        read(path, SECRETS)


GGUF = 'gguf = "weights/small.gguf"\ncontext = 1000'
OF_LLAMA = "memory_gb = { 1 = 70, 2 = 40.5 }"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A GGUF file beside the file of models."""
    (tmp_path / "weights").mkdir()
    return write_gguf(tmp_path / "weights" / "small.gguf")


def test_memory_follows_from_gguf_file_context_and_concurrency(path: Path, gguf: Path) -> None:
    path.write_text(FILE.replace(OF_LLAMA, GGUF))
    with gguf.open("rb") as file:
        head = read_gguf(file, gguf.stat().st_size)
    found = read(path, SECRETS).models["llama"].how
    assert found["memory"] == gguf_memory(head, context=1000, concurrency=256)
    assert found["concurrency"] == 256
    path.write_text(FILE.replace(OF_LLAMA, GGUF.replace('"weights/small.gguf"', f'{{ path = "{gguf}", on = [1, 2] }}')))
    on_two = read(path, SECRETS).models["llama"].how["memory"]
    assert on_two == gguf_memory(head, context=1000, concurrency=256, degrees=[1, 2])
    path.write_text(
        FILE.replace(OF_LLAMA, GGUF.replace('"weights/small.gguf"', f'{{ path = "{gguf}", split = [2, 1] }}'))
    )
    said = read(path, SECRETS)
    assert said.models["llama"].how["memory"] == gguf_memory(head, context=1000, concurrency=256, split=[2, 1])
    assert len(said.orders["llama"].spec.sizes_on(2)) == 2


@pytest.mark.parametrize(
    ("instead", "why"),
    [
        (f"{OF_LLAMA}\n{GGUF}", "give either gguf and context, or memory_gb"),
        ('gguf = "weights/small.gguf"', "context is missing: the memory follows from"),
        ("context = 1000", "gguf is missing"),
        (GGUF.replace("1000", "0"), "context is 0"),
        (
            GGUF.replace("small", "large"),
            "large.gguf can't be read on this machine: No such file or directory",
        ),
        (GGUF.replace('"weights/small.gguf"', '"models.toml"'), "it does not begin with the letters GGUF"),
        (GGUF.replace("weights/", "~nobody-here/"), "can't be read on this machine: No such file or directory"),
        (GGUF.replace("weights/", "\\u0000"), "can't be read on this machine: embedded null byte"),
        (GGUF.replace('"weights/small.gguf"', "{ path = 3 }"), "gguf is 3; give a str that is not empty"),
        (GGUF.replace('"weights/small.gguf"', '{ path = "weights/small.gguf", on = "2" }'), "gguf: on is '2'"),
        (GGUF.replace('"weights/small.gguf"', '{ file = "x" }'), "there is no 'file'"),
        (
            GGUF.replace('"weights/small.gguf"', '{ path = "weights/small.gguf", split = [2, 0] }'),
            "gguf: split is [2, 0]; give numbers from 0.000001",
        ),
    ],
)
def test_memory_that_can_not_follow_is_refused(path: Path, gguf: Path, instead: str, why: str) -> None:
    assert gguf.exists()
    path.write_text(FILE.replace(OF_LLAMA, instead))
    with pytest.raises(InvalidSlotError, match=re.escape(why)):
        read(path, SECRETS)


def test_gguf_without_concurrency_is_refused(path: Path, gguf: Path) -> None:
    """A program serves 64 requests at a time by default, and each has a cache."""
    assert gguf.exists()
    path.write_text(FILE.replace(OF_LLAMA, GGUF).replace("concurrency = 256\n", ""))
    with pytest.raises(InvalidSlotError, match="concurrency is missing"):
        read(path, SECRETS)


@pytest.mark.parametrize(
    ("part", "instead", "why"),
    [
        ("port = 0", "prot = 0", "there is no 'prot'; did you mean port"),
        ("port = 0", "port = ", "can't be read"),
        ("port = 0", "port = " + "[" * 50_000, "can't be read"),
        ("port = 0", "port = " + "9" * 5000, "can't be read"),
        ("[[hosts]]", "[hosts]", r"write \[\[hosts\]\]"),
        ('kind = "gpu"', 'kind = "npu"', "kind is 'npu'; give one of"),
        ("replicas = 1", "replica = 1", r"\[models.llama\]: there is no 'replica'; did you mean replicas"),
        ("--port {port}", "", r"\[models.llama\]: ServedCommand: command has no {port}"),
        ("memory_gb = 1\n", "memory_gb = -1\n", r"\[models.shout\]: memory_gb is -1"),
        ("concurrency = 256", "concurrency = 0", "concurrency is 0; give an int from 1 to 2000"),
        ('class = "', 'command = "a {port}"\nclass = "', "give either command"),
        ('aliases = ["gpt-4o"]', 'aliases = ["shout"]', "shout is the name of two models"),
        ("replicas = 1", "idle_s = 0", r"\[models.llama\]: model llama: idle_s is 0; give seconds, more than 0"),
        ("replicas = 1", 'alone = "yes"', r"\[models.llama\]: model llama: alone is 'yes'"),
        ("replicas = 1", 'group = "big"', r"\[models.llama\]: group: no other model has group = 'big'"),
        (
            "memory_gb = 1\n",
            "memory_gb = 1\nalone = true\n",
            r"\[models.shout\]: alone: it must not share a host with llama",
        ),
        ('models = ["llama"]', 'models = ["lama"]', "may use lama, and there is no such model"),
        ('"ALICE"', '"BOB"', r"\[keys.alice\]: the environment variable BOB is not set"),
        ("ageing_s = 5.0", "ageing_s = -5", "ageing_s is -5"),
        ("port = 0", "port = 99999", "port is 99999; give an int from 0 to 65535"),
        ("port = 0", 'port = "http"', "port is 'http'"),
        ("port = 0", "host = 5", "host is 5; give an address"),
        ("port = 0", "timeout_s = -1", "timeout_s is -1; give seconds"),
        ("port = 0", "name = 5", "name is 5; give a str"),
        ("port = 0", f'name = "{"n" * 200}"', "name"),
        ("replicas = 1", 'replicas = "two"', r"\[models.llama\]: model llama: replicas is 'two'; give an int of 0"),
        ("replicas = 1", "replicas = -1", "replicas is -1"),
        ("replicas = 1", "replicas = 50", r"\[models.llama\]: replicas is 50; all hosts together have room for 2"),
        ("replicas = 1", 'prewarm = "no"', "prewarm is 'no'; give True or False"),
        ('{ mark = "!" }', "[1]", r"\[models.shout\]: arguments is \[1\]; give values by name"),
        ("mark = ", "marc = ", r"Shout can't be made with arguments=.* unexpected keyword argument 'marc'"),
        (":Shout", ":Nope", r"\[models.shout\]: class .* can't be imported \(AttributeError"),
        ("tests.unit.slots.test_serving:Shout", "pathlib:Path", "can't be served; give a class that has __call__"),
        ("replicas = 1", 'constraints = ["zone=mars"]', r"no table \[\[hosts\]\] promises hosts with zone == mars"),
        ("{ 1 = 70, 2 = 40.5 }", "{ 3 = 10 }", r"\[models.llama\]: it would fit on none of the hosts"),
        ("[policy]", f'[keys.bob]\nsecret = "{"a" * 20}"\n[policy]', "two API keys have the same name or secret"),
        ("[models.shout]", '[models.""]', "a model's name is ''; give a str that is not empty"),
        ('aliases = ["gpt-4o"]', 'aliases = [""]', r"\[models.llama\]: aliases is \(?\['?'?'\]"),
        ('models = ["llama"]', "models = 5", r"\[keys.alice\]: models is 5; give a list of texts"),
        ('"ALICE"', "5", r"\[keys.alice\]: variable is 5; give a str"),
        ("{ 1 = 70, 2 = 40.5 }", "{ total = 75, on = 2 }", "memory_gb: on is 2; give a list of numbers of devices"),
        ("{ 1 = 70, 2 = 40.5 }", "[12, 6]", r"memory_gb is \[12, 6\]; give the number of devices with the gigabytes"),
        ("{ 1 = 70, 2 = 40.5 }", "{ 1 = 70, 01 = 6 }", "give gigabytes by the number of devices"),
        ("{ 1 = 70, 2 = 40.5 }", f"{{ {'9' * 5000} = 70 }}", "give gigabytes by the number of devices"),
        ("{ 1 = 70, 2 = 40.5 }", "{ 70000000000 = 1 }", "memory is for 70,000,000,000 devices"),
        ("memory_gb = 80", "memory_gb = 1e300", r"\[\[hosts\]\]: memory_gb is 1e\+300; give a number"),
        ("load_s = 900", "arguments = { seed = 1 }", r"\[models.llama\]: arguments are for classes"),
        ("ageing_s = 5.0", 'placement = "a"', r"\[policy\]: there is no 'placement'"),
    ],
)
def test_senseless_file_is_refused_with_the_place(path: Path, part: str, instead: str, why: str) -> None:
    path.write_text(FILE.replace(part, instead, 1))
    with pytest.raises(InvalidSlotError, match=why):
        read(path, SECRETS)


def test_file_without_keys_or_models_is_refused(path: Path) -> None:
    path.write_text(FILE.replace("port = 0", 'host = "0.0.0.0"').split("[keys")[0])
    with pytest.raises(InvalidSlotError, match=r"host is '0\.0\.0\.0', .* add a table \[keys\.NAME\]"):
        read(path, SECRETS)
    path.write_text(FILE.split("[models")[0])
    with pytest.raises(InvalidSlotError, match="there are no models"):
        read(path, SECRETS)


@pytest.mark.parametrize(
    ("hosts", "constraint", "is_served"),
    [
        ('constraints = ["zone=a"]', "zone=a", True),
        ('constraints = ["zone=a"]', "zone!=b", True),
        ('constraints = ["zone in (a, b)"]', "zone=b", True),
        ('constraints = ["zone=a"]', "zone=b", False),
        ('constraints = ["zone=a"]', "zone!=a", False),
        ('constraints = ["gen>=4"]', "gen>=4", True),
        ('constraints = ["gen=3"]', "gen>=4", False),
        ("", "zone!=a", True),
        ("", "!spot", True),
        ("", "node-id=abc", True),
    ],
)
def test_hosts_of_the_file_have_to_promise_what_models_ask_for(
    path: Path, hosts: str, constraint: str, is_served: bool
) -> None:
    asked = FILE.replace("replicas = 1", f'constraints = ["{constraint}"]')
    path.write_text(asked.replace("[[hosts]]", f"[[hosts]]\n{hosts}"))
    if is_served:
        assert read(path, SECRETS).place("llama")
        return
    with pytest.raises(InvalidSlotError, match="promises hosts"):
        read(path, SECRETS)


@pytest.mark.parametrize(("chips", "is_served"), [(2, True), (3, False), (4, True)])
def test_chips_of_a_slot_are_neighbours(path: Path, chips: int, is_served: bool) -> None:
    slices = FILE.replace('kind = "gpu"\ndevices = 2\nmemory_gb = 80', 'tpu_type = "v4-8"\nmemory_gb = 32')
    path.write_text(slices.replace("{ 1 = 70, 2 = 40.5 }", f"{{ {chips} = 10 }}"))
    if is_served:
        assert read(path, SECRETS).place("llama") == f"{chips} × 10 GB of tpu"
        return
    with pytest.raises(InvalidSlotError, match="2, 4, … neighbouring chips"):
        read(path, SECRETS)


def test_several_widths_have_room_for_more_replicas(path: Path) -> None:
    wide = FILE.replace("{ 1 = 70, 2 = 40.5 }", "{ 1 = 50, 2 = 30 }")
    path.write_text(wide.replace("replicas = 1", "replicas = 3"))  # 50 and 30 GB on each of two devices
    assert read(path, SECRETS).orders["llama"].replicas == 3


@pytest.mark.parametrize("code", ["def f(:\n", "raise RuntimeError", "raise SystemExit(3)", "import nothing_at_all"])
def test_module_that_cannot_be_imported_changes_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    client: Any = Client()
    served = ServedFile(client, read(path, SECRETS))
    (tmp_path / "broken_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    path.write_text(FILE.replace("70", "60").replace("tests.unit.slots.test_serving:Shout", "broken_model:Shout"))
    with pytest.raises(InvalidSlotError, match=r"models.shout\]: class 'broken_model:Shout' can't be imported"):
        served.change(read(path, SECRETS))
    assert client.registered == ["llama", "shout"]


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("again", [True, False], ids=["try again", "the old file"])
def test_after_a_failed_change_the_file_is_what_is_served(path: Path, fails: str, again: bool) -> None:
    client: Any = Client()
    old, new = FILE, FILE.replace("70", "60").replace("[models.shout]", "[models.new]")
    served = ServedFile(client, read(path, SECRETS))
    path.write_text(new)
    client.fails = fails
    for _ in range(2):
        with pytest.raises(RayActorError):
            served.change(read(path, SECRETS))
    client.fails = ""
    path.write_text(new if again else old)
    said = read(path, SECRETS)
    assert served.change(said) != []
    assert client.served == said.orders
    assert served.change(said) == []


def test_groups_and_idle_limits_are_passed_on(path: Path) -> None:
    grouped = FILE.replace("replicas = 1", 'idle_s = 60\ngroup = "big"\nalone = true')
    path.write_text(grouped.replace("memory_gb = 1\n", 'memory_gb = 1\nidle_s = inf\ngroup = "big"\n'))
    llama, shout = (each.spec for each in read(path, SECRETS).orders.values())
    assert (llama.idle_s, llama.group, llama.alone) == (60, "big", True)
    assert (shout.idle_s, shout.group, shout.alone) == (float("inf"), "big", False)
    path.write_text(path.read_text().replace('group = "big"\nalone', 'group = "bigg"\nalone'))
    with pytest.raises(InvalidSlotError, match=r"group = 'bigg'; did you mean 'big'"):
        read(path, SECRETS)


def test_replicas_elsewhere_leave_a_host_to_the_group(path: Path) -> None:
    one = FILE.replace("replicas = 1", 'replicas = 1\ngroup = "g"').replace("_gb = 1\n", '_gb = 1\ngroup = "g"\n')
    path.write_text(one)
    with pytest.raises(InvalidSlotError, match="shout]: group: it must not share a host with llama, whose replicas"):
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
    assert client.registered[2:] == ["lama", "shout"]
    assert set(client.served) == {"lama", "shout"}
    path.write_text(FILE.replace("devices = 2", "devices = 4"))
    with pytest.raises(InvalidSlotError, match="is restarted"):
        served.change(read(path, SECRETS))


def test_port_in_use_is_refused_before_a_cluster_is_asked(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path.write_text(FILE.replace("port = 0", f"port = {taken.getsockname()[1]}"))
        failed = CliRunner().invoke(serve, [str(path)], env={**SECRETS, "RAY_ADDRESS": "no-such-host:1"})
        assert "can't be used: Address already in use" in str(failed.exception)
        assert CliRunner().invoke(serve, [str(path), "--dry-run"], env=SECRETS).exit_code == 0


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
    assert "[models.llama]: it would fit on none of the hosts" in str(failed.exception)
    path.write_text(FILE.replace("port = 0", "port = 99999"))
    failed = CliRunner().invoke(serve, [str(path), "--dry-run"], env=SECRETS)
    assert "port is 99999" in str(failed.exception)
