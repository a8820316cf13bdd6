"""What a report says of a short history, worked out by hand."""

import pytest

from iris_ray.model.lifecycle import AttemptId
from iris_ray.study.history import AttemptHistory, History, JobHistory
from iris_ray.study.jobs import slice_spec, tasks_spec
from iris_ray.study.report import percentile, report_on


def attempt(
    user: str, assigned: float, began: float | None, ended: float | None, freed: float | None, **more: object
) -> AttemptHistory:
    """An attempt on a v4-16, which has eight chips."""
    held, kept_s = {"TPU": 8.0}, more.pop("kept_s", 0.0)
    found = AttemptHistory(AttemptId(f"of {user}", 1), user, False, ("v4-16-0",), held, assigned, began, ended, freed)
    found.kept_s = kept_s  # type: ignore[assignment]
    for name, value in more.items():
        setattr(found, name, value)
    return found


def history() -> History:
    """Sixteen chips for 1,000 s, then eight."""
    jobs = {
        "a": JobHistory(slice_spec("a", "v4-16", user="ann"), 0.0, 0.0, 700.0, "SUCCEEDED"),
        "b": JobHistory(slice_spec("b", "v4-16", user="bob"), 100.0, 800.0, None),
        "c": JobHistory(slice_spec("c", "v4-16", 2, user="bob"), 500.0, None, None),
        "d": JobHistory(slice_spec("d", "v4-16", user="ann"), 600.0, None, 900.0, "KILLED"),
    }
    attempts = [
        attempt("ann", 0.0, 100.0, 400.0, 410.0, kept_s=200.0, outcome="stopped"),
        attempt("ann", 410.0, 420.0, 700.0, 710.0, kept_s=280.0, outcome="success"),
        attempt("ann", 0.0, 10.0, 500.0, 500.0, spare=True, outcome="dropped"),
        attempt("bob", 800.0, 850.0, None, None),
    ]
    return History(jobs, attempts, [(0.0, {"TPU": 16.0}), (1000.0, {"TPU": 8.0})])


def test_waits_include_jobs_still_waiting() -> None:
    found = report_on(history(), until=2000.0)
    assert (found.waits.jobs, found.waits.waiting) == (4, 1)
    assert (found.waits.p50_s, found.waits.longest_s) == (300.0, 1500.0)  # of 0, 300, 700, 1,500
    assert found.waits_by_user["bob"].longest_s == 1500.0
    assert found.waits_by_size[8.0].jobs == 3
    assert (found.waits_by_cpus, found.cpu_hosts) == ({}, None)
    assert found.finished == {"KILLED": 1, "SUCCEEDED": 1}


def test_use_adds_up_to_all_hosts() -> None:
    use = report_on(history(), until=2000.0).use
    total = 16.0 * 1000 + 8.0 * 1000
    assert use.lost == pytest.approx(8.0 * 100 / total)
    assert use.useful == pytest.approx(8.0 * (200 + 280 + 1150) / total)
    assert use.starting == pytest.approx(8.0 * (110 + 20 + 50) / total)
    assert use.spare == pytest.approx(8.0 * 500 / total)
    assert use.useful + use.lost + use.starting + use.spare + use.idle == pytest.approx(1.0)


def test_hosts_without_chips_are_told_apart() -> None:
    both = history()
    both.capacity = [(0.0, {"TPU": 16.0, "CPU": 10.0})]
    both.jobs["e"] = JobHistory(tasks_spec("e", 2, 4.0, user="eve"), 0.0, 0.0, None)
    both.attempts += [
        attempt("eve", 0.0, 0.0, 1000.0, 1000.0, held={"CPU": 5.0}, kept_s=900.0, beside_tpus=False),
        attempt("eve", 0.0, 0.0, 1000.0, 1000.0, held={"CPU": 5.0}, kept_s=1000.0),
    ]
    found = report_on(both, until=2000.0)
    assert found.cpu_hosts is not None
    assert found.cpu_hosts.useful == pytest.approx(0.225)
    assert found.cpu_hosts.lost == pytest.approx(0.025)
    assert (found.waits_by_size[8.0].jobs, found.waits_by_cpus[8.0].jobs) == (3, 1)


def test_shares_count_what_users_held_in_period() -> None:
    assert report_on(history(), until=2000.0, since=700.0).shares == {
        "ann": pytest.approx(10 / 1210),
        "bob": pytest.approx(1200 / 1210),
    }


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.0), (51, 3.0), (90, 4.0), (100, 4.0)])
def test_percentile_interpolates(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == value
    assert percentile([], percent) == 0.0
