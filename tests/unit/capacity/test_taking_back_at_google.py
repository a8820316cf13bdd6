"""One reservation for all sizes, against the emulated APIs through Google's clients; the cluster is on paper."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.cloud import tpu_v2

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.cloud_tpu import CloudTpu
from iris_ray.capacity.compute_engine import ComputeEngine
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Provider, Source
from iris_ray.capacity.provisioner import Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.errors import ProviderError
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing.cloud_tpu_server import CloudTpuServer
from iris_ray.testing.compute_server import ComputeServer
from tests.support.waiting import wait_until
from tests.unit.capacity.test_provisioner import PaperJobs, be_brief

CHIPS = 32
TWO_SMALL = [WaitingGang("v6e-16", 1, "a"), WaitingGang("v6e-16", 1, "b")]
LARGE = WaitingGang("v6e-32", 1, "large")


class Cluster(PaperJobs):
    """Gangs that a test names, and slices that are idle unless it says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.gangs: list[WaitingGang] = []
        self.now = 0.0
        clock = SimpleNamespace(time=lambda: 1.7e9 + self.now, monotonic=lambda: self.now)
        monkeypatch.setattr(provisioner_module, "time", clock)

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        return self.gangs, self.joined

    @property
    def told(self) -> list[str]:
        assert self.reported is not None
        return [text for _, text in self.reported.taken_back]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def server() -> Iterator[CloudTpuServer]:
    with CloudTpuServer() as running:
        running.reservations = {f"{running.location}/reservations/res": CHIPS}
        yield running


def provisioner_of(cloud: Provider, paper: Cluster, **changes: Any) -> Provisioner:
    source = Source.reserved(f"{cloud.location}/reservations/res:{CHIPS}")
    values: dict[str, Any] = {"sources": (source,), "least": 0, "most": 4, "idle_s": 600.0, "take_back": Reach.HELD}
    types = get_tpu_config("v6e-16"), get_tpu_config("v6e-32")
    hosts = HostSettings("v2-alpha-tpuv6e", {OWNER_LABEL: "ann"}, "#!/bin/sh")
    return Provisioner(Settings("ann", types, **(values | changes)), [cloud], paper, hosts)


def turn(provisioner: Provisioner, server: Any, paper: Cluster, seconds: float = 30.0, steps: int = 1) -> None:
    """A turn of the provisioner, and then of the zone. All slices that are made join, idle."""
    with suppress(ProviderError):
        provisioner.turn()
    require_no_chip_twice(server)
    server.advance(steps)
    active = names(server, "ACTIVE")
    paper.joined = {name: paper.joined.get(name, Joined(True, False)) for name in active}
    paper.now += seconds


def names(server: Any, *states: str) -> list[str]:
    if isinstance(server, CloudTpuServer):
        return sorted(name for name, state in server.queued_states().items() if not states or state in states)
    return sorted(name for name, vms in server.statuses().items() if not states or {*vms} == {"RUNNING"})


def require_no_chip_twice(server: Any) -> None:
    """All slices, including those that are being made or deleted, have no more chips than the reservation."""
    sizes = [int(name.split("-")[3]) for name in names(server)]
    assert sum(sizes) <= CHIPS, names(server)
    if isinstance(server, CloudTpuServer):
        assert "FAILED" not in server.queued_states().values()


def two_idle(provisioner: Provisioner, server: Any, paper: Cluster) -> list[str]:
    """The reservation is used up by two small slices, which have been idle for long enough."""
    paper.gangs = TWO_SMALL
    for _ in range(4):
        turn(provisioner, server, paper)
        if paper.joined:
            paper.gangs = []
    for _ in range(3):
        turn(provisioner, server, paper)
    assert len(names(server)) == len(paper.joined) == 2
    paper.gangs = [LARGE]
    return names(server)


