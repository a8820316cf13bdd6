"""A team takes back what it has lent, on real processes."""

import time
from pathlib import Path

import pytest

from iris_ray import release, run_on_pod_ray
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.model.teams import Teams
from iris_ray.teams.calls import TeamCalls
from iris_ray.teams.core import read_teams
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import result_of, the_controller
from tests.support.waiting import wait_until

TEAMS = """
    [teams.ads]
    users = ["*"]
    quota.v4-16 = 8
    [teams.vision]
    users = ["*"]
    quota.v4-16 = 16
"""
"""One has a right to one of the three slices, the other to two."""


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_borrower_hears_of_reclaimed_slice_and_runs_later(cluster: SimulatedCluster, tmp_path: Path) -> None:
    directory = tmp_path

    def work() -> int:
        import iris_ray

        me = iris_ray.get_job_info()
        assert me is not None
        (directory / f"{me.job_id} {me.attempt} {me.task_index}").touch()
        while not (directory / "finish").exists():
            if notice := iris_ray.preemption_notice():
                notice.saved()
                time.sleep(600)  # until it is stopped
            time.sleep(0.05)
        return me.attempt

    release()
    assert result_of(run_on_pod_ray.remote(lambda: "starts the Controller", "v4-16", keep_warm=0))
    controller = the_controller()
    controller.ask(TeamCalls.set_teams, list(read_teams(TEAMS)[0]), Teams().version, "operator")
    borrowers = [run_on_pod_ray.remote(work, "v4-16", team="vision", keep_warm=0) for _ in range(3)]
    wait_until(lambda: len(list(directory.glob("* 1 *"))) == 6)
    jobs = {path.name.split()[0] for path in directory.iterdir()}
    lender = run_on_pod_ray.remote(lambda: "back", "v4-16", team="ads", keep_warm=0)
    assert result_of(lender, 90) == ["back"] * 2
    wait_until(lambda: len(list(directory.glob("* 2 *"))) == 2, 60)
    (directory / "finish").touch()
    assert sorted(result_of(job, 90) for job in borrowers) == [[1, 1], [1, 1], [2, 2]]
    evictions = [controller.ask(ControllerInterface.job_status, job).evictions for job in jobs]
    assert sorted(evictions) == [0, 0, 1]
    teams = controller.ask(TeamCalls.list_teams)
    controller.ask(TeamCalls.set_teams, [], teams.version, "operator")
