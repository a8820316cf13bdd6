"""Rebuilds values from outside as plain values: exactly str, int, float, bool and bytes, and our own classes of these.

A value of a subclass looks plain: a `StrEnum` of a user's script, or a str or number of NumPy. But its class can behave
in any way, and a process without the class's module can't unpickle it. All values from users are therefore rebuilt.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence, Sized
from contextvars import ContextVar
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from iris_ray.errors import InvalidMessageError, InvalidRequestError
from iris_ray.model.checks import is_real, is_unicode, is_whole, shown

Scalar = str | int | float | bool
"""The type of an attribute's value. A number must not be NaN."""

MOST_CHARACTERS = 10_000
"""The largest length of a str."""
MOST_BYTES = 16 << 20
"""The largest length of a bytes object."""
MOST_ITEMS = 250_000
"""The limit for the items of all tuples, lists and mappings in a value together: the event loop takes 0.3 s for them. A
list may be in a value many times, though it was sent once."""
CHARACTERS_OF_ITEM = 64
"""So many characters of text count as another item."""
LARGEST_INT = 2**63 - 1

_FOR_PEOPLE = object()
Words = Annotated[str, _FOR_PEOPLE]
"""Text for people, such as an error. Characters that can't be encoded are escaped, and long text is cut."""

Make = Callable[[Any], Any]
"""Rebuilds a value as a plain one, or raises `_RefusedError`."""


class _RefusedError(Exception):
    """A value does not have the expected type.

    Attributes:
        path: the path to the value within the outer value, such as ``[3].attempt``.
        text: the problem, to follow the value's name in a message.
    """

    def __init__(self, text: str) -> None:
        self.path = ""
        self.text = text


def plain(kind: Any, value: object, what: str) -> Any:
    """Rebuild a value from plain values.

    Args:
        kind: the expected type, as in an annotation: a plain type, an Enum, a NamedTuple or dataclass of ours, a tuple,
            list, Sequence or Mapping of these, or a union. For any other class, the value is returned unchanged.
        value: the value from outside.
        what: the name of the value in error messages.

    Raises:
        InvalidMessageError: the value has another type, is too long, too large or not finite, or can't be stored.
        InvalidRequestError: the value has the right type, but its class refuses its fields.
    """
    before = _room.set(MOST_ITEMS)
    try:
        return _maker(kind)(value)
    except _RefusedError as refused:
        raise InvalidMessageError(f"{what}{refused.path} {refused.text}") from None
    except InvalidRequestError:
        raise
    except Exception as error:  # the value's class is foreign, and may raise anything
        raise InvalidMessageError(f"{what} can't be read: {type(error).__name__}: {shown(error)}") from error
    finally:
        _room.reset(before)


_room = ContextVar("room", default=MOST_ITEMS)
"""The items that the value which is being rebuilt may still have."""


def _take_room(items: int) -> None:
    _room.set(room := _room.get() - items)
    if room < 0:
        raise _RefusedError(f"has more than {MOST_ITEMS:,} items or {MOST_ITEMS * CHARACTERS_OF_ITEM:,} characters")


# -- makers --------------------------------------------------------------------------------------------------------


