"""From Ray's node table to what the scheduler knows of a host."""

import json
from typing import Any

import pytest

from iris_ray.actors.controller import node_table
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_table import (
    READINGS,
    NodeDiff,
    NodeTable,
    failure,
    operator_attributes,
    registration,
)
from iris_ray.actors.controller.own_slices import OwnSlices
from iris_ray.model.constraints import AttributeValue
from iris_ray.model.notices import NoticeKind
from iris_ray.model.workers import TPU, TPU_NAME, TPU_PER_CHIP, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import JobRestoredEvent, WorkerDrainedEvent, WorkerFailedEvent, WorkerRegisteredEvent
from tests.support.worlds import S, World, assigned_tasks

# -- registrations ----------------------------------------------------------------------------------------------------


LABELS = {
    "ray.io/node-id": "n1",
    "ray.io/tpu-slice-name": "slice-a",
    "ray.io/tpu-worker-id": "3",
    "ray.io/tpu-topology": "2x2x4",
    "ray.io/tpu-pod-type": "v4-32",
}


def node(labels: dict[str, str] | None = None, without: str = "", chips: float = 4.0) -> dict[str, Any]:
    merged = {k: v for k, v in {**LABELS, **(labels or {})}.items() if k != without}
    resources = {"CPU": 8.0, "TPU": chips, "node:10.0.0.7": 1.0}
    return {
        "NodeID": "n1",
        "Alive": True,
        "NodeManagerAddress": "10.0.0.7",
        "Labels": merged,
        "Resources": {k: v for k, v in resources.items() if v},
    }


def register(
    one: dict[str, Any], free: dict[str, float] | None = None, draining: bool = False, ours: float = 0.0
) -> WorkerRegisteredEvent | str | None:
    """``free``: what Ray says is unclaimed on the node; None if it says nothing about the node."""
    table = NodeTable((one,), {"n1": 0} if draining else {}, {} if free is None else {"n1": free})
    return registration(one, table, ours)


def worker(*args: Any, **kwargs: Any) -> WorkerRegisteredEvent:
    event = register(*args, **kwargs)
    assert isinstance(event, WorkerRegisteredEvent)
    return event


def test_tpu_host_registers_with_attributes_and_labels() -> None:
    event = worker(node({"iris/pool": "large"}))
    assert (event.node_id, event.address, event.draining, event.foreign) == ("n1", "10.0.0.7", None, None)
    assert event.attributes[TPU_NAME] == AttributeValue("slice-a")
    assert event.attributes[TPU_WORKER_ID] == AttributeValue(3)
    assert event.attributes[TPU_TOPOLOGY] == AttributeValue("v4-32")
    assert event.attributes[TPU_VM_COUNT] == AttributeValue(4)
    assert event.attributes["ray.io/tpu-topology"] == AttributeValue("2x2x4")
    assert event.attributes["iris/pool"] == AttributeValue("large")
    assert event.resources["TPU"] == 4.0


@pytest.mark.parametrize("one", [node(chips=0.0), node(without="ray.io/tpu-slice-name")], ids=["no chips", "no slice"])
def test_host_without_slice_or_chips_is_unusable_with_reason(one: dict[str, Any]) -> None:
    assert "TPU chips" in str(register(one))
    assert "10.0.0.7" in str(register(one))


def test_node_without_tpu_registers_as_worker_of_no_slice() -> None:
    worker = register({"NodeID": "h", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}})
    assert isinstance(worker, WorkerRegisteredEvent)
    assert (worker.node_id, worker.address, worker.resources) == ("h", "10.0.0.1", {"CPU": 4.0})
    assert worker.attributes == {}


@pytest.mark.parametrize("node_id", [None, "", "x", "-1", "1.0", " ", "²"])
def test_registration_without_valid_worker_id_is_refused(node_id: str | None) -> None:
    label = "ray.io/tpu-worker-id"
    refusal = register(node(without=label) if node_id is None else node({label: node_id}))
    assert isinstance(refusal, str)
    assert "slice-a" in refusal
    assert label in refusal


