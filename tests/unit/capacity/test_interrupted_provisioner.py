"""A provisioner that stands still in the middle of a turn, whose name passes to another one, or to which lists lie.

Against the emulated API, through Google's client; the cluster is on paper, and its board with the leases is real.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from google.cloud import tpu_v2

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.board import CapacityBoard
from iris_ray.capacity.cloud_tpu import CloudTpu
from iris_ray.capacity.compute_engine import ComputeEngine
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.google_api import Patience
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted
from iris_ray.capacity.provisioner import CHECK_S, CLOSED_S, Jobs, Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.errors import ProviderError, ProvisionerTakenError
from iris_ray.testing.cloud_tpu_server import CloudTpuServer
from iris_ray.testing.compute_server import ComputeServer
from tests.support.controller_in_process import ControllerInProcess
from tests.unit.capacity.test_taking_back_at_google import (
    CHIPS,
    LARGE,
    BusyCluster,
    names,
    provisioner_of,
    turn,
    two_idle,
    two_in_use,
)

OTHER = "process 2 of b"


class Cluster(BusyCluster):
    """A cluster with a real board, and clocks that a test moves.

    Attributes:
        wall_ahead: by how much the wall clock, and the Controller's, are ahead of the provisioner's monotonic clock.
        has_controller: whether a Controller runs.
        before_look: called before each look at the cluster.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.wall_ahead = 0.0
        clock = SimpleNamespace(time=lambda: 1.7e9 + self.now + self.wall_ahead, monotonic=lambda: self.now)
        monkeypatch.setattr(provisioner_module, "time", clock)
        self._clock = SimpleNamespace(now=lambda: self.now + self.wall_ahead, wall=lambda at: at)
        self.board = CapacityBoard(self._clock)  # type: ignore[arg-type]
        self.has_controller = True
        self.before_look: Callable[[], object] = lambda: None

    def lease(self, owner: str, instance: str, seconds: float) -> bool | None:
        return self.board.lease(owner, instance, seconds) if self.has_controller else None

    def restart_controller(self) -> None:
        recorded, self.board = self.board.record(), CapacityBoard(self._clock)  # type: ignore[arg-type]
        self.board.restore(recorded)

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        self.before_look()
        return super().look() if self.has_controller else (None, {})

    def all_are(self, in_use: bool) -> None:
        self.joined = {name: Joined(True, in_use) for name in self.joined}


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def server() -> Iterator[CloudTpuServer]:
    with CloudTpuServer() as running:
        running.reservations = {f"{running.location}/reservations/res": CHIPS}
        yield running


@pytest.fixture
def cloud(server: CloudTpuServer) -> CloudTpu:
    return CloudTpu(server.location, server.address)


@pytest.fixture
def provisioner(cloud: CloudTpu, paper: Cluster) -> Provisioner:
    return provisioner_of(cloud, paper)


