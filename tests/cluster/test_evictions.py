"""A job of a higher band takes a slice from a job of a lower one, on real processes."""

import threading
from typing import Any

import pytest

from iris_ray import release, run_on_pod_ray
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.model.options import PriorityBand
from iris_ray.testing import SimulatedCluster
from tests.cluster.test_notices import steps
from tests.support.gangs import Trace, job_view, result_of, the_controller
from tests.support.waiting import wait_until

LEAST_RUN_S = 120.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_batch_job_saves_yields_to_production_and_returns(cluster: SimulatedCluster, trace: Trace) -> None:
    """It has run for the two minutes that a BATCH attempt may; another job of its band uses the other slices."""
    directory = trace.directory

    def save(notice: Any, facts: dict[str, Any], step: int) -> None:
        (directory / f"saved-{facts['index']}").write_text(str(step + 1))
        (directory / f"kind-{facts['index']}").write_text(notice.kind.name)
        notice.saved()
        threading.Event().wait(600)  # until it is stopped

    release()
    batch: dict[str, Any] = {"priority": PriorityBand.BATCH, "max_retries_preemption": 1, "max_retries_failure": 0}
    long = run_on_pod_ray.remote(trace.gang(steps(directory, save)), "v4-16", num_slices=3, **batch)
    wait_until(lambda: len(trace.starts(1)) == 6)
    first = trace.starts(1)[0]["job"]
    urgent = run_on_pod_ray.remote(lambda: "urgent", "v4-16", priority=PriorityBand.PRODUCTION, keep_warm=0)
    assert result_of(urgent, LEAST_RUN_S + 120) == ["urgent"] * 2
    assert {(directory / f"kind-{index}").read_text() for index in range(6)} == {"EVICTION"}
    wait_until(lambda: len(trace.starts(2)) == 6, 120)
    (directory / "finish").touch()
    assert [attempt for attempt, _ in result_of(long, 120)] == [2] * 6
    view = job_view(first)
    assert (view.failures, view.preemptions) == (0, 0)
    assert the_controller().ask(ControllerInterface.job_status, first).evictions == 1