@pytest.mark.parametrize("pod_type", [None, "v9-32", ""])
def test_registration_of_an_unknown_type_is_refused(pod_type: str | None) -> None:
    label = "ray.io/tpu-pod-type"
    refusal = register(node(without=label) if pod_type is None else node({label: pod_type}))
    assert isinstance(refusal, str)
    assert "slice-a" in refusal


def test_slice_size_comes_from_live_host() -> None:
    labels = {"ray.io/tpu-pod-type": "v5e-8", "ray.io/tpu-topology": "2x4"}
    assert worker(node(labels, chips=8.0)).attributes[TPU_VM_COUNT] == AttributeValue(1)
    assert worker(node(labels, chips=4.0)).attributes[TPU_VM_COUNT] == AttributeValue(2)


def test_host_with_impossible_chip_count_is_refused() -> None:
    assert isinstance(register(node(chips=16.0)), str)


@pytest.mark.parametrize(("free", "in_use"), [({"TPU": 8.0}, None), ({"TPU": 4.0}, "2 chips of host 1 are in use")])
def test_devices_counted_by_ray_are_registered_as_chips(free: dict[str, float], in_use: str | None) -> None:
    """RAY_TPU_RESOURCE_PER_CHIP=2: a host of TPU7x has four chips of two devices each."""
    labels = {"ray.io/tpu-pod-type": "v7x-16", "ray.io/tpu-topology": "2x2x2", "ray.io/tpu-worker-id": "1"}
    event = worker(node({**labels, "iris/tpu-per-chip": "7"}, chips=8.0), free)
    assert (event.resources["TPU"], event.attributes[TPU_VM_COUNT].value) == (4.0, 2)
    assert event.attributes[TPU_PER_CHIP].value == 2
    assert (event.foreign is None) if in_use is None else in_use in str(event.foreign)


def test_label_does_not_change_how_chips_are_counted() -> None:
    assert TPU_PER_CHIP not in worker(node({"iris/tpu-per-chip": "2"})).attributes


def test_host_of_sub_slice_is_not_taken_for_whole_slice() -> None:
    told = str(register(node({"ray.io/tpu-topology": "2x2x1"})))
    assert "2x2x1, which are 4 chips, and v4-32 has 16" in told
    assert "sub-slice" in told


def test_labels_of_sub_slices_are_plain_attributes() -> None:
    """Ray 2.60 numbers the parts of a slice, by their shape: this host is still one of the whole slice."""
    event = worker(node({"ray.io/tpu-subslice-2x2x2": "1"}))
    assert event.attributes["ray.io/tpu-subslice-2x2x2"] == AttributeValue("1")
    assert (event.attributes[TPU_NAME].value, event.attributes[TPU_VM_COUNT].value) == ("slice-a", 4)


def test_draining_host_registers_as_draining() -> None:
    assert worker(node(), draining=True).draining


@pytest.mark.parametrize(
    ("free", "ours", "in_use"),
    [
        ({"TPU": 4.0, "CPU": 8.0}, 0.0, False),
        ({"TPU": 1.0, "CPU": 8.0}, 0.0, True),
        ({"TPU": 0.0, "CPU": 8.0}, 0.0, True),
        ({"CPU": 8.0}, 0.0, True),  # Ray leaves out what is used up
        ({"CPU": 8.0}, 4.0, False),
        ({"TPU": 0.0}, 4.0, False),
        (None, 0.0, False),  # a node that has just joined
    ],
)
def test_registration_tells_chips_in_foreign_use(free: dict[str, float] | None, ours: float, in_use: bool) -> None:
    assert (worker(node(), free, ours=ours).foreign is not None) is in_use


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("large-jobs", "large-jobs"),
        ("500", 500),
        ("1.5", 1.5),
        ("-3", -3),
        ("true", True),
        ("false", False),
        ("True", "True"),
        ("007", "007"),
        ("v4-32", "v4-32"),
        ("1e3", "1e3"),
        ("nan", "nan"),
        ("", ""),
    ],
)
def test_operator_label_becomes_typed_attribute_of_short_name(text: str, value: str | int | float | bool) -> None:
    attribute = worker(node({"iris/tpu-pool": text})).attributes["tpu-pool"]
    assert attribute == AttributeValue(value)
    assert type(attribute.value) is type(value)


