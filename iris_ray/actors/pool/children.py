"""The only job of a pool that outlives the attempt of the task that has submitted it: a child that is adopted.

The pool keeps the job's results until the job of that task ends. Then the child ends as well.
"""

import hashlib
import json
import pickletools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from iris_ray.actors.calls.names import adopter_key
from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.actors.protocol.messages import ChildOf, ProcessSpec, RunRequest
from iris_ray.model.checks import shown
from iris_ray.model.job_spec import FIELDS_OF_A_JOB

_NOT_ASKED = {"job_id", "owner", "constraints"}
"""Fields of a `JobSpec` that the user has not chosen, or that are compared without those of the place."""
_COMPARED_APART = {"spec", "pickled_function", "env", "process", "secrets", "files_token", "child_of"}


def may_adopt(by: ChildOf, known: ChildOf) -> bool:
    """Return whether a task's attempt may adopt a child that this attempt has submitted, or was the latest to adopt.

    An attempt adopts each child once: a second job of the same name is another child.
    """
    return (by.job_id, by.task_index) == (known.job_id, known.task_index) and by.attempt > known.attempt


def may_replace(by: ChildOf, known: ChildOf) -> bool:
    """Return whether a task's attempt may end a child whose request differs: the child is the same one of its name.

    Other children of the name may still be asked for.
    """
    return by.number is None or known.number is None or by.number == known.number


def note_adopter(owner: str, by: ChildOf) -> None:
    """Store which attempt has adopted the only job of a pool, for the pool's next process. Block until it is stored."""
    ClusterStore().put(adopter_key(owner), json.dumps([by.attempt, by.number]).encode())


def latest_adopter(owner: str, child: ChildOf) -> ChildOf:
    """Return the attempt that was the latest to adopt the only job of a pool, or ``child``, which has submitted it."""
    noted = ClusterStore().get(adopter_key(owner))
    if noted is None:
        return child
    attempt, number = json.loads(noted)
    return child._replace(attempt=attempt, number=number)


def differences(old: RunRequest, new: RunRequest, old_function: bytes, new_function: bytes) -> tuple[str, ...]:
    """Return what differs between two requests, in words. Of variables and secrets it has the names only.

    Args:
        old, new: the requests.
        old_function, new_function: their functions. The requests may have references.
    """
    return (*_differences(old, new), *(["the function"] if not same_object(old_function, new_function) else []))


def _differences(old: RunRequest, new: RunRequest) -> Iterator[str]:
    for name in FIELDS_OF_A_JOB:
        if name not in _NOT_ASKED:
            yield from _changed(name, getattr(old.spec, name), getattr(new.spec, name))
    yield from _changed("constraints", _asked_constraints(old), _asked_constraints(new))
    for name in (field.name for field in fields(RunRequest)):
        if name not in _COMPARED_APART:
            yield from _changed(name, getattr(old, name), getattr(new, name))
    yield from _names("the variable", old.env | old.process.variables, new.env | new.process.variables)
    yield from _names("the secret", old.secrets, new.secrets)
    yield from _names("runtime_env", _without_variables(old.process), _without_variables(new.process))
    for name in (field.name for field in fields(ProcessSpec)):
        if name != "runtime_env":
            yield from _changed(name, getattr(old.process, name), getattr(new.process, name))


def _asked_constraints(request: RunRequest) -> list[Any]:
    place = request.child_of.place if request.child_of is not None else ()
    return [one for one in request.spec.constraints if one not in place]


def _without_variables(process: ProcessSpec) -> dict[str, Any]:
    return {name: value for name, value in process.runtime_env.items() if name != "env_vars"}


def _changed(name: str, old: object, new: object) -> Iterator[str]:
    if old != new:
        yield f"{name} was {_shown(old)} and is {_shown(new)}"


def _shown(value: object) -> str:
    return value.name if isinstance(value, Enum) else shown(value)


def _names(what: str, old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    missing = object()
    for name in sorted(old.keys() | new.keys()):
        if old.get(name, missing) != new.get(name, missing):
            yield f"{what} {shown(name)}"


# -- pickled functions -------------------------------------------------------------------------------------------------


def same_object(one: bytes, other: bytes) -> bool:
    """Return whether two pickles are of equal objects. Nothing is unpickled.

    Two pickles of a function may differ in bytes: sets have another order in another process, and a text that occurs
    twice is written once or twice.
    """
    if one == other:
        return True
    try:
        return _digest(one) == _digest(other)
    except Exception:  # they have steps that no pickler of Python's writes
        return False


class _Object:
    """An object on the stack of an unpickler, as a digest of what it is made of. It may grow after it was stored."""

    def __init__(self, *parts: bytes) -> None:
        self.digest = _hashed(parts)
        self._members = 0

    def grow(self, how: str, parts: Iterable[bytes]) -> None:
        if how == "ADDITEMS":  # a set: the order and the batches of its members don't count
            self._members += sum(int.from_bytes(part, "big") for part in parts)
            parts = [self._members.to_bytes(64, "big")]
            how, self.digest = "set", b""
        self.digest = _hashed([how.encode(), self.digest, *parts])


def _hashed(parts: Iterable[bytes]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.digest()


_GROWING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_FROM_MEMO, _TO_MEMO = {"GET", "BINGET", "LONG_BINGET"}, {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_PICKLE_BEGINS = b"\x80"


def _digest(pickled: bytes) -> bytes:
    """Return a digest of the object in a pickle, by going through the steps that would build it."""
    stack: list[_Object | None] = []  # None: a mark
    memo: dict[Any, _Object | None] = {}
    for step, argument, _ in pickletools.genops(pickled):
        name = step.name
        if name in ("PROTO", "FRAME", "STOP"):
            continue
        if name == "MARK":
            stack.append(None)
        elif name in _TO_MEMO:
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in _FROM_MEMO:
            stack.append(memo[argument])
        else:
            taken = _take(stack, [kind.name for kind in step.stack_before])
            if name in _GROWING and taken:
                taken[0].grow(name, (part.digest for part in taken[1:]))
                stack.append(taken[0])
                continue
            if name == "POP" and taken and stack and (below := stack[-1]) is not None:
                below.grow(name, [taken[0].digest])  # a call that has set the state of the object below it
                continue
            parts = [part.digest for part in taken]
            parts = sorted(parts) if name == "FROZENSET" else parts
            stack.extend(_Object(name.encode(), _plain(argument), *parts) for _ in step.stack_after)
    top = stack[-1]
    assert top is not None
    return top.digest


def _take(stack: list[_Object | None], kinds: list[str]) -> list[_Object]:
    """Take the operands of a step from the stack: a number of objects, or all after the latest mark and some before."""
    first = len(stack) - len(kinds)
    if "mark" in kinds:
        mark = len(stack) - 1 - stack[::-1].index(None)
        first = mark - kinds.index("mark")
    taken = [one for one in stack[first:] if one is not None]
    del stack[first:]
    return taken


def _plain(argument: object) -> bytes:
    if isinstance(argument, str):
        return argument.encode(errors="surrogatepass")
    if isinstance(argument, (bytes, bytearray)):
        data = bytes(argument)
        if data.startswith(_PICKLE_BEGINS) and data.endswith(b"."):  # as in a task of Fray's
            try:
                return _digest(data)
            except Exception:
                return data
        return data
    return repr(argument).encode()
