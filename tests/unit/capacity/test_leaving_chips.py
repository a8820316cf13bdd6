"""Jobs of lower bands leave slices to a gang of another type: the real Controller and pools, in this process."""

import pytest

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import WorkerStatus
from iris_ray.capacity.calls import CapacityCalls
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted, SharedSlice
from iris_ray.capacity.provisioner import joined_slices
from iris_ray.errors import NotPermittedError
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import LEAST_RUN_S
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
SLICES = tuple(SharedSlice(f"v4-16-{n}", "v4-16", 8) for n in range(3))
WANTED = ChipsWanted("large", 16, SLICES, (("v4-16", 3),), seconds=60.0)


def leave(wanted: ChipsWanted = WANTED, user: str = "ann") -> ChipsLeft:
    return ControllerConnection().ask(CapacityCalls.leave_chips, wanted, user)


def workers() -> list[WorkerStatus]:
    return ControllerConnection().ask_all(ControllerInterface.list_workers)


def demand_of_large() -> WaitingGang | None:
    gangs = ControllerConnection().ask(CapacityCalls.demand)
    return next((gang for gang in gangs if gang.job_id == "large"), None)


@pytest.fixture
def busy(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> ControllerInProcess:
    """Three BATCH jobs run on the slices, and a job waits for a v4-32. Evictions are quick."""
    monkeypatch.setitem(LEAST_RUN_S, BATCH, 0.0)
    world.iris("cluster", "settings", "set", "eviction_grace_s=1")
    ControllerConnection().ask(CapacityCalls.report_capacity, CapacityReport("p", ("v4-16", "v4-32")))
    for number in range(3):
        world.start(f"batch-{number}", priority=BATCH, max_retries_preemption=9)
    world.submit("large", tpu_type="v4-32", priority=INTERACTIVE)
    wait_until(lambda: (gang := demand_of_large()) is not None and gang.may_reserve)
    return world


def test_slices_become_unused_and_stay_so_until_they_are_removed(busy: ControllerInProcess) -> None:
    """The pools of the jobs that leave would keep the slices warm for their return."""
    left = leave()
    assert len(left.slices) == len(left.jobs) == 2
    assert left.why_not == ""
    wait_until(lambda: not any(joined_slices(workers())[name].in_use for name in left.slices))
    gang = demand_of_large()
    assert gang is not None
    assert (gang.removes, gang.may_take, gang.may_reserve) == (left.slices, True, False)
    for job_id in left.jobs:
        assert busy.state(job_id) is JobState.PENDING
        assert "is kept for large" in busy.iris("why", job_id).stdout
    assert [busy.state(f"batch-{n}") for n in range(3)].count(JobState.RUNNING) == 1
    assert leave().slices == left.slices, "a second question changes nothing"


def test_jobs_continue_if_the_slices_are_not_needed(busy: ControllerInProcess) -> None:
    left = leave()
    assert leave(ChipsWanted("large", 0)).slices == ()
    for job_id in left.jobs:
        busy.wait_for_state(job_id, JobState.RUNNING)
    gang = demand_of_large()
    assert gang is not None
    assert gang.removes == ()


def test_end_of_the_job_gives_the_slices_back(busy: ControllerInProcess) -> None:
    left = leave()
    wait_until(lambda: not any(joined_slices(workers())[name].in_use for name in left.slices))
    busy.iris("cancel", "large", "--yes")
    for job_id in left.jobs:
        busy.wait_for_state(job_id, JobState.RUNNING)


def test_slices_are_held_for_a_job_until_they_are_idle(world: ControllerInProcess) -> None:
    for number in range(3):
        world.start(f"small-{number}", priority=PRODUCTION)
    world.submit("large", tpu_type="v4-32", priority=PRODUCTION)
    wait_until(lambda: (gang := demand_of_large()) is not None and gang.may_reserve)
    left = leave()
    assert (len(left.slices), left.is_held, left.jobs) == (2, True, ())
    gang = demand_of_large()
    assert gang is not None
    assert (gang.holds, gang.removes, gang.may_take) == (left.slices, (), True)
    for number in range(3):
        world.iris("cancel", f"small-{number}", "--yes")
    world.start("small-3", priority=PRODUCTION)
    world.submit("small-4", priority=PRODUCTION)
    wait_until(lambda: "is kept for large" in world.iris("why", "small-4").stdout)
    assert not any(joined_slices(workers())[name].in_use for name in left.slices)
    assert leave(ChipsWanted("large", 0)).slices == ()
    world.wait_for_state("small-4", JobState.RUNNING)


def test_only_operators_may_have_jobs_leave(busy: ControllerInProcess) -> None:
    busy.iris("cluster", "settings", "set", "operators=ann")
    with pytest.raises(NotPermittedError, match="have jobs leave slices for another type"):
        leave(user="bob")
    assert leave().slices
