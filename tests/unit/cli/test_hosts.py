"""``iris-ray host ls``, ``drain``, ``taint``, ``give-notice`` and others: what they do to the real Controller."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from iris_ray.actors.calls import ray_internals
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL
from iris_ray.actors.host import announced_end
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.actors.protocol.version import PROTOCOL_VERSION
from iris_ray.cli import give_notice
from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.cli.give_notice import LocalNode
from iris_ray.errors import ControllerUnavailableError
from iris_ray.model.notices import HostNotice, NoticeKind
from iris_ray.model.workers import SUB_SLICE, TOPOLOGY_LABEL
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until


def test_drained_slice_takes_no_jobs_until_undrained(world: ControllerInProcess) -> None:
    assert "2 hosts" in world.iris("host", "drain", "v4-16-1", "--reason", "a fan").stdout
    world.iris("host", "drain", "v4-16-2/0", "big")
    states = {view["slice"]: (view["state"], view["reason"]) for view in world.json("host", "ls")}
    assert states["v4-16-1"] == ("CLOSED", "drained (a fan)")
    assert states["v4-16-2"] == ("CLOSED", "host 0: big (by ann)")
    hosts = {view["slice"]: [host["node_id"] for host in view["hosts"]] for view in world.json("host", "ls")}
    both = world.json("host", "drain", "v4-16-2", "large")
    assert both == {"target": "v4-16-2", "taint": "large", "hosts": sorted(hosts["v4-16-2"]), "jobs_still_there": []}
    lifted = world.json("host", "undrain", "v4-16-2", "large")
    assert lifted["still_closed"] == {hosts["v4-16-2"][0]: "big (by ann)"}
    assert world.json("host", "drain", "v4-16-1", "--reason", "a fan")["taint"] == "drained"
    assert world.json("host", "undrain", "v4-16-1")["hosts"] == sorted(hosts["v4-16-1"])
    world.iris("host", "undrain", "v4-16-2/0", "big")
    assert {view["state"] for view in world.json("host", "ls")} == {"FREE"}
    assert "did you mean" in world.iris("host", "drain", "v4-16-7", code=USAGE).stderr


def test_removing_missing_taint_says_where_it_is(world: ControllerInProcess) -> None:
    nowhere = world.iris("host", "undrain", "v4-16-1", code=USAGE).stderr
    assert "there is no taint drained on 'v4-16-1', and none on any other host or slice" in nowhere
    world.iris("host", "drain", "v4-16-2")
    assert "did you mean v4-16-2?" in world.iris("host", "undrain", "v4-16-1", code=USAGE).stderr


def states(world: ControllerInProcess) -> dict[str, tuple[str, str | None]]:
    return {view["slice"]: (view["state"], view["reason"]) for view in world.json("host", "ls")}


def test_drain_names_staying_jobs_and_keeps_others_out(world: ControllerInProcess) -> None:
    job = world.start("train", slices=(3,))
    drained = world.iris("host", "drain", "v4-16-1", "--reason", "a fan", user="olga").stdout
    assert f"still there until they end: {job}" in drained
    busy = {view["slice"]: view["jobs"] for view in world.json("host", "ls") if view["state"] == "BUSY"}
    assert busy == {f"v4-16-{number}": [job] for number in range(3)}
    world.succeed(job)
    wait_until(lambda: states(world)["v4-16-0"] == ("FREE", None))  # its pool releases the slices
    assert states(world)["v4-16-1"] == ("CLOSED", "drained (a fan)")
    waits = world.submit("eval", slices=(3,))
    assert "drained (a fan)" in world.iris("why", waits, user="bob").stdout
    world.iris("host", "undrain", "v4-16-1", user="olga")
    assert world.json("job", "status", waits)["groups"] == ["v4-16-0", "v4-16-1", "v4-16-2"]


def test_taints_outlast_the_controller(world: ControllerInProcess) -> None:
    world.iris("host", "drain", "v4-16-1", "--reason", "a fan")
    world.iris("cluster", "controller", "upgrade")
    states = {view["slice"]: view["reason"] for view in world.json("host", "ls")}
    assert states["v4-16-1"] == "drained (a fan)"


def test_workers_lists_one_slice_and_suggests_nearest_name(world: ControllerInProcess) -> None:
    job = world.start("train")
    shown = world.iris("host", "ls", "v4-16-0").stdout
    assert shown.count(job) == 2
    assert world.node_id("v4-16-0", 1)[:12] in shown
    assert "v4-16-1" not in shown
    assert "did you mean v4-16-0" in world.iris("host", "ls", "v4-160", code=USAGE).stderr


def test_hosts_of_incomplete_slice_say_what_it_lacks(world: ControllerInProcess) -> None:
    world.remove_node(world.node_id("v4-16-1", 1))
    wait_until(lambda: states(world)["v4-16-1"] == ("INCOMPLETE", "host 1 of 2 is missing"))
    for command in (["host", "ls"], ["host", "ls", "--hosts"], ["host", "ls", "v4-16-1"]):
        assert world.iris(*command).stdout.count("host 1 of 2 is missing") == 1


def test_unusable_hosts_are_shown_with_reason(world: ControllerInProcess) -> None:
    for number, (what, labels, resources) in enumerate(
        (
            ("unlabelled", {}, {"TPU": 4.0}),
            ("without a number", {SLICE_NAME_LABEL: "odd", POD_TYPE_LABEL: "v4-16"}, {"TPU": 4.0}),
            ("of no type", {SLICE_NAME_LABEL: "odder", WORKER_ID_LABEL: "0", POD_TYPE_LABEL: "v99"}, {"TPU": 4.0}),
            ("without chips", {SLICE_NAME_LABEL: "oddest", WORKER_ID_LABEL: "0", POD_TYPE_LABEL: "v4-8"}, {"CPU": 8.0}),
        )
    ):
        world.add_node(what, f"10.9.0.{number}", resources, labels)
    wait_until(lambda: "oddest" in states(world))
    found = states(world)
    assert found["10.9.0.0"] == ("CLOSED", "host 10.9.0.0 has TPU chips but lacks the label ray.io/tpu-slice-name")
    assert found["odd"][0] == found["odder"][0] == found["oddest"][0] == "INCOMPLETE"
    assert "has no usable ray.io/tpu-worker-id" in str(found["odd"][1])
    assert "v99" in str(found["odder"][1])
    assert "host 10.9.0.3 of oddest has no TPU chips that Ray knows of" in str(found["oddest"][1])
    assert "lacks the label ray.io/tpu-slice-name" in world.iris("host", "ls", "--hosts").stdout
    world.succeed(world.start("train", slices=(3,)))
    world.remove_node("unlabelled")
    wait_until(lambda: "10.9.0.0" not in states(world))


def test_sub_slices_are_shown_and_never_taken_for_slices(world: ControllerInProcess) -> None:
    of_part = {POD_TYPE_LABEL: "v6e-16", TOPOLOGY_LABEL: "2x4"}
    world.add_node("part", "10.9.0.1", {"TPU": 4.0}, {SLICE_NAME_LABEL: "part", WORKER_ID_LABEL: "0", **of_part})
    numbered = {SLICE_NAME_LABEL: "numbered", WORKER_ID_LABEL: "0", POD_TYPE_LABEL: "v6e-4", f"{SUB_SLICE}2x2": "3"}
    world.add_node("numbered", "10.9.0.2", {"TPU": 4.0}, numbered)
    wait_until(lambda: "numbered" in states(world))
    assert "2x4, which are 8 chips, and v6e-16 has 16" in str(states(world)["part"][1])
    assert "in Ray's sub-slices 2x2 #3" in world.iris("host", "ls", "numbered").stdout
    world.remove_node("part")
    world.remove_node("numbered")
    wait_until(lambda: "part" not in states(world))


def test_notice_waits_for_tasks_and_names_staying_jobs(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ray_internals, "announce_end", lambda node_id, *_: told.append(node_id))
    job = world.start("train")
    late = world.iris("host", "give-notice", "v4-16-0", "--in", "1", code=FAILED).stdout
    assert late.splitlines() == [f"1 job must leave within 1 s: {job}", f"still there: {job}"]
    assert told == [world.node_id("v4-16-0", 0), world.node_id("v4-16-0", 1)]
    assert "no job has tasks there" in world.iris("host", "give-notice", "v4-16-1/1").stdout
    assert told[2:] == [world.node_id("v4-16-1", 1)]


def test_notice_waits_through_a_restart_of_the_controller() -> None:
    answers: Iterator[Any] = iter([["train"], ControllerUnavailableError("it starts"), []])

    def jobs() -> list[str]:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return list(answer)

    assert give_notice._wait(jobs, time.time() + 30.0, 30) == []


def test_only_operators_give_notice_to_other_hosts(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(ray_internals, "announce_end", lambda node_id, *_: told.append(node_id))
    world.iris("cluster", "settings", "set", "operators=olga", user="olga")
    refused = world.iris("host", "give-notice", "v4-16-1/1", user="bob", code=FAILED)
    assert "only operators may give notice to hosts, and bob is not an operator" in refused.stderr
    assert told == []
    world.iris("host", "give-notice", "v4-16-1/1", user="olga")
    assert told == [world.node_id("v4-16-1", 1)]


def test_notice_refused_by_ray_is_a_failure(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_internals, "announce_end", lambda *_: "it hangs")
    refused = world.iris("host", "give-notice", "v4-16-1/1", code=FAILED)
    assert "v4-16-1, host 1 can't be drained: it hangs" in refused.stderr


@pytest.fixture
def this_machine(bare_cluster: ControllerInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalNode:
    """Host 0 of v4-16-0, as the machine that the command runs on. Ray takes every drain."""
    node = LocalNode(bare_cluster.node_id("v4-16-0", 0), "10.0.0.1:6379", tmp_path / "here", takes_jobs=True)
    (tmp_path / "here" / "tasks").mkdir(parents=True)
    monkeypatch.setattr(give_notice, "local_nodes", lambda: iter([node]))
    monkeypatch.setattr(ray_internals, "announce_end", lambda *_: None)
    return node


def begin_task(node: LocalNode) -> Path:
    """Have a task run there, in this process; return its mark."""
    assert node.directory is not None
    files = TaskFiles.of_process(node.directory, os.getpid())
    StartedTask("train", 0, 1, 2, "train").write(files)
    return files.started


def has_no_controller(_: ControllerInProcess) -> None:
    pass


def has_controller_of_another_protocol(cluster: ControllerInProcess) -> None:
    cluster.makes_controller = lambda: cluster.controller_of("9.9.9", PROTOCOL_VERSION + 1)
    cluster.start_controller()


def has_frozen_controller(cluster: ControllerInProcess) -> None:
    cluster.start_controller()
    cluster.freeze_controller()


@pytest.mark.parametrize("so", [has_no_controller, has_controller_of_another_protocol, has_frozen_controller])
def test_notice_here_needs_no_controller(
    bare_cluster: ControllerInProcess,
    this_machine: LocalNode,
    so: Callable[[ControllerInProcess], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drained: list[object] = []
    monkeypatch.setattr(ray_internals, "announce_end", lambda *told: drained.append(told))
    so(bare_cluster)
    mark = begin_task(this_machine)
    said = bare_cluster.iris("host", "give-notice", "here", "--in", "1", "--reason", "it ends", code=FAILED).stdout
    assert said.splitlines() == ["1 job must leave within 1 s: train", "still there: train"]
    (node_id, reason, deadline, gcs_address) = cast(tuple[str, str, float, str], drained.pop())
    assert (node_id, reason, gcs_address) == (this_machine.node_id, "it ends", "10.0.0.1:6379")
    assert this_machine.directory is not None
    heard = announced_end.announced(this_machine.directory, this_machine.node_id)
    assert heard == HostNotice(NoticeKind.PREEMPTION, "it ends", deadline)

    with bare_cluster.meanwhile(mark.unlink):
        left = bare_cluster.iris("host", "give-notice", "here", "--in", "30").stdout
    assert left.splitlines()[-1] in ("all tasks have left", "no job has tasks there; no new ones will start")


def test_notice_here_asks_controller_of_large_fleet_nothing(
    bare_cluster: ControllerInProcess, this_machine: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 4,000 hosts would be 1.4 MB an answer, and each host of a slice that ends would ask twice a second."""
    asked: list[str] = []
    bare_cluster.start_controller()
    monkeypatch.setattr(ControllerConnection, "ask", lambda _, question, *__: asked.append(question.__name__))
    begin_task(this_machine)
    bare_cluster.iris("host", "give-notice", "here", "--in", "2", code=FAILED)
    assert asked == []


