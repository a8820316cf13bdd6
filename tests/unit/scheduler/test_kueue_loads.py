"""The loads of Kueue's performance tests in virtual time, a part of their queues. `benchmarks/kueue.py` has all."""

import importlib
import statistics
from typing import Any

import pytest

kueue: Any = importlib.import_module("benchmarks.kueue")
LOADS = kueue.read_loads()


@pytest.mark.parametrize(
    ("name", "count", "cpus", "hosts"),
    [("baseline", 15_000, 600, 600), ("large-scale", 50_000, 20_000, 20_000), ("tas", 15_000, 600, 640)],
)
def test_loads_have_kueues_counts_and_quotas(name: str, count: int, cpus: float, hosts: int) -> None:
    load = LOADS[name]
    assert (load.count, load.cpus, sum(1 for _ in kueue.hosts_of(load))) == (count, cpus, hosts)
    chips = kueue.teams_of(load)
    unit = kueue.GPUS_PER_CPU if load.racks else 1
    kind = kueue.GPU if load.racks else kueue.SLICE
    assert sum(chips.chips(f"cohort-{number}", kind) for number in range(load.cohorts)) == cpus * unit


@pytest.mark.parametrize("name", LOADS)
def test_workloads_of_all_classes_take_kueues_quota(name: str) -> None:
    jobs = [job for _, _, job in kueue.arrivals(LOADS[name].part(0.001), teams=True)]
    unit = kueue.GPUS_PER_CPU if LOADS[name].racks else 1
    taken = {job.most_tasks * sum(job.resources.values()) / unit for job in jobs}
    assert taken == {1, 5, 20}


@pytest.mark.parametrize(("name", "part"), [("baseline", 0.07), ("large-scale", 0.01), ("tas", 0.03)])
def test_part_of_load_is_admitted_within_kueues_limits(name: str, part: float) -> None:
    load = LOADS[name].part(part)
    replay = kueue.Replay(load, cpu_clock=lambda: 0.0)
    result = replay.run()
    assert result.admitted == load.count
    assert result.wall_s <= load.wall_s
    assert 100 * result.used / load.cpus / result.wall_s >= load.usage
    assert [one.name for one in load.workloads if result.average_s(one.name) > one.limit_s] == []
    replay.state.check()


@pytest.mark.parametrize(("name", "part"), [("baseline", 0.07), ("tas", 0.07)])
def test_large_first_band_jobs_wait_less_than_small_last_band(name: str, part: float) -> None:
    load = LOADS[name].part(part)
    result = kueue.Replay(load, cpu_clock=lambda: 0.0).run()
    bands = {kueue.BANDS[one.priority] for one in load.workloads}
    waits = [
        statistics.mean(result.average_s(one.name) for one in load.workloads if kueue.BANDS[one.priority] is band)
        for band in sorted(bands)
    ]
    assert waits == sorted(waits)
