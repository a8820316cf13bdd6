"""Time lost, summed up over jobs and by Google's elastic kinds."""

import pytest

from iris_ray.goodput.core import elastic_seconds, summed_up
from iris_ray.model.goodput import JobTimes, time_lost
from iris_ray.model.time_lost import FailureCause, TimeLost
from tests.unit.model.test_goodput import RUN, attempt

C = FailureCause


def test_time_lost_of_jobs_is_summed_by_cause() -> None:
    one = TimeLost(1, 3.0, 12.0, 1.0, 2.0, 3.0, ((3.0, 1.0),))
    two = TimeLost(2, 11.0, 44.0, 0.0, 5.0, 9.0, ((9.0, 0.0), (2.0, 0.0)))
    total = summed_up([{C.LOST: one}, {C.LOST: two, C.HUNG: one}])
    lost = TimeLost(3, 14.0, 56.0, 1.0, 7.0, 9.0, ((3.0, 1.0), (9.0, 0.0), (2.0, 0.0)))
    assert total == {C.LOST: lost, C.HUNG: one}
    assert total[C.LOST].median_s == 3.0


@pytest.mark.parametrize("cause", [C.LOST, C.GROWN])
def test_elastic_kinds_agree_with_googles_library(cause: FailureCause) -> None:
    """`ElasticGoodputCalculator`, told of the events that MaxText records. Growth waits under a name of its own."""
    first, second = (attempt(number, recorded, 1) for number, recorded in enumerate(RUN["attempts"], 1))
    first.cause, second.assigned_at = cause, 146.0
    lost = time_lost(JobTimes([first, second], ended_at=RUN["ended"], succeeded=True), 1e9)
    theirs = dict(RUN["elastic, by ml-goodput-measurement 0.2.3"])
    if cause is C.GROWN:
        theirs |= {"elastic_slice_down": 0.0, "elastic_scale_up": theirs["elastic_slice_down"]}
    assert elastic_seconds(lost) == pytest.approx(theirs, abs=1e-3)
