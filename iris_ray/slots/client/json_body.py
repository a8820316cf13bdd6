"""JSON that is parsed where it is used."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonBody:
    """The JSON object of a request. A model gets it as a dict, which its own process parses.

    Attributes:
        data: the JSON.
        model: what the field ``model`` is to be.
    """

    data: bytes
    model: str

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return parsed, (self.data, self.model)


def parsed(data: bytes, model: str) -> dict[str, Any]:
    """Return the object."""
    return {**json.loads(data), "model": model}