def after_each_deletion(cloud: CloudTpu, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    delete = cloud.delete

    def delete_then(name: str, patience: Patience = Patience(1.0, 1.0)) -> str | None:  # noqa: B008 - frozen
        answer = delete(name, patience)
        happens()
        return answer

    monkeypatch.setattr(cloud, "delete", delete_then)


def once_closed(paper: Cluster, happens: Callable[[], object]) -> None:
    """Something happens between the look that finds the slices unused and their deletion."""
    look, done = paper.look, [False]

    def look_then() -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        found = look()
        if paper.closed and not done[0]:
            done[0] = True
            happens()
        return found

    paper.look = look_then  # type: ignore[method-assign]


def another_works(paper: Cluster, is_over: bool) -> None:
    """The machine is suspended, and another process gets the name."""
    paper.wall_ahead += 200.0
    paper.board.lease("ann", OTHER, 180.0)
    if is_over:
        paper.board.lease("ann", OTHER, 0.0)


# -- checks that are out of date ---------------------------------------------------------------------------------------


def test_job_that_ends_while_slices_are_deleted_for_it_costs_no_further_one(
    server: CloudTpuServer, cloud: CloudTpu, provisioner: Provisioner, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_idle(provisioner, server, paper)

    def the_job_ends() -> None:
        paper.now += CHECK_S + 1
        paper.gangs = []

    after_each_deletion(cloud, monkeypatch, the_job_ends)
    turn(provisioner, server, paper, steps=0)
    assert len(names(server, "DELETING")) == 1


def test_job_that_starts_while_idle_slices_are_deleted_keeps_its_slice(
    server: CloudTpuServer, cloud: CloudTpu, provisioner: Provisioner, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an operator has opened it."""
    small, paper.gangs = two_idle(provisioner, server, paper), []

    def a_job_starts() -> None:
        paper.now += CHECK_S + 1
        paper.all_are(in_use=True)

    after_each_deletion(cloud, monkeypatch, a_job_starts)
    for _ in range(21):
        turn(provisioner, server, paper, steps=0)
    assert len(names(server, "DELETING")) == 1
    assert len(small) == 2


@pytest.mark.parametrize("for_job", [True, False])
def test_process_that_stands_still_before_a_deletion_does_not_delete(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster, for_job: bool
) -> None:
    """The slices' taints have expired meanwhile, and jobs run there."""
    two_idle(provisioner, server, paper)
    if not for_job:
        paper.gangs = []

    def jobs_start() -> None:
        paper.now += CLOSED_S
        paper.all_are(in_use=True)

    once_closed(paper, jobs_start)
    for _ in range(21):
        turn(provisioner, server, paper, steps=0)
    assert server.count("DeleteQueuedResource") == 0


@pytest.mark.parametrize("is_over", [True, False])
def test_machine_that_is_suspended_does_not_act_once_another_process_has_had_the_name(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster, is_over: bool
) -> None:
    """The monotonic clock stands still in the meantime. The other one may have ended in order."""
    small = two_idle(provisioner, server, paper)

    once_closed(paper, lambda: another_works(paper, is_over))
    provisioner.try_turn()
    assert names(server, "ACTIVE") == small


@pytest.mark.parametrize("is_over", [True, False])
def test_machine_that_is_suspended_requests_nothing_once_another_process_has_had_the_name(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster, is_over: bool
) -> None:
    """Nor if it has looked before: the other one may have requested the same slices, and they are not listed yet."""
    paper.gangs = [LARGE]
    done = list[bool]()

    def suspended() -> None:
        if not done:
            done.append(True)
            another_works(paper, is_over)

    paper.before_look = suspended
    with pytest.raises(ProvisionerTakenError, match="may have worked since" if is_over else OTHER):
        provisioner.turn()
    assert server.count("CreateQueuedResource") == 0


@pytest.mark.parametrize("is_over", [True, False])
def test_machine_that_is_suspended_changes_nothing_in_the_cluster_once_another_process_has_had_the_name(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster, is_over: bool
) -> None:
    """It was about to have jobs leave their slices, and to open slices that the other one may have closed since."""
    two_in_use(provisioner, server, paper)
    paper.closed = [*paper.joined]
    paper.joined = {name: Joined(True, True, closed=True) for name in paper.joined}
    paper.before_look = lambda: another_works(paper, is_over)
    with pytest.raises(ProvisionerTakenError):
        provisioner.turn()
    assert (paper.asked, len(paper.closed)) == ([], 2)
    paper.closed, paper.before_look = [], lambda: None
    paper.all_are(in_use=True)
    paper.board.lease("ann", OTHER, 0.0) if not is_over else None
    for _ in range(3):
        turn(provisioner, server, paper)
    assert len(paper.asked) == 1, "a minute later it has looked for itself"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 3.2e7, -3.2e7])
def test_wall_clock_that_jumps_within_a_turn_delays_a_deletion_to_the_next(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster, jump_s: float
) -> None:
    small = two_idle(provisioner, server, paper)
    paper._clock.now = lambda: paper.now  # the Controller's clock does not jump

    def jump() -> None:
        paper.wall_ahead = jump_s

    once_closed(paper, jump)
    turn(provisioner, server, paper, steps=0)
    assert names(server, "ACTIVE") == small
    turn(provisioner, server, paper, steps=0)
    assert names(server, "DELETING") == small
    for _ in range(3):
        turn(provisioner, server, paper)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]


