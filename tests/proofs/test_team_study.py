"""Weeks of three teams in virtual time: what a team has a right to, it gets within a notice and the grace."""

import tomllib
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from iris_ray.model.workers import TPU
from iris_ray.scheduler.eviction_costs import GRACE_S
from iris_ray.study.description import read_study
from iris_ray.study.history import AttemptHistory, History, JobHistory, size_of

STUDY = Path(__file__).parents[2] / "benchmarks" / "teams.toml"
DAY_S = 86_400.0
QUOTA = 128.0
"""Of each of these teams, in chips."""
LOOKS_S = 30.0
"""So much time may pass until a plan is made, and until those that left are gone."""


def while_in_quota_s(job: JobHistory, team: Collection[AttemptHistory], quota: float, until: float) -> float:
    """How long a job waited while its team, with it, was within its quota; seconds."""
    waited = job.submitted_at, job.assigned_at or until
    held = [(one.assigned_at, one.freed_at or until, one.held.get(TPU, 0.0)) for one in team]
    turns = sorted({*waited, *(at for begin, end, _ in held for at in (begin, end) if waited[0] < at < waited[1])})
    return sum(
        after - at
        for at, after in pairwise(turns)
        if sum(chips for begin, end, chips in held if begin <= at < end) + size_of(job.spec) <= quota
    )


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.small), pytest.param(14, marks=pytest.mark.proof)]
)
def history(request: pytest.FixtureRequest) -> History:
    study = read_study(tomllib.loads(STUDY.read_text()), lambda name: [])
    study = replace(study, seconds=request.param * DAY_S)
    simulation = study.simulation(study.policies[0])
    simulation.run_until(study.seconds)
    return simulation.history


@pytest.mark.parametrize("team", ["product", "research/speech"])  # of vision, many jobs wait at once
def test_team_reaches_its_quota_within_notice_and_grace(history: History, team: str) -> None:
    until = max(job.submitted_at for job in history.jobs.values())
    attempts = [attempt for attempt in history.attempts if attempt.team == team]
    jobs = [job for job in history.jobs.values() if job.spec.team == team]
    waits = [while_in_quota_s(job, attempts, QUOTA, until) for job in jobs]
    assert len(waits) > 10
    assert max(waits) <= GRACE_S + LOOKS_S


def test_what_is_lent_is_used_and_given_back(history: History) -> None:
    days = max(job.submitted_at for job in history.jobs.values()) / DAY_S
    assert len(history.reclaimed) > 10 * days
