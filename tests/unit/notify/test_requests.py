"""Destinations of notifications in requests of jobs: what can't be is refused before anything is connected."""

import pytest

from iris_ray.errors import InvalidRequestError
from tests.support.requests import hello, pod_request, task_request


@pytest.mark.parametrize(
    ("notify", "says"),
    [
        (["irc:x"], "one of http, slack, googlechat, email, command"),
        (["slack:HOOK", "slack:HOOK,lines=3"], "notify has slack:HOOK twice"),
        (["slack:HOOK,on=sometimes"], "on is 'sometimes'"),
    ],
)
def test_odd_destination_is_refused_before_anything_is_connected(notify: list[str], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        pod_request(notify=notify)


def test_chip_hours_are_refused_for_jobs_without_one_gang() -> None:
    assert pod_request(notify=["slack:HOOK,chip-hours=3"]).spec.notify == ("slack:HOOK,chip-hours=3",)
    with pytest.raises(InvalidRequestError, match="only measured for jobs that are one gang"):
        task_request(hello, notify=["slack:HOOK,chip-hours=3"])
