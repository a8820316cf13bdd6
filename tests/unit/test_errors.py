"""Every error crosses processes intact, and is drawn in the tree of `iris_ray.errors`."""

import inspect
import pickle

import pytest

from iris_ray import errors
from iris_ray.errors import IrisError

ERRORS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, IrisError)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_errors_cross_processes_intact(error: type[IrisError]) -> None:
    copy = pickle.loads(pickle.dumps(error("what happened")))
    assert type(copy) is error
    assert str(copy) == "what happened"


def test_errors_tree_shows_every_error() -> None:
    drawn = errors.__doc__ or ""
    assert [e.__name__ for e in ERRORS if e.__name__ not in drawn] == []
