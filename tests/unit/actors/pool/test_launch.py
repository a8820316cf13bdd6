"""What each host of an attempt is told to run."""

import pickle
from dataclasses import replace

import pytest

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.launch import launch_plan
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace, ProcessSpec, RunRequest
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.outcomes import TaskKey
from iris_ray.model.parts import part_attribute
from tests.support.worlds import gang_spec, tasks_spec

FIRST_PORTS = ("a", 1000), ("b", 2000)
PORTS = {name: [(1001, 1002, 1003, 1004)] for name in ("a", "job/task-0", "job/task-3")}


def request(spec: JobSpec) -> RunRequest:
    return RunRequest(spec, b"function", {"A": "1"}, ProcessSpec(), 60.0)


def place(attempt: AttemptId, *names: str, hosts: int = 2, chips: bool = True) -> AttemptPlace:
    slices = tuple(
        tuple(HostPlace(f"{name}-{i}", f"10.0.{number}.{i}", name, i) for i in range(hosts))
        for number, name in enumerate(names)
    )
    return AttemptPlace(AttemptOrder(attempt, slices, {"TPU": 4.0} if chips else {"CPU": 1.0}, 1, 1))


def test_tasks_of_a_gang_are_numbered_slice_by_slice() -> None:
    launches = launch_plan(request(gang_spec("job")), place(AttemptId("job", 3), "a", "b"), PORTS)
    assert {name: [launch.info.task_index for launch in of_slice] for name, of_slice in launches.items()} == {
        "a": [0, 1],
        "b": [2, 3],
    }
    last = launches["b"][1].info
    assert (last.task_id, last.slice_id, last.worker_id, last.slice_name) == ("job/task-3", 1, 1, "b")
    assert (last.num_tasks, last.num_slices, last.attempt) == (4, 2, 3)


def test_task_knows_which_one_ran_on_its_host_before() -> None:
    order = replace(place(AttemptId("job", 3), "a", "b").order, previous_indices={"b-0": 0, "b-1": 1})
    of_two = AttemptPlace(replace(order, processes_per_host=2))
    assert [of_two.previous_rank(key) for key in of_two.tasks()] == [None] * 4 + [0, 1, 2, 3]
    launches = launch_plan(request(gang_spec("job")), AttemptPlace(order), PORTS)
    before = {name: [launch.info.previous_task_index for launch in of_slice] for name, of_slice in launches.items()}
    assert before == {"a": [None, None], "b": [0, 1]}


def test_tasks_share_first_hosts_address_with_own_ports() -> None:
    launches = launch_plan(request(gang_spec("job")), place(AttemptId("job", 1), "a", "b"), PORTS)
    for slice_id, of_slice in enumerate(launches.values()):
        for launch in of_slice:
            assert launch.info.coordinator_address == "10.0.0.0:1003"
            megascale = launch.multislice.to_env()
            assert megascale["MEGASCALE_COORDINATOR_ADDRESS"] == "10.0.0.0:1001"
            assert megascale["MEGASCALE_SLICE_ID"] == str(slice_id)


def test_rack_tasks_are_numbered_by_rack_without_slice_variables() -> None:
    spec = tasks_spec("job", 2, coscheduling=CoschedulingConfig("rack", 2), resources={"CPU": 1.0})
    where = place(AttemptId("job", 1), "job/task-0", "job/task-2", chips=False)
    launches = [launch for group in launch_plan(request(spec), where, PORTS).values() for launch in group]
    assert [(launch.info.slice_id, launch.info.worker_id) for launch in launches] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(launch.info.num_tasks, launch.info.num_slices, launch.info.slice_name) for launch in launches} == {
        (4, 2, "")
    }
    assert not any(launch.multislice.to_env() for launch in launches)
    assert launches[3].label == f"{spec.name} task=3"
    assert where.in_words(TaskKey(1, 1)) == "task 3 on 10.0.1.1"
    assert str(where) == "10.0.0.0, 10.0.0.1, 10.0.1.0, 10.0.1.1 (4 hosts)"


