"""The provisioner against the emulated Cloud TPU API, through the real client; the cluster is on paper."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.cloud import tpu_v2
from ray.exceptions import GetTimeoutError, RaySystemError

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.cloud_tpu import CloudTpu
from iris_ray.capacity.compute_engine import ComputeEngine
from iris_ray.capacity.core import CapacityReport, SliceBatch
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.google_api import Patience
from iris_ray.capacity.holdings import Settings
from iris_ray.capacity.prices import Prices, read_prices
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, Source
from iris_ray.capacity.provisioner import Jobs, Provisioner, joined_slices
from iris_ray.capacity.provisioning import STUCK_S, Joined
from iris_ray.errors import (
    ControllerUnavailableError,
    NotPermittedError,
    ProviderError,
    ProvisionerTakenError,
    VersionMismatchError,
)
from iris_ray.model.topology import get_tpu_config
from iris_ray.testing.cloud_tpu_server import CloudTpuServer
from iris_ray.testing.compute_server import ComputeServer
from tests.support.controller_in_process import ControllerInProcess
from tests.support.provisioning import gangs
from tests.support.waiting import wait_until
from tests.unit.dashboard.test_slices import host

Queued = tpu_v2.QueuedResourceState.State
TYPE = "v6e-16"


class PaperJobs(Jobs):
    """A cluster that has the slices and the demand that a test says."""

    def __init__(self) -> None:
        self.type = TYPE
        self.demand: Sequence[int] | None = ()
        self.joined: dict[str, Joined] = {}
        self.closed: list[str] = []
        self.comes_when_closed: str | None = None
        self.goes_when_closed = False
        self.is_permitted = True
        self.error: Exception | None = None
        self.reported: CapacityReport | None = None
        self.holder: str | None = None

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        if self.error is not None:
            raise self.error
        return None if self.demand is None else gangs({self.type: self.demand}), self.joined

    def lease(self, owner: str, instance: str, seconds: float) -> bool | None:
        if self.holder not in (None, instance):
            raise ProvisionerTakenError(f"another provisioner is named {owner}: {self.holder}")
        is_last = self.holder == instance
        self.holder = instance if seconds else None
        return is_last

    def report(self, report: CapacityReport) -> None:
        self.reported = report

    def close(self, name: str) -> None:
        if self.demand is None and not self.goes_when_closed:
            raise ControllerUnavailableError("no Controller runs")
        self._require_permission()
        if name not in self.closed:
            self.closed.append(name)
        if self.goes_when_closed:
            self.demand, self.joined = None, {}
        if self.comes_when_closed == name:  # a job was faster
            self.joined[name] = Joined(True, in_use=True)

    def reopen(self, name: str) -> None:
        if self.demand is None:
            raise ControllerUnavailableError("no Controller runs")
        self._require_permission()
        self.closed.remove(name)

    def _require_permission(self) -> None:
        if not self.is_permitted:
            raise NotPermittedError("only operators may drain and taint hosts")


@pytest.fixture
def server() -> Iterator[CloudTpuServer]:
    with CloudTpuServer() as running:
        yield running


@pytest.fixture
def jobs() -> PaperJobs:
    return PaperJobs()


def make(server: CloudTpuServer, jobs: Jobs, **settings: float) -> Provisioner:
    return provisioner_for([server], jobs, **settings)


def provisioner_for(servers: Sequence[CloudTpuServer], jobs: Jobs, **changes: Any) -> Provisioner:
    sources = tuple(Source(server.location, Market.SPOT) for server in servers)
    values: dict[str, Any] = {"sources": sources, "least": 0, "most": 4, "idle_s": 0.0} | changes
    prices = values.pop("prices", Prices())
    clouds = [CloudTpu(server.location, server.address) for server in servers]
    hosts = HostSettings("v2-alpha-tpuv6e", {OWNER_LABEL: "ann"}, "#!/bin/sh")
    return Provisioner(Settings("ann", (get_tpu_config(TYPE),), **values), clouds, jobs, hosts, prices)


def be_brief(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The client gives up a failing call of the API soon."""
    monkeypatch.setattr(getattr(CloudTpu, method), "__defaults__", (Patience(0.3, 0.3),))