def test_api_that_hangs_holds_up_a_turn_once_and_not_once_for_each_slice(
    server: CloudTpuServer, cloud: CloudTpu, provisioner: Provisioner, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_idle(provisioner, server, paper)
    asked = list[str]()

    def hang(name: str) -> str | None:
        asked.append(name)
        paper.now += 60.0
        raise ProviderError("no answer")

    monkeypatch.setattr(cloud, "delete", hang)
    turn(provisioner, server, paper, steps=0)
    assert len(asked) == 1


def test_time_in_which_nobody_looked_does_not_count_as_idle(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster
) -> None:
    """Jobs have used the slices in the meantime. The process stood still, or the API gave no answer."""
    small, paper.gangs = two_idle(provisioner, server, paper), []
    turn(provisioner, server, paper)
    turn(provisioner, server, paper, seconds=3600.0)
    for _ in range(20):
        turn(provisioner, server, paper)
        assert names(server, "ACTIVE") == small
    turn(provisioner, server, paper, steps=0)
    assert names(server, "DELETING") == small


def test_time_in_which_the_machine_was_suspended_does_not_count_as_idle(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster
) -> None:
    """The monotonic clock stands still, no other process has the name, and jobs have used the slices."""
    small, paper.gangs = two_idle(provisioner, server, paper), []
    for _ in range(15):
        turn(provisioner, server, paper)
    paper.wall_ahead += 3600.0
    for _ in range(20):
        turn(provisioner, server, paper)
        assert names(server, "ACTIVE") == small
    turn(provisioner, server, paper, steps=0)
    assert names(server, "DELETING") == small


def test_time_in_which_another_process_had_the_name_does_not_count_as_idle(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster
) -> None:
    small, paper.gangs = two_idle(provisioner, server, paper), []
    for _ in range(10):
        turn(provisioner, server, paper)
    paper.now += 150.0
    paper.board = CapacityBoard(paper._clock)  # type: ignore[arg-type]
    paper.board.lease("ann", OTHER, 60.0)
    provisioner.try_turn()
    paper.now += 61.0
    for _ in range(15):
        turn(provisioner, server, paper)
    assert names(server, "ACTIVE") == small


# -- whose turn it is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes_back", [True, False])
def test_waiting_process_does_not_get_the_name_by_the_end_of_the_controller(
    server: CloudTpuServer, cloud: CloudTpu, provisioner: Provisioner, paper: Cluster, comes_back: bool
) -> None:
    """Both would request slices for the same jobs, or the least number of slices."""
    paper.gangs = [LARGE]
    second = provisioner_of(cloud, paper, least=1)
    provisioner.turn()
    with pytest.raises(ProvisionerTakenError):
        second.turn()
    if comes_back:
        paper.restart_controller()
    else:
        paper.has_controller = False
    asked = server.count("CreateQueuedResource")
    with pytest.raises(ProvisionerTakenError):
        second.turn()
    assert server.count("CreateQueuedResource") == asked
    paper.has_controller = True
    paper.now += 181.0
    second.turn()


def test_name_stays_with_its_process_when_the_controller_is_restarted(world: ControllerInProcess) -> None:
    jobs = Jobs()
    assert jobs.lease("iris", "process 1 of a", 60.0) is False
    world.restart_controller()
    with pytest.raises(ProvisionerTakenError, match=r"named iris: process 1 of a\."):
        jobs.lease("iris", OTHER, 60.0)
    assert jobs.lease("iris", "process 1 of a", 60.0) is True


# -- lists that lie ----------------------------------------------------------------------------------------------------


def test_list_that_lacks_the_zone_is_no_list(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google answers without an error and names what it could not reach; all slices would count as gone."""
    small, paper.gangs = two_idle(provisioner, server, paper), [WaitingGang("v6e-16", 1, "a")]
    monkeypatch.setattr(CloudTpu.queued_slices, "__defaults__", (Patience(0.3, 0.3),))
    server.is_unreachable = True
    with pytest.raises(ProviderError, match="the list lacks projects/test/locations/here"):
        provisioner.turn()
    assert names(server) == small


def test_slice_with_hosts_in_the_cluster_counts_although_a_list_omits_it(
    server: CloudTpuServer, cloud: CloudTpu, provisioner: Provisioner, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = two_idle(provisioner, server, paper)
    paper.all_are(in_use=True)
    paper.gangs = [WaitingGang("v6e-16", 1, "a")]
    listed = cloud.queued_slices
    with monkeypatch.context() as patch:
        patch.setattr(cloud, "queued_slices", lambda: listed()[1:])
        for _ in range(3):
            turn(provisioner, server, paper, steps=0)
            assert names(server) == small
    del paper.joined[small[0]]
    server.remove_node(small[0])
    monkeypatch.setattr(cloud, "queued_slices", lambda: listed()[1:])
    provisioner.turn()
    assert server.count("CreateQueuedResource") == 3, "its hosts are gone"


def test_slice_that_stands_again_after_an_accepted_deletion_is_deleted_anew(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster
) -> None:
    """Google answers a request whose id it knows with the earlier operation, and does nothing."""
    small = two_idle(provisioner, server, paper)
    turn(provisioner, server, paper, steps=0)
    assert names(server, "DELETING") == small
    for name in small:
        server.set_queued(name, tpu_v2.QueuedResourceState.State.ACTIVE)
    for _ in range(63):
        turn(provisioner, server, paper, steps=0)
    assert names(server, "DELETING") == small, "half an hour later"


def test_group_that_stands_again_after_an_accepted_deletion_is_deleted_anew(paper: Cluster) -> None:
    with ComputeServer() as server:
        server.reservations = {"res": CHIPS}
        provisioner = provisioner_of(ComputeEngine(server.location, server.address), paper)
        two_idle(provisioner, server, paper)
        turn(provisioner, server, paper, steps=0)
        groups = list(server.groups.values())
        assert all(group.is_going for group in groups)
        for group in groups:
            group.is_going = False
            for vm in group.vms.values():
                vm.action = "NONE"
        for _ in range(63):
            turn(provisioner, server, paper, steps=0)
        assert all(group.is_going for group in groups), "half an hour later"


# -- many that ask -----------------------------------------------------------------------------------------------------


def test_job_has_its_turn_behind_many_for_which_no_slices_are_left(
    server: CloudTpuServer, provisioner: Provisioner, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody submits many large jobs with different requirements."""
    two_in_use(provisioner, server, paper)
    paper.gangs = [replace(LARGE, job_id=f"large-{n}", may_reserve=True) for n in range(40)]

    def refuse(wanted: ChipsWanted) -> ChipsLeft:
        paper.asked.append(wanted)
        return ChipsLeft(why_not="not now")

    monkeypatch.setattr(paper, "leave_chips", refuse)
    for _ in range(40):
        turn(provisioner, server, paper)
    times = [sum(one.job_id == gang.job_id for one in paper.asked) for gang in paper.gangs]
    assert min(times) >= 2
    assert len(paper.asked) <= 40 * 8
