"""How user objects travel: pickled until they arrive."""

import pickle

import pytest
from ray import cloudpickle

from iris_ray.actors.protocol.payloads import Pickled, PickledError, rebuild_error
from iris_ray.errors import RemoteUserError


class TwoPartError(Exception):
    """Pickles, but can't be unpickled: its constructor takes arguments that its args no longer hold."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_value_becomes_itself_on_arrival(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(Pickled(cloudpickle.dumps({"a": 1})), protocol)) == {"a": 1}
    assert pickle.loads(pickle.dumps([Pickled(cloudpickle.dumps(n)) for n in (1, 2)])) == [1, 2]


def test_pickled_error_becomes_users_exception_on_arrival() -> None:
    arrived = pickle.loads(pickle.dumps(PickledError(cloudpickle.dumps(KeyError("k")))))
    assert (type(arrived), arrived.args) == (KeyError, ("k",))


@pytest.mark.parametrize(
    "payload",
    [
        b"no pickle",
        cloudpickle.dumps(TwoPartError("a", "b")),
        cloudpickle.dumps("text"),
        cloudpickle.dumps(SystemExit(1)),
    ],
    ids=["garbage", "not rebuildable", "no exception", "base exception"],
)
def test_unrebuildable_error_gets_a_stand_in(payload: bytes) -> None:
    assert isinstance(rebuild_error(payload), RemoteUserError)
