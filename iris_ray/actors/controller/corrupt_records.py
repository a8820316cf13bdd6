"""Records that can't be read are kept apart, under ``corrupt/``, so that they keep no Controller from starting.

The job of such a record is lost. The others come back.
"""

import logging
import pickle
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar

from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.errors import UnknownRecordError

logger = logging.getLogger(__name__)

MOST_KEPT = 100
"""Records that are kept apart; more are only named in the log."""
_PREFIX = "corrupt/"

Made = TypeVar("Made")


class CorruptRecords:
    """Those that were found by this reader, and those that earlier Controllers have kept apart.

    Args:
        store: where they are.
    """

    def __init__(self, store: ClusterStore) -> None:
        self._store = store
        self._found: dict[str, tuple[str, Mapping[str, bytes]]] = {}  # name → why, and its values by key

    @property
    def why(self) -> Mapping[str, str]:
        """Why each can't be read, by the id of its job, or by what else it is."""
        return {name: why for name, (why, _) in self._found.items()}

    def read(self, name: str, values: Mapping[str, bytes], make: Callable[[], Made]) -> Made | None:
        """Return what is made of a record; None if nothing can be made of it, which is remembered.

        Args:
            name: the id of its job, or what else it is.
            values: its values by key, which are kept apart if need be.
            make: reads them.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it. It is not corrupt.
        """
        try:
            return make()
        except UnknownRecordError:
            raise
        except Exception as error:
            logger.exception("the record of %s can't be read; it is left out", name)
            self.found(name, values, error)
            return None

    def found(self, name: str, values: Mapping[str, bytes], error: Exception | str) -> None:
        """Remember a record that is of no use."""
        why = error if isinstance(error, str) else f"{type(error).__name__}: {str(error)[:500]}"
        self._found[name] = why, values

    def keep(self) -> None:
        """Put what was found apart, and learn what earlier Controllers have put there."""
        there = self._store.items(_PREFIX)
        for name, (why, values) in islice(self._found.items(), max(0, MOST_KEPT - len(there))):
            self._store.put(f"{_PREFIX}{name}", pickle.dumps((why, dict(values))))
        for key, value in there.items():
            self._found.setdefault(key.removeprefix(_PREFIX), (_why(value), {}))


def _why(kept: bytes) -> str:
    try:
        return str(pickle.loads(kept)[0])
    except Exception as error:
        return f"what was kept of it can't be read either: {error}"
