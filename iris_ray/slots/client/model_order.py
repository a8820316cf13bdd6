"""Makes the order of a model, and refuses every mistake in it before the model is served."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ray import cloudpickle

from iris_ray.errors import InvalidSlotError, IrisError
from iris_ray.model.checks import NAME, require, shown
from iris_ray.slots.actors.messages import ModelOrder
from iris_ray.slots.client.served_command import ServedCommand, ServedProgram
from iris_ray.slots.core.models import ModelSpec

LATER_S = 30.0
"""How long a program that is not healthy in time may take to say why, in seconds."""


def model_order(
    model: "type | ServedCommand",
    name: str | None = None,
    *,
    memory: Mapping[int, int | Sequence[int]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    replicas: int = 0,
    prewarm: bool = False,
    **spec: Any,
) -> ModelOrder:
    """Return the order of a model; arguments and errors as for `SlotClient.register`. No ``kind``: for GPUs."""
    if not isinstance(arguments, Mapping | None):
        raise InvalidSlotError(f"arguments is {shown(arguments)}; give values by name, such as {{'seed': 1}}")
    keywords = dict(arguments or {})
    if isinstance(model, ServedCommand):
        require("the name of a model that is a program", name, NAME, InvalidSlotError)
        if keywords:
            raise InvalidSlotError("arguments are for classes; those of a program belong to its command")
        memory, keywords = memory or model.memory, {"served": model, "model": name}
        spec = {"runtime": "program", "load_s": model.load_s + LATER_S, **spec}
        model = ServedProgram
    if not isinstance(model, type) or not any("__call__" in vars(base) for base in model.__mro__):
        raise InvalidSlotError(f"{model!r} can't be served; give a class that has __call__(self, payload)")
    _require_arguments(model, keywords)
    if memory is None:
        memory = _estimated(model, keywords)
    made = ModelSpec(model.__name__ if name is None else name, memory, **spec)
    return ModelOrder(made, _pickled(model, keywords), replicas, prewarm)


def _require_arguments(model: type, keywords: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):  # a class written in C does not list its arguments
        return
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise InvalidSlotError(
            f"{model.__name__} can't be made with arguments={shown(dict(keywords))}: {error}"
        ) from None


def _pickled(model: type, keywords: Mapping[str, Any]) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps((model, keywords))
    except Exception as error:
        raise InvalidSlotError(
            f"{model.__name__}, or one of its arguments, can't be pickled: {error}. Create what does not travel between"
            " hosts (a lock, an open file, …) in the class"
        ) from error
    return pickled


def _estimated(model: type, keywords: Mapping[str, Any]) -> Mapping[int, int | Sequence[int]]:
    if not hasattr(model, "memory_estimate"):
        raise InvalidSlotError(
            f"the memory of {model.__name__} is not known; give memory={{1: bytes}}, or the class a static "
            f"memory_estimate() that returns that"
        )
    try:
        found: Mapping[int, int | Sequence[int]] = model.memory_estimate(**keywords)
    except IrisError:
        raise
    except Exception as error:
        raise InvalidSlotError(f"{model.__name__}.memory_estimate raised {type(error).__name__}: {error}") from error
    return found
