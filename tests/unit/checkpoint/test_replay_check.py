"""One flipped bit is found, and its host named: on real JAX over several processes."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iris_ray.checkpoint.replay_check import DIGEST_BYTES, RUNS, compared
from tests import support

SCRIPT = Path(support.__file__).with_name("replayed.py")


@pytest.fixture(scope="module", params=[3, 2], ids="{} processes".format)
def found(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    """How many processes there are, and what each has found. The last but one is at fault."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(SCRIPT)]
    running = [
        subprocess.Popen([*command, str(i), str(request.param), coordinator], stdout=subprocess.PIPE, text=True)
        for i in range(request.param)
    ]
    try:
        lines = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return request.param, [json.loads(text.split("found ", 1)[1]) for text in lines]


def test_sound_devices_agree_in_every_bit(found: tuple[int, list[dict[str, Any]]]) -> None:
    processes, told = found
    assert {one["sound"]["words"] for one in told} == {f"{2 * processes} devices agree in every bit"}
    assert all("is spread over processes" in one["refused"] for one in told)


def test_flipped_bit_names_host_if_majority_is_sound(found: tuple[int, list[dict[str, Any]]]) -> None:
    """Of two replicas nobody can say which is right."""
    processes, told = found
    assert all(one == told[0] for one in told), "all processes find the same"
    flip, state = told[0]["flip"], told[0]["state"]
    if processes == 2:
        assert (flip["suspects"], flip["unclear"]) == ([], ["result[0]['weights']"])
        assert state["unclear"][0] == "state['weights']"
        return
    assert [(one["process"], one["device"]) for one in flip["suspects"]] == [(1, 0), (1, 1)]
    assert {one["host"] for one in flip["suspects"]} == {socket.gethostname()}
    assert flip["suspects"][0]["why"] == "result[0]['weights'] differs from 4 of 6"
    assert {one["process"] for one in state["suspects"]} == {1}
    assert state["suspects"][0]["why"].startswith("state['weights'] differs from 4 of 6, ")


def test_device_that_contradicts_itself_needs_no_majority(found: tuple[int, list[dict[str, Any]]]) -> None:
    processes, told = found
    (suspect,) = told[0]["once"]["suspects"]
    assert suspect["process"] == processes - 2
    assert suspect["why"] == "result[0]['weights'] differs from run to run"
    assert told[0]["once"]["unclear"] == []


def test_tie_without_steady_device_is_no_verdict() -> None:
    digests = np.zeros((2, RUNS, 1, DIGEST_BYTES), np.uint8)
    digests[0, 1] = 1
    report = compared(digests, ["result"], ["a worker 0", "a worker 1"])
    assert [str(one) for one in report.suspects] == ["a worker 0 (process 0, device 0): result differs from run to run"]
    digests[0] = 1
    report = compared(digests, ["result"], ["a worker 0", "a worker 1"])
    assert str(report) == "no majority agrees on result"
