"""Each key opens what it is for, within its limits."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from iris_ray.errors import InvalidSlotError
from iris_ray.slots.front import ApiKey, HttpFront
from tests.support.http_fronts import ALICE, Client, asked, bearer, serve, status_for
from tests.support.waiting import wait_until


def test_other_machines_need_a_key(client: Any) -> None:
    with pytest.raises(InvalidSlotError, match=r"everybody who reaches 0\.0\.0\.0"):
        HttpFront(client, host="0.0.0.0")


@pytest.mark.parametrize(
    "headers", [{}, bearer("b" * 20), {"Authorization": "Basic abc"}, bearer("\xff" * 20)], ids=str
)
def test_caller_without_its_key_is_refused(client: Any, headers: dict[str, str]) -> None:
    with HttpFront(client, keys=[ALICE]) as front:
        status, said = status_for(front, "POST", "/v1/completions", headers)
        assert status == 401
        assert json.loads(said)["error"]["code"] == "invalid_api_key"
        assert status_for(front, "GET", "/health", {})[0] == 200
        assert status_for(front, "POST", "/v1/completions", {"Authorization": f"bearer {ALICE.secret}"})[0] == 200


def test_key_opens_its_own_models_only(client: Client) -> None:
    client.models = ["m", "n"]
    with serve(client, keys=[ApiKey("bob", "b" * 20, models=["n"])], aliases={"gpt": "n", "old": "m"}) as front:
        status, said = status_for(front, "POST", "/v1/completions", bearer("b" * 20))
        assert status == 403
        assert "may not use the model 'm'" in json.loads(said)["error"]["message"]
        _, said = status_for(front, "GET", "/v1/models", bearer("b" * 20))
        assert [model["id"] for model in json.loads(said)["data"]] == ["n", "gpt"]
        assert status_for(front, "GET", "/v1/models/m", bearer("b" * 20))[0] == 404


def test_key_has_its_limits_alone(client: Client) -> None:
    keys = [ApiKey("bob", "b" * 20, at_a_time=1), ApiKey("eve", "e" * 20, per_minute=2), ALICE]
    with serve(client, keys=keys) as front, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(status_for, front, "POST", "/v1/completions", bearer("b" * 20), asked("wait"))
        wait_until(lambda: client.began)
        status, said = status_for(front, "POST", "/v1/completions", bearer("b" * 20))
        assert status == 429
        assert "key bob has 1 requests that run" in json.loads(said)["error"]["message"]
        found = [status_for(front, "POST", "/v1/completions", bearer("e" * 20))[0] for _ in range(3)]
        assert found == [200, 200, 429]
        assert status_for(front, "POST", "/v1/completions", bearer(ALICE.secret))[0] == 200
        front.set_access([ALICE])
        assert status_for(front, "POST", "/v1/completions", bearer("e" * 20))[0] == 401
        front.close(grace_s=0.0)
        assert waits.result()[0] == 503


def test_key_for_some_models_reads_no_metrics_of_others(client: Client) -> None:
    client.models = ["m", "secret"]
    with serve(client, keys=[ALICE, ApiKey("bob", "b" * 20, models=["m"])]) as front:
        status, said = status_for(front, "GET", "/metrics", bearer("b" * 20))
        assert (status, "secret" in said, "alice" in said) == (403, False, False)
        assert "secret" in status_for(front, "GET", "/metrics", bearer(ALICE.secret))[1]
