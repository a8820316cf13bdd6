"""Our data as JSON knows it."""

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from iris_ray.model.constraints import AttributeValue, Constraint
from iris_ray.scheduler.pending_reason import PendingReason


def as_json(value: Any) -> Any:
    """Return our data as the types of JSON: enums by name, constraints as people write them."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Constraint):
        return str(value)
    if isinstance(value, AttributeValue):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: as_json(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("_")}
        return (
            {"sentence": str(value), "summary": value.summary, **found} if isinstance(value, PendingReason) else found
        )
    if isinstance(value, Mapping):
        return {as_json(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(map(as_json, value))
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value