def test_idle_slices_become_the_wanted_size_and_back_again(server: CloudTpuServer, paper: Cluster) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    small = two_idle(provisioner, server, paper)
    turn(provisioner, server, paper, steps=0)
    assert names(server, "DELETING") == small
    assert paper.told == [
        f"takes 32 chips back for 1 v6e-32 for large: once {small[0]}, {small[1]} are deleted, res in here is asked"
    ]
    for _ in range(3):
        turn(provisioner, server, paper)
    (large,) = names(server, "ACTIVE")
    assert large.startswith("iris-ann-v6e-32-")
    assert paper.told == []
    assert paper.closed == [], "no taint is left of the slices that are gone"
    paper.gangs, paper.joined = [], {large: Joined(True, True)}
    turn(provisioner, server, paper)
    paper.gangs = TWO_SMALL
    for _ in range(4):
        turn(provisioner, server, paper)
    assert names(server) == [large], "it is in use"
    paper.joined = {large: Joined(True, False)}
    for _ in range(8):
        turn(provisioner, server, paper)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-16"] * 2


def test_slow_deletion_keeps_the_chips_for_the_gang_and_counts(server: CloudTpuServer, paper: Cluster) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    small = two_idle(provisioner, server, paper)
    behind = WaitingGang("v6e-16", 1, "behind")
    paper.gangs = [LARGE, behind]
    for _ in range(5):
        turn(provisioner, server, paper, steps=0)
        assert names(server, "DELETING") == small
        assert len(paper.told) == 1
    for _ in range(3):
        turn(provisioner, server, paper)
    assert [name[:15] for name in names(server)] == ["iris-ann-v6e-32"]


