"""The cluster's key-value store, for a cluster in this process."""

import asyncio
from collections.abc import Callable


class Store:
    """The cluster's key-value store, as a dictionary.

    Attributes:
        values: by key.
        before_write: called before anything changes.
        newest_first: of the values that are set at the same time, the last one is written first.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.before_write: Callable[[], None] = lambda: None
        self.newest_first = False
        self._being_set = 0

    async def set(self, key: str, value: bytes | None) -> None:
        self._being_set += 1
        for _ in range(100 - self._being_set if self.newest_first else 0):
            await asyncio.sleep(0)
        self._being_set -= 1
        if value is None:
            self.delete(key)
        else:
            self.put(key, value)

    async def add(self, key: str, value: bytes) -> bool:
        return self.put_new(key, value)

    async def fetch(self, key: str) -> bytes | None:
        return self.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.before_write()
        self.values[key] = value

    def put_new(self, key: str, value: bytes) -> bool:
        self.before_write()
        is_new = key not in self.values
        self.values.setdefault(key, value)
        return is_new

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.before_write()
        self.values.pop(key, None)

    def delete_all(self, prefix: str) -> None:
        for key in self.keys(prefix):
            self.delete(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in list(self.values) if key.startswith(prefix)]

    def items(self, prefix: str) -> dict[str, bytes]:
        return {key: self.values[key] for key in self.keys(prefix)}
