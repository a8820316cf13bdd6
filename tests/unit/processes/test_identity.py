"""A process is one process, though its pid is used again."""

import signal

import pytest

from iris_ray.actors.host.exit_status import WatchedProcess
from tests.support.processes import Nursery, alive, earlier_than, identity_of


def test_signal_for_ended_process_reaches_no_later_one_with_its_pid(nursery: Nursery) -> None:
    stranger = nursery.sleeper()
    ended = earlier_than(stranger)
    ended.signal(signal.SIGKILL)
    assert not ended.exists()
    assert not ended.runs()
    assert ended.open_pidfd() is None
    assert alive(stranger)
    with pytest.raises(RuntimeError, match="has ended before it got one"):
        WatchedProcess(ended)


def test_signal_ends_process_itself(nursery: Nursery) -> None:
    process = nursery.sleeper()
    this = identity_of(process)
    assert this.exists()
    this.signal(signal.SIGKILL)
    nursery.reap(process)
    assert not this.exists()
    this.signal(signal.SIGKILL)  # to nobody