def test_slice_that_is_being_deleted_stays_closed_although_it_is_listed_unchanged(
    server: CloudTpuServer, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that started there would lose it."""
    cloud = CloudTpu(server.location, server.address)
    provisioner = provisioner_of(cloud, paper)
    small = two_idle(provisioner, server, paper)
    listed = cloud.queued_slices()
    monkeypatch.setattr(cloud, "queued_slices", lambda: listed)
    for _ in range(2):
        turn(provisioner, server, paper, steps=0)
        paper.joined = {name: Joined(True, False, closed=True) for name in small}
        assert (names(server, "DELETING"), sorted(paper.closed)) == (small, small)


@pytest.mark.parametrize("arrives", [True, False])
def test_lost_answers_to_deletions_delete_no_more_than_necessary(
    server: CloudTpuServer, paper: Cluster, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    small = two_idle(provisioner, server, paper)
    be_brief(monkeypatch, "delete")
    if arrives:
        server.delay(1.0, "DeleteQueuedResource", times=2)
    else:
        server.fail(grpc.StatusCode.UNAVAILABLE, "DeleteQueuedResource", times=100)
    turn(provisioner, server, paper, steps=0)
    if arrives:
        wait_until(lambda: names(server, "DELETING") == small)
    assert len(names(server)) == 2
    server.heal()
    for _ in range(6):
        turn(provisioner, server, paper)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]
    deleted = {request.name.rpartition("/")[2] for method, request in server.calls if method == "DeleteQueuedResource"}
    assert deleted == set(small)


def test_refused_deletion_is_tried_again_after_pauses_and_creates_nothing_meanwhile(
    server: CloudTpuServer, paper: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    small = two_idle(provisioner, server, paper)
    server.fail(grpc.StatusCode.FAILED_PRECONDITION, "DeleteQueuedResource")
    turn(provisioner, server, paper)
    assert names(server) == small[:1], "the first one was refused"
    server.fail(grpc.StatusCode.FAILED_PRECONDITION, "DeleteQueuedResource", times=2)
    for _ in range(6):
        turn(provisioner, server, paper)
        assert names(server) == small[:1]
    assert server.count("DeleteQueuedResource") == 4, "after 30 s and a minute"
    assert "can't be deleted: the Cloud TPU API refuses" in capsys.readouterr().err
    for _ in range(4):
        turn(provisioner, server, paper)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]


@pytest.mark.parametrize("method", ["DeleteQueuedResource", "CreateQueuedResource"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_refusals_end_in_the_wanted_slice(server: CloudTpuServer, paper: Cluster, method: str, times: int) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    two_idle(provisioner, server, paper)
    server.fail(grpc.StatusCode.FAILED_PRECONDITION, method, times)
    for _ in range(14):
        turn(provisioner, server, paper)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]


def test_slices_stay_if_a_job_was_faster_or_the_waiting_one_is_gone(server: CloudTpuServer, paper: Cluster) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    small = two_idle(provisioner, server, paper)
    paper.comes_when_closed = small[1]
    turn(provisioner, server, paper)
    assert names(server, "ACTIVE") == small
    paper.comes_when_closed = None
    turn(provisioner, server, paper)
    paper.joined[small[1]] = Joined(True, False)
    turn(provisioner, server, paper, seconds=100.0)
    assert server.count("DeleteQueuedResource") == 0
    close = paper.close

    def close_late(name: str) -> None:
        close(name)
        paper.gangs = []

    paper.close = close_late  # type: ignore[method-assign]
    turn(provisioner, server, paper)
    assert set(small) <= set(paper.closed), "it was about to delete them"
    assert server.count("DeleteQueuedResource") == 0
    turn(provisioner, server, paper)
    assert paper.closed == []


def test_nothing_is_deleted_for_a_job_if_a_slice_that_was_to_go_anyway_stays(
    server: CloudTpuServer, paper: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two is deleted as it failed; the provider refuses that, and the second would not suffice."""
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    small = two_idle(provisioner, server, paper)
    server.set_queued(small[0], tpu_v2.QueuedResourceState.State.SUSPENDED)
    paper.joined = {small[1]: Joined(True, False)}
    server.fail(grpc.StatusCode.FAILED_PRECONDITION, "DeleteQueuedResource")
    turn(provisioner, server, paper, steps=0)
    assert names(server, "ACTIVE", "SUSPENDED") == small
    turn(provisioner, server, paper, steps=0)
    assert names(server, "DELETING") == small


@pytest.mark.parametrize("for_job", [True, False])
def test_request_that_is_granted_within_the_turn_is_not_deleted(
    server: CloudTpuServer, paper: Cluster, for_job: bool
) -> None:
    """It may have a job by now."""
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper, idle_s=600.0 if for_job else 0.0)
    paper.gangs = TWO_SMALL
    turn(provisioner, server, paper, steps=0)
    small, paper.gangs = names(server, "ACCEPTED"), [LARGE] if for_job else []
    look = paper.look

    def look_late() -> Any:
        server.advance(2)
        return look()

    paper.look = look_late  # type: ignore[method-assign]
    turn(provisioner, server, paper, steps=0)
    assert names(server, "ACTIVE") == small
    assert server.count("DeleteQueuedResource") == 0


def test_refused_size_costs_other_sizes_their_slices_once(server: CloudTpuServer, paper: Cluster) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), paper)
    two_idle(provisioner, server, paper)
    turn(provisioner, server, paper)
    server.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "CreateQueuedResource")
    turn(provisioner, server, paper)
    assert names(server) == []
    paper.gangs = TWO_SMALL
    for _ in range(3):
        turn(provisioner, server, paper)
    paper.gangs = []
    for _ in range(3):
        turn(provisioner, server, paper)
    paper.gangs, deleted = [LARGE], server.count("DeleteQueuedResource")
    for _ in range(4):
        turn(provisioner, server, paper)
    assert server.count("DeleteQueuedResource") == deleted, "nobody knows that it would be taken now"
    assert paper.reported is not None
    assert "stay, since res in here failed last: " in paper.reported.waits[0][1]