@functools.cache
def _maker(kind: Any) -> Make:
    """Return the function that rebuilds values of a type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words if _FOR_PEOPLE in kind.__metadata__ else _maker(args[0])
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is tuple and Ellipsis not in args:
        return _fixed_tuple(kind, args)
    if origin in (tuple, list, Sequence):
        return _several(tuple if origin is tuple else list, _maker(args[0]))
    if origin in (dict, Mapping):
        return _mapping(_maker(args[0]), _maker(args[1]))
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind)
    return lambda value: value


def _refused(value: object, wanted: str) -> _RefusedError:
    return _RefusedError(f"is {shown(value)}; give {wanted}")


def _nothing(value: object) -> None:
    if value is not None:
        raise _refused(value, "None")


def _bool(value: object) -> bool:
    if type(value) is not bool:
        raise _refused(value, "a bool")
    return value


def _int(value: object) -> int:
    if not is_whole(value):
        raise _refused(value, "an int")
    number = int(value)
    if not -LARGEST_INT <= number <= LARGEST_INT:
        raise _RefusedError(f"is a number of {number.bit_length()} bits; give one of 64 bits at most")
    return number


def _float(value: object) -> float:
    if not is_real(value):
        raise _refused(value, "a number")
    number = _as_float(value)
    if not math.isfinite(number):
        raise _refused(value, "a finite number")
    return number


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise _RefusedError("is larger than any float; give a smaller number") from None


def _scalar(value: object) -> Scalar:
    if type(value) is bool:
        return value
    if isinstance(value, str):
        return _text(value)
    if not is_real(value) or math.isnan(number := _as_float(value)):
        raise _refused(value, "a str, a number or a bool")
    return int(value) if is_whole(value) else number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _refused(value, "a str")
    text = str.__str__(value)
    if len(text) > MOST_CHARACTERS:
        raise _RefusedError(f"has {len(text):,} characters, and the limit is {MOST_CHARACTERS:,}")
    _take_room(len(text) // CHARACTERS_OF_ITEM)
    if not is_unicode(text):
        raise _refused(text, "text that is Unicode; half of a surrogate pair can't be stored")
    return text


def _words(value: object) -> str:
    if not isinstance(value, str):
        raise _refused(value, "a str")
    text = str.__str__(value)[: MOST_CHARACTERS + 1]
    _take_room(len(text) // CHARACTERS_OF_ITEM)
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise _refused(value, "bytes")
    if len(value) > MOST_BYTES:
        raise _RefusedError(f"has {len(value):,} bytes, and the limit is {MOST_BYTES:,}")
    return bytes(value)


def _member(kind: type) -> Make:
    def make(value: object) -> object:
        if not isinstance(value, kind):
            raise _refused(value, f"a {kind.__name__}")
        return value

    return make


def _union(kinds: tuple[Any, ...]) -> Make:
    """Return the maker for a union, which uses the value's own class or else the first member that accepts it."""
    named = {kind: _maker(kind) for kind in kinds if isinstance(kind, type)}
    makers = [_maker(kind) for kind in kinds]
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds[:6]) + (", …" if kinds[6:] else "")

    def make(value: object) -> object:
        if (known := named.get(type(value))) is not None:
            return known(value)
        for maker in makers:
            try:
                return maker(value)
            except _RefusedError:
                continue
        raise _refused(value, wanted)

    return make


def _require_sized(value: Any, classes: tuple[type[Sized], ...], wanted: str) -> None:
    if not isinstance(value, classes):
        raise _refused(value, wanted)
    _take_room(len(value))


def _several(kind: type, item: Make) -> Make:
    def make(value: Any) -> object:
        _require_sized(value, (tuple, list), f"a {kind.__name__}")
        made: list[Any] = []
        try:
            made.extend(map(item, value))
        except _RefusedError as refused:
            refused.path = f"[{len(made)}]{refused.path}"
            raise
        return kind(made)

    return make


def _fixed_tuple(kind: Any, kinds: tuple[Any, ...]) -> Make:
    makers = [_maker(one) for one in kinds]

    def make(value: Any) -> object:
        if not isinstance(value, tuple) or len(value) != len(makers):
            raise _refused(value, str(kind))
        return tuple(maker(one) for maker, one in zip(makers, value, strict=True))

    return make


def _mapping(make_key: Make, make_value: Make) -> Make:
    def make(value: Any) -> object:
        _require_sized(value, (Mapping,), "a dict")
        made = {}
        for key, one in value.items():
            try:
                made[make_key(key)] = make_value(one)
            except _RefusedError as refused:
                refused.path = f"[{shown(key)}]{refused.path}"
                raise
        return made

    return make


def _record(kind: type) -> Make:
    """Return the maker for a NamedTuple or a dataclass, whose constructor validates its fields again."""
    hints = get_type_hints(kind, include_extras=True)
    named = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind) if field.init]
    makers = [(name, _maker(hints[name])) for name in named]

    def make(value: Any) -> object:
        if not isinstance(value, kind):
            raise _refused(value, f"a {kind.__name__}")
        made, name = {}, ""
        try:
            for name, maker in makers:
                made[name] = maker(getattr(value, name))
        except _RefusedError as refused:
            refused.path = f".{name}{refused.path}"
            raise
        return kind(**made)

    return make


_PLAIN: dict[Any, Make] = {
    None: _nothing,
    types.NoneType: _nothing,
    bool: _bool,
    int: _int,
    float: _float,
    str: _text,
    bytes: _bytes,
    Scalar: _scalar,
}