def test_each_process_of_a_host_has_own_rank_and_ports() -> None:
    spec = gang_spec("job", processes_per_host=2)
    slices = place(AttemptId("job", 3), "a", "b").order.slices
    order = AttemptOrder(AttemptId("job", 3), slices, {"TPU": 4.0}, 1, 1, None, 2, ("2x2x2", ""))
    ports = {name: [tuple(range(first + 10 * i, first + 10 * i + 4)) for i in range(4)] for name, first in FIRST_PORTS}
    launches = launch_plan(request(spec), AttemptPlace(order), ports)
    infos = [launch.info for of_slice in launches.values() for launch in of_slice]
    assert [info.task_index for info in infos] == [*range(8)]
    assert [(info.worker_id, info.local_index) for info in infos[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {(info.num_tasks, info.processes_per_host, info.coordinator_address) for info in infos} == {
        (8, 2, "10.0.0.0:1002")
    }
    last = launches["b"][3]
    assert last.tpu_process is not None
    assert (last.tpu_process.index, last.tpu_process.topology) == (3, "2x2x2")
    assert last.tpu_process.addresses == ("10.0.1.0:2003", "10.0.1.0:2013", "10.0.1.1:2023", "10.0.1.1:2033")
    megascale = last.multislice.to_env()
    assert (megascale["MEGASCALE_COORDINATOR_ADDRESS"], megascale["MEGASCALE_PORT"]) == ("10.0.0.0:1000", "2030")
    assert launches["a"][0].multislice.to_env()["MEGASCALE_PORT"] == "1000", "where the others look for it"
    assert last.label == f"{spec.name} slice=1 worker=1 process=1"
    assert AttemptPlace(order).in_words(TaskKey(1, 1, 1)) == "slice 1 (b) worker 1 process 1"


def environments_on_part(per_host: int = 1) -> list[dict[str, str]]:
    """Return the variables of the processes on a 2x4 part of a v6e-16."""
    part = CoschedulingConfig(part_attribute("2x4"))
    spec = gang_spec("job", "v6e-16", replicas=2, coscheduling=part, processes_per_host=per_host)
    hosts = tuple(HostPlace(f"n-{i}", f"10.0.0.{i}", "a:2x4:1", number) for number, i in enumerate((1, 3)))
    order = AttemptOrder(AttemptId("job", 1), (hosts,), {"TPU": 4.0}, 1, 1, None, per_host, ("4x4",))
    ports = {"a:2x4:1": [(1000, 1001, 1002, 1003 + 10 * i) for i in range(2 * per_host)]}
    launches = launch_plan(request(spec), AttemptPlace(order), ports)["a:2x4:1"]
    return [launch.tpu_process.to_env() for launch in launches if launch.tpu_process is not None]


def test_task_on_a_part_is_told_of_the_part() -> None:
    first, second = environments_on_part()
    assert second == {
        "TPU_PROCESS_ADDRESSES": "10.0.0.1:8471,10.0.0.3:8471",
        "TPU_PROCESS_PORT": "8471",
        "CLOUD_TPU_TASK_ID": "1",
        "TPU_WORKER_ID": "1",
        "TPU_VISIBLE_CHIPS": "0,1,2,3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "1,2,1",
        "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.3",
        "TPU_ACCELERATOR_TYPE": "v6e-16",
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_TOPOLOGY": "2x4",
        "TPU_TOPOLOGY_WRAP": "false,false,false",
        "TPU_TOPOLOGY_ALT": "false",
    }
    assert first == second | {"CLOUD_TPU_TASK_ID": "0", "TPU_WORKER_ID": "0"}


def test_processes_of_a_host_share_its_place_in_the_part() -> None:
    environments = environments_on_part(per_host=2)
    assert [one["TPU_WORKER_ID"] for one in environments] == ["0", "1", "2", "3"]
    assert {one["TPU_WORKER_HOSTNAMES"] for one in environments} == {"10.0.0.1,10.0.0.3"}
    assert {one["TPU_PROCESS_BOUNDS"] for one in environments} == {"2,2,1"}
    assert environments[3]["TPU_PROCESS_ADDRESSES"] == "10.0.0.1:1003,10.0.0.1:1013,10.0.0.3:1023,10.0.0.3:1033"


def test_task_on_a_whole_slice_is_told_nothing_new() -> None:
    spec = gang_spec("job", tpu_type="v6e-16")
    hosts = tuple(HostPlace(f"n-{i}", f"10.0.0.{i}", "a", i) for i in range(4))
    order = AttemptOrder(AttemptId("job", 1), (hosts,), {"TPU": 4.0}, 1, 1)
    launches = launch_plan(request(spec), AttemptPlace(order), {"a": [(1000, 1001, 1002, 1003)]})["a"]
    assert [launch.tpu_process for launch in launches] == [None] * 4


@pytest.mark.parametrize("per_host", [1, 2])
def test_tasks_know_where_the_hosts_of_their_gang_serve_files(per_host: int) -> None:
    spec = gang_spec("job", processes_per_host=per_host)
    order = replace(place(AttemptId("job", 3), "a", "b").order, processes_per_host=per_host)
    ports = dict.fromkeys(("a", "b"), PORTS["a"] * 4)
    hosts = ("10.0.0.0:4000", "10.0.0.1:4000", "", "10.0.1.1:4000")
    launches = [one for each in launch_plan(request(spec), AttemptPlace(order), ports, hosts).values() for one in each]
    for launch in launches:
        assert [*launch.info.file_services[::per_host]] == [*hosts]
        assert len(launch.info.file_services) == launch.info.num_tasks


def test_addresses_too_long_for_a_variable_are_left_out() -> None:
    where = place(AttemptId("job", 1), "a", hosts=5000)
    long, short = ["100.100.100.100:40000"] * 5000, ["10.0.0.1:40000"] * 5000
    for hosts, known in ((long, 0), (short, 5000)):
        launch = launch_plan(request(gang_spec("job")), where, PORTS, hosts)["a"][0]
        assert len(launch.info.file_services) == known
        assert all(len(f"{name}={value}") < 1 << 17 for name, value in launch.info.to_env().items())


def test_job_keeps_one_token_that_no_repr_shows() -> None:
    one, other = request(gang_spec("job")), request(gang_spec("job"))
    assert one.files_token != other.files_token
    for number in (1, 2):
        again = pickle.loads(pickle.dumps(one))
        launch = launch_plan(again, place(AttemptId("job", number), "a"), PORTS)["a"][0]
        assert launch.files_token == one.files_token
        assert one.files_token not in f"{one} {launch} {launch.info.to_env()}"


def test_jobs_of_a_task_have_user_team_and_band_of_its_job_unless_its_own_variables_say_otherwise() -> None:
    spec = replace(gang_spec("job"), user="ann", team="vision", priority=PriorityBand.BATCH)
    at, ports = place(AttemptId("job", 1), "a"), PORTS
    env = launch_plan(request(spec), at, ports)["a"][0].env
    assert env == {"IRIS_USER": "ann", "IRIS_TEAM": "vision", "IRIS_PRIORITY": "batch", "A": "1"}
    own = replace(request(spec), env={"IRIS_PRIORITY": "production"})
    assert launch_plan(own, at, ports)["a"][0].env["IRIS_PRIORITY"] == "production"


def test_jobs_of_a_task_of_the_system_band_have_its_reason() -> None:
    spec = replace(gang_spec("job"), priority=PriorityBand.SYSTEM, priority_reason="tests new hosts")
    env = launch_plan(request(spec), place(AttemptId("job", 1), "a"), PORTS)["a"][0].env
    assert (env["IRIS_PRIORITY"], env["IRIS_PRIORITY_REASON"]) == ("system", "tests new hosts")


def test_task_knows_its_claimed_gpus() -> None:
    spec = tasks_spec("job", 1, resources={"GPU": 2.0})
    ((launch,),) = launch_plan(request(spec), place(AttemptId("job", 1), "job/task-0", hosts=1), PORTS).values()
    assert launch.num_gpus == 2.0


def test_single_task_has_own_index_and_no_slice() -> None:
    spec = tasks_spec("job", 5)
    where = place(AttemptId("job", 1, 3), "job/task-3", hosts=1, chips=False)
    ((launch,),) = launch_plan(request(spec), where, PORTS).values()
    assert (launch.info.task_index, launch.info.num_tasks, launch.info.slice_name) == (3, 5, "")
    assert launch.label == f"{spec.name} task=3"
    assert where.in_words(TaskKey(0, 0)) == "task 3 on 10.0.0.0"


def test_only_tasks_of_a_gang_have_a_coordinator() -> None:
    """Each of several tasks by themselves is the first of its attempt: the others would never find it."""
    alone, single = place(AttemptId("job", 1, 3), "a", hosts=1), place(AttemptId("job", 1), "a", hosts=1)
    found = {
        (replicas, launch.info.coordinator_address, launch.info.in_gang)
        for replicas, where in ((5, alone), (1, single))
        for launches in launch_plan(request(tasks_spec("job", replicas)), where, PORTS).values()
        for launch in launches
    }
    assert found == {(5, "", False), (1, "10.0.0.0:1003", True)}