def joined_ones(server: CloudTpuServer, in_use: bool) -> dict[str, Joined]:
    return {name: Joined(True, in_use) for name, state in server.queued_states().items() if state == "ACTIVE"}


def test_slices_are_created_for_jobs_and_deleted_when_idle(server: CloudTpuServer, jobs: PaperJobs) -> None:
    provisioner, jobs.demand = make(server, jobs), (2,)
    for _ in range(4):
        provisioner.turn()
        server.advance()
    assert list(server.node_states().values()) == ["READY"] * 2
    jobs.demand, jobs.joined = (), joined_ones(server, in_use=True)
    provisioner.turn()
    assert len(server.queued_states()) == 2
    jobs.joined = joined_ones(server, in_use=False)
    provisioner.turn()
    assert sorted(jobs.closed) == sorted(jobs.joined)
    server.advance()
    assert (server.queued_states(), server.node_states()) == ({}, {})
    jobs.joined = {}
    provisioner.turn()
    assert jobs.closed == [], "no taint is left of a slice that is gone"


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_wall_clock_change_neither_deletes_nor_keeps_slice(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clock = SimpleNamespace(time=lambda: 1.7e9, monotonic=lambda: 50.0)
    monkeypatch.setattr(provisioner_module, "time", clock)
    provisioner, jobs.demand = make(server, jobs, idle_s=600.0), (1,)
    provisioner.turn()
    server.advance(2)
    jobs.demand, jobs.joined = (), joined_ones(server, in_use=False)
    provisioner.turn()
    clock.time = lambda: 1.7e9 + jump_s
    provisioner.turn()
    assert list(server.queued_states().values()) == ["ACTIVE"]
    for now in (200.0, 350.0, 500.0, 651.0):
        clock.monotonic = lambda now=now: now
        provisioner.turn()
    assert list(server.queued_states().values()) == ["DELETING"]


def test_preempted_slice_is_replaced_within_quota(server: CloudTpuServer, jobs: PaperJobs) -> None:
    server.quota_chips = 16
    provisioner, jobs.demand = make(server, jobs, most=1), (1,)
    provisioner.turn()
    server.advance(2)
    (first,) = server.queued_states()
    server.set_queued(first, Queued.SUSPENDED)
    provisioner.turn()
    assert server.queued_states() == {first: "DELETING"}
    provisioner.turn()
    server.advance()
    provisioner.turn()
    (second,) = server.queued_states()
    assert second != first


def one_deletion_fails(server: CloudTpuServer, jobs: PaperJobs, status: grpc.StatusCode) -> tuple[Provisioner, str]:
    """Two failed slices are to go, and the API answers the first deletion with an error; which one stays."""
    provisioner, jobs.demand = make(server, jobs), (2,)
    provisioner.turn()
    server.advance(2)
    first, second = server.queued_states()
    for name in (first, second):
        server.set_queued(name, Queued.SUSPENDED)
    server.fail(status, "DeleteQueuedResource")
    provisioner.turn()
    states = server.queued_states()
    assert (states.pop(first), states.pop(second)) == ("SUSPENDED", "DELETING")
    assert len(states) == 2, "the jobs that wait get theirs"
    return provisioner, first


def test_deletion_refused_by_api_blocks_no_other_work(
    server: CloudTpuServer, jobs: PaperJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    provisioner, first = one_deletion_fails(server, jobs, grpc.StatusCode.FAILED_PRECONDITION)
    assert f"{first} can't be deleted: the Cloud TPU API refuses: FailedPrecondition" in capsys.readouterr().err
    assert jobs.reported is not None
    ((undeleted, why),) = jobs.reported.undeleted
    assert (undeleted, "FailedPrecondition" in why) == (first, True)
    provisioner.turn()
    assert server.queued_states()[first] == "DELETING", "it is tried again"
    assert jobs.reported.undeleted == ()


def test_failing_deletion_call_blocks_no_other_work(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_brief(monkeypatch, "delete")
    _, first = one_deletion_fails(server, jobs, grpc.StatusCode.INTERNAL)
    assert f"{first} can't be deleted: the Cloud TPU API can't be asked: Internal" in capsys.readouterr().err


def test_refused_requests_stop_and_pause(
    server: CloudTpuServer, jobs: PaperJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    server.quota_chips = 0
    provisioner, jobs.demand = make(server, jobs), (3,)
    for _ in range(3):
        provisioner.turn()
    assert server.count("CreateQueuedResource") == 1
    said = capsys.readouterr()
    assert "ResourceExhausted" in said.err
    assert said.out.count("wait: 3 more v6e-16 wanted") == 1, "what was said in the turn before is not repeated"


def test_request_with_lost_answer_makes_one_slice(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioner, jobs.demand = make(server, jobs), (1,)
    be_brief(monkeypatch, "create")
    server.fail(grpc.StatusCode.UNAVAILABLE, "CreateQueuedResource", times=100)
    with pytest.raises(ProviderError):
        provisioner.turn()
    server.heal()
    provisioner.turn()
    provisioner.turn()
    assert len(server.queued_states()) == 1
    names = {request.queued_resource_id for method, request in server.calls if method == "CreateQueuedResource"}
    assert len(names) == 1


def test_slice_that_got_a_job_is_not_deleted(server: CloudTpuServer, jobs: PaperJobs) -> None:
    provisioner, jobs.demand = make(server, jobs), (1,)
    provisioner.turn()
    server.advance(2)
    (name,) = server.queued_states()
    jobs.demand, jobs.joined, jobs.comes_when_closed = (), {name: Joined(True, False)}, name
    provisioner.turn()
    assert server.queued_states() == {name: "ACTIVE"}
    provisioner.turn()
    assert jobs.closed == [], "the job's next attempt may use it"


def test_closed_slice_says_it_will_be_given_back() -> None:
    hosts = [
        host("s-0", n, attributes={"taint:given-back": "iris-ray cluster provision gives it back"}) for n in (0, 1)
    ]
    hosts += [host("s-1", 0, attributes={"taint:drained": "disk", "given-back": True})]
    assert {name: one.closed for name, one in joined_slices(hosts).items()} == {"s-0": True, "s-1": False}


def test_slice_with_chips_in_foreign_use_is_in_use() -> None:
    hosts = [host("s-0", 0), host("s-0", 1, foreign="4 chips of host 1 are in use outside iris_ray")]
    hosts += [host("s-1", 0), host("s-1", 1)]
    assert {name: one.in_use for name, one in joined_slices(hosts).items()} == {"s-0": True, "s-1": False}


def idle_slice(server: CloudTpuServer, jobs: PaperJobs, **settings: int) -> tuple[Provisioner, str]:
    """A provisioner whose only slice is no longer needed."""
    provisioner, jobs.demand = make(server, jobs, **settings), (1,)
    provisioner.turn()
    server.advance(2)
    (name,) = server.queued_states()
    jobs.demand, jobs.joined = (), {name: Joined(True, False)}
    return provisioner, name


def test_slice_is_kept_if_controller_goes_before_recheck(server: CloudTpuServer, jobs: PaperJobs) -> None:
    """Nobody knows whether a job uses it."""
    provisioner, name = idle_slice(server, jobs)
    jobs.goes_when_closed = True
    provisioner.turn()
    assert server.queued_states() == {name: "ACTIVE"}


def test_slice_that_is_made_for_ever_stops_no_turn_without_controller(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody can close it to jobs, so it stays; the least number is kept all the same."""
    clock = SimpleNamespace(time=lambda: 1.7e9, monotonic=lambda: 0.0)
    monkeypatch.setattr(provisioner_module, "time", clock)
    jobs.demand = None
    provisioner = make(server, jobs, least=1)
    provisioner.turn()
    (stuck,) = server.queued_states()
    server.set_queued(stuck, Queued.PROVISIONING)
    provisioner.turn()
    for now in (STUCK_S + 1, STUCK_S + 100):  # the first turn is within the pause after the failure
        clock.monotonic, clock.time = (lambda now=now: now), (lambda now=now: 1.7e9 + now)
        provisioner.turn()
    states = server.queued_states()
    assert (states.pop(stuck), len(states)) == ("PROVISIONING", 1)
    assert f"{stuck} stays: it can't be closed to jobs: no Controller runs" in capsys.readouterr().err


def test_provisioner_without_permission_to_close_goes_on(
    server: CloudTpuServer, jobs: PaperJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    provisioner, name = idle_slice(server, jobs, least=0)
    jobs.is_permitted = False
    provisioner.turn()
    assert server.queued_states() == {name: "ACTIVE"}
    assert f"{name} stays: it can't be closed to jobs: only operators" in capsys.readouterr().err
    assert jobs.reported is not None
    assert [name for name, _ in jobs.reported.undeleted] == [name]
    jobs.is_permitted, jobs.goes_when_closed = True, True
    provisioner.turn()
    jobs.is_permitted, jobs.demand, jobs.joined = False, (1,), {name: Joined(True, False, closed=True)}
    provisioner.turn()
    assert f"{name} can't be opened to jobs: only operators" in capsys.readouterr().err
    assert len(server.queued_states()) == 2, "the job that waits gets another one"


def test_failed_slice_is_deleted_although_others_cannot_be_opened(server: CloudTpuServer, jobs: PaperJobs) -> None:
    provisioner, jobs.demand = make(server, jobs), (2,)
    provisioner.turn()
    server.advance(2)
    names = sorted(server.queued_states())
    jobs.demand, jobs.joined = (), joined_ones(server, in_use=False)
    jobs.goes_when_closed = True
    provisioner.turn()
    assert sorted(jobs.closed) == names
    server.set_queued(names[0], Queued.FAILED)
    provisioner.turn()
    assert server.queued_states() == {names[0]: "DELETING", names[1]: "ACTIVE"}
    jobs.demand, jobs.joined = (1,), {names[1]: Joined(True, False, closed=True)}
    provisioner.turn()
    assert jobs.closed == names[:1]


def test_slice_closed_by_earlier_provisioner_is_opened_for_job(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, name = idle_slice(server, jobs, most=1)
    be_brief(monkeypatch, "delete")
    server.fail(grpc.StatusCode.UNAVAILABLE, "DeleteQueuedResource", times=100)
    with pytest.raises(ProviderError):
        earlier.turn()
    server.heal()
    assert jobs.closed == [name]
    jobs.holder = None  # its lease has ended
    closed = Joined(True, False, closed=True)
    jobs.demand, jobs.joined = (1,), {name: closed, "a-strangers": closed}
    make(server, jobs, most=1).turn()
    assert jobs.closed == []


@pytest.mark.parametrize("error", [RaySystemError("GCS is away"), GetTimeoutError(""), ConnectionError("refused")])
def test_provisioner_turn_survives_absent_ray(
    server: CloudTpuServer, jobs: PaperJobs, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    provisioner, jobs.demand, jobs.error = make(server, jobs), (1,), error
    provisioner.try_turn()
    assert "Ray does not answer: " in capsys.readouterr().err
    jobs.error = None
    provisioner.try_turn()
    assert len(server.queued_states()) == 1


@pytest.fixture
def servers() -> Iterator[list[CloudTpuServer]]:
    """Two zones, the preferred one first."""
    with CloudTpuServer("projects/test/locations/a") as a, CloudTpuServer("projects/test/locations/b") as b:
        yield [a, b]


def test_full_zone_falls_over_in_same_turn(servers: list[CloudTpuServer], jobs: PaperJobs) -> None:
    a, b = servers
    a.quota_chips, jobs.demand = 0, (2,)
    provisioner_for(servers, jobs).turn()
    assert (a.queued_states(), len(b.queued_states())) == ({}, 2)


def test_zone_out_of_stock_loses_its_request_to_next_one(
    servers: list[CloudTpuServer], jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=lambda: 1.7e9, monotonic=lambda: 0.0)
    monkeypatch.setattr(provisioner_module, "time", clock)
    a, b = servers
    a.in_stock, jobs.demand = False, (1,)
    provisioner = provisioner_for(servers, jobs, max_wait_s=600.0, most=2)
    for now in (0.0, 10.0, 620.0, 1219.0):
        clock.monotonic, clock.time = (lambda now=now: now), (lambda now=now: 1.7e9 + now)
        provisioner.turn()
        a.advance()
    assert a.queued_states() == {}
    assert list(b.queued_states().values()) == ["ACCEPTED"]
    jobs.demand, a.in_stock = (2,), True
    clock.monotonic, clock.time = (lambda: 1225.0), (lambda: 1.7e9 + 1225.0)
    provisioner.turn()
    assert len(a.queued_states()) == 1, "the preferred one is asked again"


def test_report_tells_what_is_asked_and_held_at_what_price(servers: list[CloudTpuServer], jobs: PaperJobs) -> None:
    a = servers[0]
    a.quota_chips, jobs.demand = 16, (1,)
    provisioner = provisioner_for(servers, jobs, prices=read_prices('[v6e."*"]\nspot = 0.5\n[v6e.a]\nspot = 0.75', "p"))
    provisioner.turn()
    a.advance(2)
    jobs.demand, jobs.joined = (1,), joined_ones(a, in_use=True)
    provisioner.turn()
    report = jobs.reported
    assert report is not None
    batches = sorted(report.batches, key=lambda batch: batch.source)
    assert [replace(batch, since=0.0) for batch in batches] == [
        SliceBatch(TYPE, "a", "spot", True, 1, 16, 0.0, 12.0),
        SliceBatch(TYPE, "b", "spot", False, 1, 16, 0.0, 8.0),
    ]
    assert all(abs(time.time() - batch.since) < 60 for batch in batches)
    (trouble,) = report.troubles
    assert (trouble.source, trouble.failures) == ("a", 1)
    assert "quota: 16 + 16 chips of 16" in trouble.last


def test_unreachable_zone_keeps_nothing_from_the_others(
    servers: list[CloudTpuServer], jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = servers
    provisioner = provisioner_for(servers, jobs)
    provisioner.turn()
    be_brief(monkeypatch, "queued_slices")
    a.fail(grpc.StatusCode.UNAVAILABLE, times=100)
    jobs.demand = (1,)
    provisioner.try_turn()
    assert "can't be asked: ServiceUnavailable" in capsys.readouterr().err
    assert (a.queued_states(), len(b.queued_states())) == ({}, 1)


def test_full_reservation_is_named_with_its_flag(
    server: CloudTpuServer, jobs: PaperJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    reservation = f"{server.location}/reservations/res"
    server.reservations, jobs.demand = {reservation: 8}, (1,)
    provisioner = provisioner_for([server], jobs, sources=(Source.reserved(reservation),))
    for _ in range(2):
        provisioner.turn()
        server.advance()
    assert f"reservation {reservation} is full (--reservation {reservation})" in capsys.readouterr().out


def test_reservation_and_budget_hold_against_the_api(server: CloudTpuServer, jobs: PaperJobs) -> None:
    reservation = f"{server.location}/reservations/res"
    server.reservations = {reservation: 32}
    sources = Source.reserved(f"{reservation}:32"), Source(server.location, Market.SPOT)
    provisioner, jobs.demand = provisioner_for([server], jobs, sources=sources, budget=48, most=None), (1, 1, 1, 1)
    for _ in range(3):
        provisioner.turn()
        server.advance()
    assert sorted(server.queued(name).reservation_name for name in server.queued_states()) == [
        "",
        reservation,
        reservation,
    ]


def test_foreign_resources_are_never_touched(server: CloudTpuServer, jobs: PaperJobs) -> None:
    server.add_queued("iris-ann-v6e-16-looks-like-it", TYPE)
    server.set_queued("iris-ann-v6e-16-looks-like-it", Queued.FAILED)
    make(server, jobs).turn()
    assert server.count("DeleteQueuedResource") == 0


def ends_after(monkeypatch: pytest.MonkeyPatch, *events: BaseException | None) -> None:
    """Each pause of a provisioner passes at once, or ends with an error."""
    coming = iter(events)

    def pause(_: float) -> None:
        if (event := next(coming)) is not None:
            raise event

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=pause)
    monkeypatch.setattr(provisioner_module, "time", clock)


def test_second_provisioner_of_one_name_waits_for_the_first(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.demand = (1,)
    make(server, jobs).turn()
    with pytest.raises(ProvisionerTakenError):
        make(server, jobs).run(once=True)
    ends_after(monkeypatch, None, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make(server, jobs).run()
    assert capsys.readouterr().err.count("another provisioner is named ann: process ") == 1
    assert server.count("CreateQueuedResource") == 1
    assert jobs.holder is not None, "the waiting one's end does not end the other's lease"


def test_controller_leases_a_name_to_one_process(world: ControllerInProcess) -> None:
    jobs = Jobs()
    jobs.lease("iris", "process 1 of a", 60.0)
    with pytest.raises(ProvisionerTakenError, match=r"named iris: process 1 of a\."):
        jobs.lease("iris", "process 2 of b", 60.0)


def test_controller_tells_which_gangs_wait_and_why_says_whose_chips_come_back(world: ControllerInProcess) -> None:
    jobs = Jobs()
    gangs, joined = jobs.look()
    assert gangs == []
    world.submit("first", slices=(len(joined) + 1,), user="ann")
    world.submit("second", slices=(len(joined) + 2,), user="ann")
    world.iris("cluster", "limits", "ann", "--priority", "interactive", "--chips", str(8 * (len(joined) + 1)))
    found = wait_until(lambda: jobs.look()[0])
    assert [(one.job_id, one.missing, one.there, one.may_take) for one in found] == [
        ("first", 1, len(joined), True),
        ("second", len(joined) + 2, 0, False),
    ]
    text = "takes 32 chips back for 1 v4-16 for first: once a, b are deleted, res in here is asked"
    jobs.report(CapacityReport("iris", ("v4-16",), taken_back=(("v4-16", text),)))
    wait_until(lambda: f"provisioner iris {text}" in world.iris("why", "first").stdout)


def test_taint_of_provisioner_that_has_died_expires(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provisioner_module, "CLOSED_S", 1.0)
    jobs = Jobs()
    name = next(iter(jobs.look()[1]))
    jobs.close(name)
    assert jobs.look()[1][name].closed
    wait_until(lambda: not jobs.look()[1][name].closed)


def test_slow_turn_asks_for_nothing_once_another_has_the_name(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.demand, now = (1,), [0.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: now[0])
    monkeypatch.setattr(provisioner_module, "time", clock)
    provisioner = make(server, jobs)
    look = jobs.look

    def look_slowly() -> Any:
        now[0] += 1000.0
        jobs.holder = "process 2 of b"
        return look()

    monkeypatch.setattr(jobs, "look", look_slowly)
    with pytest.raises(ProvisionerTakenError, match="process 2 of b"):
        provisioner.turn()
    assert server.count("CreateQueuedResource") == 0


@pytest.mark.parametrize(("end", "is_missed"), [(KeyboardInterrupt(), False), (VersionMismatchError("new"), True)])
def test_only_provisioner_that_ends_in_order_leaves_its_name(
    server: CloudTpuServer, jobs: PaperJobs, monkeypatch: pytest.MonkeyPatch, end: BaseException, is_missed: bool
) -> None:
    ends_after(monkeypatch, end)
    with pytest.raises(type(end)):
        make(server, jobs).run()
    assert (jobs.holder is not None) == is_missed
    jobs.holder = None
    make(server, jobs).run(once=True)
    assert jobs.holder is None


def test_compute_engine_falls_over_on_stock_out_and_replaces_taken_slice(jobs: PaperJobs) -> None:
    zones = "us-central1-c", "us-east5-a"
    with ComputeServer(zone=zones[0]) as a, ComputeServer(zone=zones[1]) as b:
        clouds = [ComputeEngine(server.location, server.address) for server in (a, b)]
        sources = tuple(Source(server.location, Market.SPOT) for server in (a, b))
        settings = Settings("ann", (get_tpu_config("v7x-16"),), sources, least=0, most=2, idle_s=0.0)
        provisioner = Provisioner(settings, clouds, jobs, HostSettings("", {OWNER_LABEL: "ann"}, "#!/bin/sh"))
        jobs.type, jobs.demand, a.in_stock = "v7x-16", (1,), False
        for server in (a, a, b, b):
            provisioner.turn()
            server.advance()
        assert (a.statuses(), list(b.statuses().values())) == ({}, [["RUNNING"] * 2])
        (name,) = b.statuses()
        jobs.demand, jobs.joined = (), {name: Joined(True, in_use=True)}
        provisioner.turn()
        b.take(name)
        jobs.demand, jobs.joined = (1,), {name: Joined(False, in_use=True)}
        provisioner.turn()
        b.advance()
        assert [found for found in b.statuses() if found != name] == list(b.statuses()), "the broken one is gone"
        assert len(b.statuses()) == 1
