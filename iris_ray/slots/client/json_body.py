"""The payload of a request to the HTTP server, as the model gets it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iris_ray.errors import InvalidSlotError


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
    return payload_of({**json.loads(data), "model": model})


class SeveralPrompts(dict[str, Any]):
    """A request with several prompts. Programs pass it on. A class that reads them gets an error: it answers one."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if name == "prompt":
            raise several_prompts(len(found))
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field like `__getitem__`, or a default."""
        return self[name] if name in self else default  # noqa: SIM401 - it would call itself


def payload_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request as a model gets it. A list of one prompt is that prompt."""
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        return body
    return {**body, "prompt": prompts[0]} if len(prompts) == 1 else SeveralPrompts(body)


def several_prompts(count: int) -> InvalidSlotError:
    """Return the error of a request with several prompts to a model that answers one."""
    return InvalidSlotError(f"'prompt' has {count} texts, and this model answers one; send each alone")