@pytest.mark.parametrize("text", ["true", "false", "", "soon"])
def test_taint_label_sets_taint_whatever_its_value(text: str) -> None:
    attributes = worker(node({"iris/taint.maintenance": text})).attributes
    assert "taint:maintenance" in attributes
    assert "taint.maintenance" not in attributes


def test_taint_label_keeps_rest_of_its_name() -> None:
    assert "taint:spot.eu-west" in worker(node({"iris/taint.spot.eu-west": "true"})).attributes


@pytest.mark.parametrize("name", ["taint.maintenance", "other/taint.maintenance", "iris/tainted", "iris.taint.x"])
def test_label_resembling_a_taint_sets_none(name: str) -> None:
    assert not [key for key in worker(node({name: "true"})).attributes if key.startswith("taint:")]


@pytest.mark.parametrize("text", ["12", "true", "text", ""])
def test_plain_labels_are_text_attributes_of_same_name(text: str) -> None:
    """Those of the operator, too."""
    attributes = worker(node({"market-type": text, "example.com/rack": text, "iris/disk": text})).attributes
    for name in ("market-type", "example.com/rack", "iris/disk"):
        assert attributes[name] == AttributeValue(text)
    assert attributes["ray.io/tpu-worker-id"] == AttributeValue("3")


@pytest.mark.parametrize("prefix", ["", "iris/"])
def test_label_does_not_override_reported_slice_attributes(prefix: str) -> None:
    names = (TPU_NAME, TPU_WORKER_ID, TPU_TOPOLOGY, TPU_VM_COUNT)
    plain, labelled = worker(node()), worker(node({f"{prefix}{name}": "0" for name in names}))
    assert {name: labelled.attributes[name] for name in names} == {name: plain.attributes[name] for name in names}
    assert labelled.resources == plain.resources


def test_operator_label_wins_over_plain_label_of_same_name() -> None:
    for labels in ({"pool": "a", "iris/pool": "b"}, {"iris/pool": "b", "pool": "a"}):
        assert operator_attributes(labels)["pool"] == AttributeValue("b")


def test_worker_failure_carries_rays_reason_if_there_is_one() -> None:
    assert "health check" in failure({"NodeID": "n1", "DeathReasonMessage": "health check failed"}).reason
    assert failure({"NodeID": "n1", "DeathReasonMessage": None}).reason
    assert len(failure({"NodeID": "n1", "DeathReasonMessage": "x" * 9999}).reason) < 300


# -- lost hosts, by comparing readings --------------------------------------------------------------------------------


