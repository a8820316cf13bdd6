"""Jobs that hold hosts for slots: how they are submitted, and how they end. Ray and the Controller stand aside."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from iris_ray import SlotHosts
from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import ControllerUnavailableError
from iris_ray.model.job_info import JobInfo
from iris_ray.processes.tree import TOKEN_VARIABLE
from iris_ray.slots.actors.gpu_memory import NoLibraryError
from iris_ray.slots.actors.runners import HostHere
from iris_ray.slots.client import hold_host
from iris_ray.slots.core.devices import DeviceKind

GB = 10**9
Nvidia = Callable[..., None]


def test_failed_submission_leaves_no_runner_job_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    cancelled: list[str] = []

    def launch(request: Any, detached: bool) -> SimpleNamespace:
        if len(launched) == 2:
            raise ControllerUnavailableError("no answer for 30 s")
        launched.append(request.spec.job_id)
        return SimpleNamespace(job_id=request.spec.job_id)

    monkeypatch.setattr(hold_host, "launch", launch)
    monkeypatch.setattr(hold_host, "cancel_runners", cancelled.extend)
    no_actor: Any = None
    with pytest.raises(ControllerUnavailableError):
        hold_host.submit_runners(Actor(no_actor), [SlotHosts(count=3)], None)
    assert len(launched) == 2
    assert cancelled == launched


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1,0", ("0", "1")),
        ("10,9,8", ("8", "9", "10")),
        ("GPU-1,GPU-0", ("GPU-0", "GPU-1")),
        ("", ()),
    ],
)
def test_gpus_of_host_are_in_the_order_of_nvidia_smi(nvidia: Nvidia, visible: str, names: tuple[str, ...]) -> None:
    """`SlotHosts(memory=[…])` lists their bytes in that order, and Ray names them in any."""
    nvidia(*({"total": 100 + number, "reserved": 0, "used": 0} for number in range(11)))
    assert hold_host.gpus_here(visible, [1, 2]) == (names, tuple(100 + int(name.rpartition("-")[2]) for name in names))


def test_parts_of_gpus_are_in_the_order_of_nvidia_smi(nvidia: Nvidia) -> None:
    whole, part = ({"total": total, "reserved": 0, "used": 0} for total in (80, 10))
    nvidia(whole, whole, whole, *({**part, "mig": place} for place in ([2, 0], [0, 1], [0, 7])))
    names, totals = hold_host.gpus_here("MIG-5,GPU-1,MIG-4,MIG-3", [1, 2, 3, 4])
    assert (names, totals) == (("MIG-4", "MIG-5", "GPU-1", "MIG-3"), (10, 10, 80, 10))


@pytest.mark.parametrize("memory", [7, (7, 7), [12, 6]])
def test_gpus_without_a_driver_have_an_order_if_they_have_numbers(
    nvidia: Nvidia, capfd: pytest.CaptureFixture[str], memory: Any
) -> None:
    assert hold_host.gpus_here("10,9", memory) == (("9", "10"), ())
    said = capfd.readouterr().out
    assert said.startswith("slots here get their share of SlotHosts(memory=…), not of the whole GPU: NVIDIA's driver")
    assert said.count("\n") == 1


def test_unlike_gpus_without_an_order_are_refused(nvidia: Nvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hold_host.gpus_here("GPU-b,GPU-a", [7, 7]) == hold_host.gpus_here("GPU-b,GPU-a", 7)
    assert hold_host.gpus_here("GPU-b,GPU-a", 7) == (("GPU-b", "GPU-a"), ())
    with pytest.raises(RuntimeError, match=r"the order of GPU-b, GPU-a is not known.*: NVIDIA's driver can't say"):
        hold_host.gpus_here("GPU-b,GPU-a", [12, 6])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoLibraryError, match=r"pip install nvidia-ml-py\); mend that, or set CUDA_VISIBLE_DEVICES"):
        hold_host.gpus_here("GPU-b,GPU-a", [12, 6])


def test_gpus_without_name_or_memory_are_refused(nvidia: Nvidia) -> None:
    with pytest.raises(RuntimeError, match="the memory of this host's GPUs is not known: NVIDIA's driver can't say"):
        hold_host.gpus_here("0", None)
    with pytest.raises(RuntimeError, match="Ray has set no CUDA_VISIBLE_DEVICES"):
        hold_host.gpus_here("", None)


def gpu_host(monkeypatch: pytest.MonkeyPatch, visible: str, memory: Any) -> HostHere:
    """What a task tells the manager of its host with these GPUs, of which slots may use this memory."""
    me = JobInfo("j", "j/task-0", 0, 1, 1, 0, 1, "", 0, "")
    ray: Any = SimpleNamespace(util=SimpleNamespace(get_current_placement_group=object))
    agents: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda variables: "the agent"))
    stand_ins = {"ray": ray, "_Agent": agents, "_attributes": dict, "get_job_info": lambda: me}
    for name, stands_in in stand_ins.items():
        monkeypatch.setattr(hold_host, name, stands_in)
    for variable in (TOKEN_VARIABLE, TaskFiles.VARIABLE):
        monkeypatch.setenv(variable, "of this task")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return hold_host._here("gpu-0", DeviceKind.GPU, visible.count(",") + 1, memory, False)


def test_given_memory_is_no_measure_of_the_whole_gpu(nvidia: Nvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia({"total": 82 * GB, "reserved": 2 * GB, "used": 0}, {"total": 40 * GB, "reserved": 0, "used": 0})
    here = gpu_host(monkeypatch, "0", 40 * GB)
    assert (here.memory, here.sizes, here.share((0,), (20 * GB,))) == (40 * GB, (), 0.25)
    here = gpu_host(monkeypatch, "GPU-1,GPU-0", [40 * GB, 30 * GB])
    assert (here.gpus, here.sizes) == (("GPU-0", "GPU-1"), (40 * GB, 30 * GB))
    assert [here.share((device,), (20 * GB,)) for device in (0, 1)] == [0.25, 0.5]
    here = gpu_host(monkeypatch, "1,0", None)
    assert (here.sizes, here.share((0,), (20 * GB,))) == ((80 * GB, 40 * GB), 0.25)


class Calls:
    """Calls of actors by name, of which some have been answered. An answer that is an error is raised."""

    def __init__(self, **answered: Any) -> None:
        self.answered = answered
        self.killed: list[Any] = []
        self.agent: Any = SimpleNamespace(watch=self._call("agent gone"))
        self.manager: Any = SimpleNamespace(hold_host=self._call("held"), empty_runner=self._call("empty"))

    def _call(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *_: name.replace(" ", "_"))

    def wait(self, refs: list[str], timeout: float | None = None) -> tuple[list[str], list[str]]:
        """As Ray does, give one that is ready, the first in the list."""
        ready = [ref for ref in refs if ref in self.answered][:1]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: str) -> Any:
        if isinstance(self.answered[ref], Exception):
            raise self.answered[ref]
        return self.answered[ref]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class Notice:
    reason = "its host is to go"
    was_saved = False

    def saved(self) -> None:
        self.was_saved = True


def hold(
    monkeypatch: pytest.MonkeyPatch,
    calls: Calls,
    notice: Notice | None = None,
    here: Callable[..., Any] | None = None,
) -> None:
    found = SimpleNamespace(agent=Actor(calls.agent), runner_id="slots-0")
    monkeypatch.setattr(hold_host, "ray", calls)
    monkeypatch.setattr(hold_host, "_here", here or (lambda *_: found))
    monkeypatch.setattr(hold_host, "preemption_notice", lambda: notice)
    hold_host.hold_host(Actor(calls.manager), "slots-0", SlotHosts().kind, 1, 1, False)


def test_missing_library_is_said_once_and_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def here(*_: object) -> Any:
        return hold_host.gpus_here("0", None)

    said: list[tuple[str, str]] = []

    def give_up(*words: Any) -> str:
        said.append(words)
        return "told"

    calls = Calls(told=None)
    calls.manager.give_up_runner = SimpleNamespace(remote=give_up)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hold(monkeypatch, calls, here=here)
    ((runner, why),) = said
    assert runner == "slots-0"
    assert "nvidia-ml-py is not installed on that host (pip install nvidia-ml-py); mend that, or give SlotHosts(" in why
    assert capfd.readouterr().out.count("nvidia-ml-py is not installed") == 1


@pytest.mark.parametrize("answered", [{"agent_gone": None}, {"held": False}, {"held": False, "agent_gone": None}])
def test_runner_job_without_agent_fails_to_be_retried(
    monkeypatch: pytest.MonkeyPatch, answered: dict[str, Any]
) -> None:
    with pytest.raises(RuntimeError, match="agent of runner slots-0 is gone"):
        hold(monkeypatch, Calls(**answered))


@pytest.mark.parametrize("answer", [True, RayError("the manager is gone")])
def test_unneeded_runner_job_ends_with_its_agent(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    calls = Calls(held=answer, agent_gone=None)
    hold(monkeypatch, calls)
    assert calls.killed == [calls.agent]


def test_noticed_runner_job_moves_with_or_without_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for calls in (Calls(empty=None), Calls(held=False)):
        notice = Notice()
        hold(monkeypatch, calls, notice)
        assert notice.was_saved


def test_models_see_host_attributes_as_jobs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {
        "ray.io/tpu-slice-name": "pod-a",
        "ray.io/tpu-worker-id": "1",
        "ray.io/tpu-pod-type": "v4-16",
        "iris/disk-gb": "500",
    }
    node = {"NodeID": "n1", "NodeManagerAddress": "10.0.0.7", "Labels": labels, "Resources": {"TPU": 4.0}}
    ray = SimpleNamespace(nodes=lambda: [node], get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "n1"))
    monkeypatch.setattr(hold_host, "ray", ray)
    found = {name: value.value for name, value in hold_host._attributes().items()}
    expected = {"disk-gb": 500, "tpu-name": "pod-a", "tpu-topology": "v4-16", "tpu-worker-id": 1, "node-id": "n1"}
    assert expected.items() <= found.items()


def test_unneeded_runner_job_ends_at_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = Notice()
    hold(monkeypatch, Calls(held=True), notice)
    assert not notice.was_saved
