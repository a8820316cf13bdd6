"""What `IrisClient` refuses by name before it asks the Controller."""

from typing import Any

import pytest

from iris_ray import IrisClient
from iris_ray.errors import InvalidRequestError


@pytest.mark.parametrize("value", ["3", -1, True, 1.0, [1]])
@pytest.mark.parametrize("name", ["task_index", "attempt", "offset", "max_bytes", "tail_lines"])
def test_invalid_task_attempt_or_byte_is_refused_by_name(name: str, value: Any) -> None:
    client = IrisClient.__new__(IrisClient)  # what is refused at once needs no cluster
    with pytest.raises(InvalidRequestError, match=rf"{name} is .*; give an int of 0 or more"):
        client.fetch_task_logs("job-1", **{"task_index": 0, name: value})
    if name == "task_index":
        with pytest.raises(InvalidRequestError, match="task_index is"):
            client.task_status("job-1", value)


@pytest.mark.parametrize("address", [None, 6379, "", "10.0.0.2"])
def test_invalid_head_address_is_refused(address: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"the address is .*; give HOST:PORT"):
        IrisClient.remote(address)


@pytest.mark.parametrize("workspace", [5, b".", "no/such/directory"])
def test_invalid_workspace_directory_is_refused(workspace: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"workspace is .*, which is not a directory"):
        IrisClient.remote("10.0.0.2:6379", workspace)
