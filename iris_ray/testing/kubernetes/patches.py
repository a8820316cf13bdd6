"""JSON Patch (RFC 6902), as Kubernetes applies it to objects.

Kubernetes' own library (gopkg.in/evanphx/json-patch.v4, patch.go) lets ``replace`` set a key that is not there, against
the RFC. Ray's provider depends on that: it replaces a ``scaleStrategy`` that no file names.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any


class PatchError(Exception):
    """A patch that doesn't apply: a test failed, or a path leads nowhere."""


def json_patch(document: Any, operations: Sequence[Mapping[str, Any]]) -> Any:
    """Return the document with all operations applied; if one fails, `PatchError` and nothing has happened."""
    result = copy.deepcopy(document)
    for operation in operations:
        try:
            _apply(result, operation["op"], operation["path"], operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise PatchError(f"{operation} does not apply: {error!r}") from error
    return result


def _apply(document: Any, name: str, path: str, operation: Mapping[str, Any]) -> None:
    *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]
    parent = document
    for step in steps:
        parent = parent[int(step)] if isinstance(parent, list) else parent[step]
    where: Any = _index(parent, last, name) if isinstance(parent, list) else last
    value = copy.deepcopy(operation.get("value"))
    match name:
        case "add" if isinstance(parent, list):
            parent.insert(where, value)
        case "add" | "replace":
            parent[where] = value
        case "remove":
            del parent[where]
        case "test":
            found = parent[where] if isinstance(parent, list) else parent.get(where)
            if found != value:
                raise ValueError(f"{path} is {found!r}")
        case _:
            raise ValueError(f"{name!r} is not an operation that this emulator knows")


def _index(items: list[Any], step: str, operation: str) -> int:
    index = len(items) if step == "-" else int(step)
    if not 0 <= index <= len(items) - (operation != "add"):
        raise IndexError(index)
    return index
