"""What a command says when its cluster ends meanwhile. Ray ends the process a minute later, in words of its own."""

import socket
from types import SimpleNamespace

import click
import pytest
import ray
from ray.exceptions import ActorDiedError

from iris_ray.cli import address
from iris_ray.cli.run import failure_told
from tests.support.command_line import address_of_nobody
from tests.support.waiting import wait_until


def test_command_says_that_the_head_is_gone_and_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        printed.append(capsys.readouterr().err)
        return "".join(printed)

    printed: list[str] = []
    monkeypatch.setattr(address, "LOOK_AT_HEAD_S", 0.01)
    monkeypatch.setattr(address, "HEAD_AWAY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as head:
        place = head.getsockname()
        where = f"127.0.0.1:{place[1]}"
        with address.head_watched(where):
            head.close()
            wait_until(lambda: f"the head of the Ray cluster at {where} has not answered for" in said())
            assert "start it again, then give the same command" in said()
            with socket.create_server(place):
                wait_until(lambda: f"the head of the Ray cluster at {where} answers again" in said())
    assert said().count("\n") == 2


@pytest.mark.parametrize("lives", [False, True])
def test_run_tells_a_lost_cluster_from_a_lost_process(
    lives: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        where = f"127.0.0.1:{head.getsockname()[1]}" if lives else address_of_nobody()
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=where))
        with pytest.raises(click.exceptions.Exit), failure_told("train"):
            raise ActorDiedError
    said = capsys.readouterr().err
    assert (f"train was lost with the Ray cluster at {where}, which has ended. If" in said) == (not lives)
    assert ("train was lost: ActorDiedError" in said) == lives
    assert "the same command" in said