def test_groups_of_compute_engine_share_a_reservation(paper: Cluster) -> None:
    with ComputeServer() as server:
        server.reservations = {"res": CHIPS}
        provisioner = provisioner_of(ComputeEngine(server.location, server.address), paper)
        small = two_idle(provisioner, server, paper)
        turn(provisioner, server, paper, steps=0)
        turn(provisioner, server, paper, steps=0)
        assert names(server) == small, "they are being deleted"
        assert len(paper.told) == 1
        for _ in range(5):
            turn(provisioner, server, paper)
        assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]


# -- slices that jobs leave --------------------------------------------------------------------------------------------


class BusyCluster(Cluster):
    """Jobs of a lower band use all slices, and leave as many as they are asked for, a turn later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.asked: list[ChipsWanted] = []
        self.refuses = ""
        self.given_up = False

    def leave_chips(self, wanted: ChipsWanted) -> ChipsLeft:
        if not wanted.chips:
            self.given_up = True
            return ChipsLeft()
        self.asked.append(wanted)
        if self.refuses:
            return ChipsLeft(why_not=self.refuses)
        chosen = tuple(one.name for one in wanted.slices)
        self.gangs = [replace(LARGE, removes=chosen)]
        return ChipsLeft(chosen, ("batch",), 30.0)

    def all_leave(self) -> None:
        self.joined = {name: Joined(True, False, one.closed) for name, one in self.joined.items()}


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> BusyCluster:
    return BusyCluster(monkeypatch)


def two_in_use(provisioner: Provisioner, server: Any, paper: BusyCluster) -> list[str]:
    """Jobs use both slices of the reservation; a gang that may evict them has lacked the chips for some time."""
    small = two_idle(provisioner, server, paper)
    paper.joined = dict.fromkeys(small, Joined(True, True))
    paper.gangs = [replace(LARGE, may_reserve=True)]
    for _ in range(2):
        turn(provisioner, server, paper)
    assert paper.asked == []
    return small


def test_jobs_leave_slices_which_then_become_the_wanted_size(server: CloudTpuServer, busy: BusyCluster) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), busy)
    small = two_in_use(provisioner, server, busy)
    turn(provisioner, server, busy)
    (wanted,) = busy.asked
    assert (wanted.job_id, wanted.chips, sorted(one.name for one in wanted.slices)) == ("large", 32, small)
    names_of = ", ".join(one.name for one in wanted.slices)
    assert busy.told == [
        f"takes 32 chips back for 1 v6e-32 for large: batch leave within 30 s; once {names_of} are deleted, res in here"
        " is asked"
    ]
    turn(provisioner, server, busy)
    assert "once jobs have left " in busy.told[0]
    assert server.count("DeleteQueuedResource") == 0
    busy.all_leave()
    turn(provisioner, server, busy, steps=0)
    assert names(server, "DELETING") == small
    for _ in range(4):
        turn(provisioner, server, busy)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]
    assert len(busy.asked) == 1
    assert busy.closed == []


def test_no_slice_goes_while_a_job_stays_on_one(server: CloudTpuServer, busy: BusyCluster) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), busy)
    small = two_in_use(provisioner, server, busy)
    turn(provisioner, server, busy)
    busy.joined[small[0]] = Joined(True, False)
    for _ in range(3):
        turn(provisioner, server, busy)
    assert names(server, "ACTIVE") == small
    assert server.count("DeleteQueuedResource") == 0


@pytest.mark.parametrize("arrives", [True, False])
def test_lost_answers_and_slow_deletions_ask_no_second_time(
    server: CloudTpuServer, busy: BusyCluster, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), busy)
    small = two_in_use(provisioner, server, busy)
    turn(provisioner, server, busy)
    busy.all_leave()
    be_brief(monkeypatch, "delete")
    if arrives:
        server.delay(1.0, "DeleteQueuedResource", times=2)
    else:
        server.fail(grpc.StatusCode.UNAVAILABLE, "DeleteQueuedResource", times=100)
    turn(provisioner, server, busy, steps=0)
    if arrives:
        wait_until(lambda: names(server, "DELETING") == small)
    server.heal()
    for _ in range(10):
        turn(provisioner, server, busy, steps=0)
    assert names(server, "DELETING") == small
    for _ in range(4):
        turn(provisioner, server, busy)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]
    assert len(busy.asked) == 1


def test_jobs_have_not_left_in_vain_if_google_refuses_a_deletion_once(
    server: CloudTpuServer, busy: BusyCluster
) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), busy)
    two_in_use(provisioner, server, busy)
    turn(provisioner, server, busy)
    busy.all_leave()
    server.fail(grpc.StatusCode.FAILED_PRECONDITION, "DeleteQueuedResource", times=2)
    for _ in range(8):
        turn(provisioner, server, busy)
    assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]
    assert len(busy.asked) == 1
    assert not busy.given_up


def test_size_that_google_refuses_costs_lower_bands_their_slices_once(
    server: CloudTpuServer, busy: BusyCluster
) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), busy)
    two_in_use(provisioner, server, busy)
    turn(provisioner, server, busy)
    busy.all_leave()
    turn(provisioner, server, busy)
    busy.gangs = [replace(LARGE, may_reserve=True)]
    server.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "CreateQueuedResource")
    turn(provisioner, server, busy)
    assert names(server) == []
    busy.gangs = TWO_SMALL
    for _ in range(4):
        turn(provisioner, server, busy)
    small = names(server, "ACTIVE")
    assert len(small) == 2
    busy.joined = dict.fromkeys(small, Joined(True, True))
    busy.gangs = [replace(LARGE, may_reserve=True)]
    for _ in range(10):
        turn(provisioner, server, busy)
    assert len(busy.asked) == 1, "nobody knows that it would be taken now"


def test_refusal_of_the_controller_is_told_and_asked_about_again(server: CloudTpuServer, busy: BusyCluster) -> None:
    provisioner = provisioner_of(CloudTpu(server.location, server.address), busy)
    two_in_use(provisioner, server, busy)
    busy.refuses = "a may not be evicted yet for 2 min"
    for number in range(6):
        turn(provisioner, server, busy)
        assert busy.reported is not None
        assert busy.reported.waits[0][1].endswith(f"; jobs of lower bands leave none: {busy.refuses}"), number
    assert len(busy.asked) == 3
    assert server.count("DeleteQueuedResource") == 0


def test_provisioner_that_looks_rarely_asks_no_job(server: CloudTpuServer, busy: BusyCluster) -> None:
    source = Source.reserved(f"{server.location}/reservations/res:{CHIPS}")
    types = get_tpu_config("v6e-16"), get_tpu_config("v6e-32")
    hosts = HostSettings("v2-alpha-tpuv6e", {OWNER_LABEL: "ann"}, "#!/bin/sh")
    settings = Settings("ann", types, (source,), least=0, most=4, idle_s=600.0, take_back=Reach.HELD)
    cloud = CloudTpu(server.location, server.address)
    provisioner = Provisioner(settings, [cloud], busy, hosts, every_s=300.0)
    two_in_use(provisioner, server, busy)
    turn(provisioner, server, busy)
    assert busy.asked == []
    assert busy.reported is not None
    assert "this provisioner looks only every 300 s (--every)" in busy.reported.waits[0][1]


def test_groups_of_compute_engine_are_left_by_jobs(busy: BusyCluster) -> None:
    with ComputeServer() as server:
        server.reservations = {"res": CHIPS}
        provisioner = provisioner_of(ComputeEngine(server.location, server.address), busy)
        two_in_use(provisioner, server, busy)
        turn(provisioner, server, busy)
        busy.all_leave()
        for _ in range(8):
            turn(provisioner, server, busy)
        assert [name[:15] for name in names(server, "ACTIVE")] == ["iris-ann-v6e-32"]
        assert len(busy.asked) == 1
