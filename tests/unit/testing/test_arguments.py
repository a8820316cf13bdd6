"""What `SimulatedCluster` refuses."""

import pytest

from iris_ray.errors import InvalidRequestError
from iris_ray.testing.tpu_host import checked_notice


@pytest.mark.parametrize("notice_s", [-1.0, float("nan"), float("inf"), 1e10, 10**100, True, "30"])
def test_invalid_notice_time_is_refused(notice_s: object) -> None:
    with pytest.raises(InvalidRequestError, match="notice_s must be a number of seconds from 0 to 31536000, not "):
        checked_notice(notice_s)


def test_some_hours_or_no_notice_are_accepted() -> None:
    assert [checked_notice(notice_s) for notice_s in (None, 0, 7200)] == [0.0, 0.0, 7200.0]