def plain_node(node_id: str, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": node_id, "Alive": alive, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}}


class Looks:
    """What the Controller sees in Ray's node table, look by look."""

    def __init__(self) -> None:
        self.state = ControllerState()
        self.own_slices = OwnSlices()
        self.nodes = NodeDiff(self.state, Clock(), self.own_slices)

    def look(self, *nodes: dict[str, Any]) -> list[str]:
        """Return the reasons of the losses that it finds."""
        events = self.nodes.events_of(NodeTable(nodes, {}, {}))
        apply_all(self.state, events)
        self.state.check()
        return [event.reason for event in events if isinstance(event, WorkerFailedEvent)]

    @property
    def hosts(self) -> list[str]:
        return sorted(self.state.workers)


@pytest.fixture
def looks() -> Looks:
    looks = Looks()
    looks.look(plain_node("a"), plain_node("b"))
    assert looks.hosts == ["a", "b"]
    return looks


def test_host_missing_in_two_readings_is_lost(looks: Looks) -> None:
    """Ray forgets dead nodes when there are too many of them."""
    assert looks.look(plain_node("a")) == []
    assert looks.hosts == ["a", "b"]
    (reason,) = looks.look(plain_node("a"))
    assert "missing in Ray's node table" in reason
    assert looks.hosts == ["a"]
    assert looks.look(plain_node("a")) == []
    assert looks.nodes.evidence(["b"])["b"].lost == reason


def test_host_missing_in_one_reading_is_kept(looks: Looks) -> None:
    for _ in range(3):
        assert looks.look(plain_node("a")) == []
        assert looks.look(plain_node("a"), plain_node("b")) == []
    assert looks.hosts == ["a", "b"]


@pytest.mark.parametrize("empty", [(), (plain_node("a", alive=False),)], ids=["no node", "no live node"])
def test_reading_without_live_nodes_is_ignored(looks: Looks, empty: tuple[dict[str, Any], ...]) -> None:
    for _ in range(3):
        looks.look(*empty)
    assert "b" in looks.hosts
    assert looks.look(plain_node("c")) == []
    assert looks.hosts[-2:] == ["b", "c"]


def test_missing_drained_host_was_preempted(looks: Looks) -> None:
    looks.state.handle_event(WorkerDrainedEvent("b", "spot"))
    looks.look(plain_node("a"))
    (reason,) = looks.look(plain_node("a"))
    assert reason.endswith("; spot")
    assert looks.nodes.evidence(["b"])["b"].draining == "spot"


def test_missing_host_that_returns_is_registered_again(looks: Looks) -> None:
    for _ in range(2):
        looks.look(plain_node("a"))
    assert looks.hosts == ["a"]
    looks.look(plain_node("a"), plain_node("b"))
    assert looks.hosts == ["a", "b"]
    assert looks.nodes.evidence(["b"])["b"].lost is None


def test_notices_of_hosts_that_never_join_are_forgotten(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_table, "GONE_HOSTS_KEPT", 10)
    for number in range(100):
        looks.nodes.note_drains([WorkerDrainedEvent(f"odd-{number}", "it goes", NoticeKind.PREEMPTION, 1.0)])
    known = looks.nodes.evidence(f"odd-{number}" for number in range(100))
    assert [node_id for node_id, evidence in known.items() if evidence.draining] == [f"odd-{n}" for n in range(90, 100)]


# -- hosts that are a slice each --------------------------------------------------------------------------------------


def single_host(node_id: str, slice_name: str | None, number: str | None, alive: bool = True) -> dict[str, Any]:
    """A host as Ray shows it on GKE: the webhook has set its slice's name and its number."""
    labels = {"ray.io/tpu-pod-type": "v6e-8"}
    labels |= {"ray.io/tpu-slice-name": slice_name} if slice_name is not None else {}
    labels |= {"ray.io/tpu-worker-id": number} if number is not None else {}
    one = node({}, chips=8.0)
    return {**one, "NodeID": node_id, "Alive": alive, "Labels": labels}


def slices_of(looks: Looks) -> dict[str, str | None]:
    """The slice of each host; each is whole, and its host is number 0."""
    grouping = looks.state.fleet.grouping(TPU_NAME)
    assert not [group.defect for group in grouping.groups() if group.defect]
    assert {worker.host_index for worker in looks.state.workers.values()} == {0}
    assert not looks.nodes.unusable
    return {node_id: worker.slice_name for node_id, worker in looks.state.workers.items()}


def test_single_host_misnumbered_by_webhook_is_own_slice() -> None:
    """Three replicas; the first one is lost, and the webhook gives its successor the place after the last one."""
    looks = Looks()
    hosts = [single_host(f"host-{i}", f"v6e-8-{i}", "0") for i in range(3)]
    looks.look(*hosts)
    looks.look(single_host("host-0", "v6e-8-0", "0", alive=False), *hosts[1:])
    looks.look(*hosts[1:], single_host("successor", "v6e-8-2", "1"))
    assert slices_of(looks) == {"host-1": "v6e-8-1", "host-2": "v6e-8-2", "successor": "v6e-8-2-successo"}
    assert looks.nodes.slices_of(["host-0", "successor"]) == {"host-0": "v6e-8-0", "successor": "v6e-8-2-successo"}


def test_single_hosts_of_one_name_and_number_keep_their_own_slices() -> None:
    looks = Looks()
    looks.look(single_host("a", "my-tpu", "0"), single_host("b", "my-tpu", "0"))
    assert slices_of(looks) == {"a": "my-tpu", "b": "my-tpu-b"}
    looks.look(
        single_host("a", "my-tpu", "0", alive=False), {**single_host("b", "my-tpu", "0"), "Resources": {"TPU": 8}}
    )
    assert slices_of(looks) == {"b": "my-tpu-b"}  # though the name is free
    looks.look({**single_host("b", "my-tpu", "0")}, single_host("c", "my-tpu", "0"))
    assert slices_of(looks) == {"b": "my-tpu-b", "c": "my-tpu"}


def test_single_hosts_sharing_name_keep_slices_under_new_controller() -> None:
    """Ray may list them in another order, and one more may have come meanwhile; one that has gone frees its name."""
    hosts = [single_host(node_id, "my-tpu", "0") for node_id in "abc"]
    looks = Looks()
    looks.look(*hosts[:2], single_host("d", "another", "0"))
    assert json.loads(looks.own_slices.to_json()) == {"a": "my-tpu", "b": "my-tpu-b"}
    successor = Looks()
    successor.own_slices.restore(looks.own_slices.to_json())
    successor.look(*reversed(hosts))
    assert slices_of(successor) == {"a": "my-tpu", "b": "my-tpu-b", "c": "my-tpu-c"}
    third = Looks()
    third.own_slices.restore(successor.own_slices.to_json())
    for _ in range(2):
        third.look(*hosts[1:])
    third.look(*hosts[1:], single_host("e", "my-tpu", "0"))
    assert slices_of(third) == {"b": "my-tpu-b", "c": "my-tpu-c", "e": "my-tpu"}


@pytest.mark.parametrize("number", [None, "0", "odd"])
def test_single_host_without_slice_name_is_its_own_slice(number: str | None) -> None:
    looks = Looks()
    looks.look(single_host("a", None, number))
    assert slices_of(looks) == {"a": "v6e-8-a"}


def test_host_of_several_without_slice_name_stays_refused() -> None:
    labels = {"ray.io/tpu-pod-type": "v6e-8"}  # of four chips: one of two hosts
    assert "lacks the label ray.io/tpu-slice-name" in str(register({**node(chips=4.0), "Labels": labels}))


# -- CPUs and memory in foreign use -----------------------------------------------------------------------------------


ALL = {"CPU": 8.0, "memory": 100.0, "node:10.0.0.1": 1.0, "object_store_memory": 50.0}


class Cluster:
    """Ray's tables on paper, and the state that reads them."""

    def __init__(self, *node_ids: str) -> None:
        self.world = World()
        self.diff = NodeDiff(self.world.state, Clock())
        self.available = {node_id: dict(ALL) for node_id in node_ids}
        self.totals = {node_id: dict(ALL) for node_id in node_ids}
        self.labels: dict[str, dict[str, str]] = {node_id: {} for node_id in node_ids}

    def read(self, times: int = 1) -> int:
        """How many events that brings."""
        events = 0
        for _ in range(times):
            nodes: tuple[dict[str, Any], ...] = tuple(
                {
                    "NodeID": node_id,
                    "Alive": True,
                    "NodeManagerAddress": "10.0.0.1",
                    "Labels": self.labels[node_id],
                    "Resources": dict(totals),
                }
                for node_id, totals in self.totals.items()
            )
            available = {node_id: dict(free) for node_id, free in self.available.items()}
            for event in self.diff.events_of(NodeTable(nodes, {}, available)):
                self.world.do(event)
                events += 1
        self.world.check()
        return events

    def use(self, node_id: str, cpus: float) -> None:
        """So many CPUs are claimed in all."""
        self.available[node_id]["CPU"] = 8.0 - cpus
        if cpus == 8.0:
            del self.available[node_id]["CPU"]  # as Ray does

    def elsewhere(self, node_id: str) -> dict[str, float]:
        return dict(self.world.state.workers[node_id].elsewhere)


@pytest.fixture
def tables() -> Cluster:
    return Cluster("a", "b")


def test_task_goes_where_foreign_work_leaves_room(tables: Cluster) -> None:
    """And to the host that comes first by all other rules if it is free again."""
    tables.use("a", 8.0)
    tables.read()
    job = tables.world.submit_tasks(replicas=3, resources={"CPU": 1.0})
    tables.world.schedule()
    assert [task.node_id for task in job.tasks] == ["b", "b", "b"]


def test_job_waits_for_room_in_foreign_use_and_says_so(tables: Cluster) -> None:
    for node_id in ("a", "b"):
        tables.use(node_id, 8.0)
    tables.read()
    tables.world.submit_tasks(replicas=1, resources={"CPU": 4.0})
    assert "in use by work outside iris_ray" in tables.world.why()
    tables.use("b", 3.0)
    tables.read(READINGS)
    assert [task.node_id for task in assigned_tasks(tables.world.plan())] == ["b"]


def test_foreign_memory_and_fractional_cpu_count_as_use(tables: Cluster) -> None:
    tables.available["a"] = {"CPU": 7.5, "memory": 30.0, "node:10.0.0.1": 0.9}
    tables.read()
    assert tables.elsewhere("a") == {"CPU": 0.5, "memory": 70.0}
    assert tables.world.state.workers["a"].free["memory"] == 30.0


def test_own_reservations_are_not_counted_as_foreign_use(tables: Cluster) -> None:
    tables.read()
    world = tables.world
    job = world.submit_tasks(replicas=2, resources={"CPU": 3.0}, task_placement="pack")
    world.schedule()
    assert {task.node_id for task in job.tasks} == {"a"}
    tables.use("a", 6.0)  # its reservations are there
    tables.read(2 * READINGS)
    for index in range(2):
        world.report(job, S.RUNNING, index)
    tables.read(2 * READINGS)
    assert tables.elsewhere("a") == {}
    tables.use("a", 7.0)
    tables.read(READINGS)
    assert tables.elsewhere("a") == {"CPU": 1.0}
    assert world.state.workers["a"].free["CPU"] == 1.0


def test_reservation_outlasting_its_task_briefly_is_not_foreign_use(tables: Cluster) -> None:
    tables.read()
    world = tables.world
    job = world.start_tasks(replicas=1, resources={"CPU": 8.0})
    tables.use("a", 8.0)
    tables.read(READINGS)
    world.finish(job)
    assert tables.read(READINGS - 1) == 0
    tables.use("a", 0.0)
    assert tables.read(2 * READINGS) == 0
    assert tables.elsewhere("a") == {}


def test_steady_part_of_fluctuating_use_counts_and_rarely_reregisters(tables: Cluster) -> None:
    tables.read()
    events = 0
    for number in range(10 * READINGS):
        tables.use("a", 4.0 + number % 3)
        events += tables.read()
    assert tables.elsewhere("a") == {"CPU": 4.0}
    assert events <= 10


def test_warm_slices_show_no_foreign_use() -> None:
    cluster = Cluster("a-0")
    cluster.totals["a-0"][TPU] = cluster.available["a-0"][TPU] = 4.0
    cluster.labels["a-0"] = {
        "ray.io/tpu-slice-name": "a", "ray.io/tpu-worker-id": "0", "ray.io/tpu-pod-type": "v4-8"
    }  # fmt: skip
    cluster.read()
    world = cluster.world
    job = world.start(tpu_type="v4-8", resources={"TPU": 4.0, "CPU": 6.0})
    cluster.available["a-0"] = {"CPU": 1.0, "memory": 100.0}
    cluster.read(READINGS)
    assert cluster.elsewhere("a-0") == {"CPU": 1.0}
    world.finish(job)
    assert "a" in world.state.holders
    cluster.read(2 * READINGS)
    assert cluster.elsewhere("a-0") == {"CPU": 1.0}


def test_successor_soon_knows_own_reservations(tables: Cluster) -> None:
    """A Controller that comes back reads the hosts first and the jobs then."""
    tables.read()
    job = tables.world.start_tasks(replicas=1, resources={"CPU": 8.0})
    record = tables.world.state.record("job")
    assert record is not None
    successor = Cluster("a", "b")
    successor.use(job.tasks[0].node_id or "", 8.0)
    successor.read()
    assert successor.elsewhere("a") == {"CPU": 8.0}
    successor.world.do(JobRestoredEvent(record))
    successor.read()
    assert successor.elsewhere("a") == {}