def test_notice_here_tells_tasks_even_if_ray_does_not_answer(
    bare_cluster: ControllerInProcess, this_machine: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_internals, "announce_end", lambda *_: time.sleep(60.0))
    failed = bare_cluster.iris("host", "give-notice", "here", "--in", "1", code=FAILED)
    assert "this machine can't be drained: Ray does not answer" in failed.stderr
    assert this_machine.directory is not None
    assert announced_end.announced(this_machine.directory, this_machine.node_id) is not None


def test_notice_here_where_ray_is_another_users_waits(
    bare_cluster: ControllerInProcess, this_machine: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(give_notice, "local_nodes", lambda: iter([replace(this_machine, directory=None)]))
    began = time.monotonic()
    done = bare_cluster.iris("host", "give-notice", "here", "--in", "1", code=FAILED)
    assert "the tasks here can't be seen" in done.stderr
    assert time.monotonic() - began > 0.9


@pytest.mark.parametrize(
    ("nodes", "said"), [(0, "no Ray node runs on this machine"), (2, "2 Ray nodes run on this machine")]
)
def test_notice_here_needs_one_node_of_ray(
    bare_cluster: ControllerInProcess, this_machine: LocalNode, nodes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(give_notice, "local_nodes", lambda: iter([this_machine] * nodes))
    assert said in bare_cluster.iris("host", "give-notice", "here", code=USAGE).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["v4-160"], "did you mean"),
        (["v4-16-0/7"], "there is no host 'v4-16-0/7'; did you mean v4-16-0/"),
        ([], "Missing argument"),
        (["x" * 100_000], "there is no"),
        (["v4-16-1", "--in", "0"], "give at least 1s"),
        (["v4-16-1", "--in", "nan"], "is not a duration"),
    ],
)
def test_notice_without_target_or_time_is_refused(world: ControllerInProcess, arguments: list[str], said: str) -> None:
    assert said in world.iris("host", "give-notice", *arguments, code=USAGE).stderr


def test_unknown_host_is_told_the_names_of_slices(world: ControllerInProcess) -> None:
    """Node ids are long, and are only suggested for something like one."""
    refused = world.iris("host", "drain", "nope", code=USAGE).stderr
    assert refused == "iris-ray: there is no host or slice 'nope'; there are v4-16-0, v4-16-1, v4-16-2\n"
    node_id = world.json("host", "drain", "v4-16-2")["hosts"][0]
    assert f"did you mean {node_id}" in world.iris("host", "drain", f"0{node_id[2:]}", code=USAGE).stderr
