"""Attributes of workers, and the constraints that jobs place on them.

Values are typed. Numbers are equal only to numbers (``4 == 4.0``): a str never equals a number, and ``True`` is not
``1``. Only numbers can be ordered, since "v4-8" is greater than "v4-16" by code point. Ordering any other value is an
error, and a constraint that can't be evaluated is reported rather than treated as false.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from iris_ray.errors import InvalidConstraintError, InvalidMessageError
from iris_ray.model.checks import shown
from iris_ray.model.plain_values import Scalar as Scalar
from iris_ray.model.plain_values import plain

MOST_VALUES = 1_000
"""The largest number of values in one IN constraint."""

TAINT_PREFIX = "taint:"
"""The prefix of taints: attributes that exclude every job that does not tolerate them, whatever their values."""


@dataclass(frozen=True, slots=True, eq=False)
class AttributeValue:
    """A typed value of an attribute or a constraint.

    A value of a subclass, such as a `StrEnum`, is converted to the plain type.

    Raises:
        InvalidConstraintError: the value is not a str, a bool or a number, or it is NaN, a number that is too large for
            a float, or text that can't be encoded.
    """

    value: Scalar

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "value", plain(Scalar, self.value, "it"))
        except InvalidMessageError as error:
            raise InvalidConstraintError(f"{shown(self.value)} can't be the value of an attribute: {error}") from None

    @staticmethod
    def parse(text: str) -> "AttributeValue":
        """Parse a value from an operator's text: ``12`` and ``1.5`` are numbers, and ``true`` is a bool."""
        if text in ("true", "false"):
            return AttributeValue(text == "true")
        if re.fullmatch(r"-?(0|[1-9]\d{0,299})(\.\d+)?", text):  # a longer number would not fit into a float
            return AttributeValue(float(text) if "." in text else int(text))
        return AttributeValue(text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttributeValue):
            return NotImplemented
        mine, theirs = self.value, other.value
        return mine == theirs and (type(mine) is bool) is (type(theirs) is bool)

    def __hash__(self) -> int:
        return hash((isinstance(self.value, bool), self.value))

    def __lt__(self, other: "AttributeValue") -> bool:
        self._require_order(other)
        return self.value < other.value  # type: ignore[operator]

    def __le__(self, other: "AttributeValue") -> bool:
        self._require_order(other)
        return self.value <= other.value  # type: ignore[operator]

    def _require_order(self, other: "AttributeValue") -> None:
        if self._kind != other._kind or self._kind == "bool":
            raise TypeError(f"can't order {self.value!r} ({self._kind}) and {other.value!r} ({other._kind})")

    @property
    def _kind(self) -> str:
        if isinstance(self.value, bool):
            return "bool"
        return "string" if isinstance(self.value, str) else "number"

    def __str__(self) -> str:
        looks_like_another_kind = isinstance(self.value, str) and AttributeValue.parse(self.value)._kind != "string"
        return repr(self.value) if looks_like_another_kind else str(self.value)


Attributes = Mapping[str, AttributeValue]


class ConstraintOp(Enum):
    """How a constraint compares a worker's attribute with the constraint's value."""

    EQ = "=="
    NE = "!="
    EXISTS = "exists"
    NOT_EXISTS = "not exists"
    GT = ">"
    GE = ">="
    LT = "<"
    LE = "<="
    IN = "in"


_NEVER = ((ConstraintOp.GT, math.inf), (ConstraintOp.LT, -math.inf))
"""Comparisons that no value satisfies."""


def _is_among(asked: frozenset[AttributeValue], have: AttributeValue, _values: object) -> bool:
    return have in asked


_COMPARE: Mapping[ConstraintOp, Callable[..., bool]] = {
    ConstraintOp.EQ: operator.eq,
    ConstraintOp.NE: operator.ne,
    ConstraintOp.GT: operator.gt,
    ConstraintOp.GE: operator.ge,
    ConstraintOp.LT: operator.lt,
    ConstraintOp.LE: operator.le,
    ConstraintOp.IN: _is_among,  # bound to the set of its values
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition on one attribute of a worker. A missing attribute satisfies only NOT_EXISTS.

    Args:
        key: the attribute's name.
        op: the comparison.
        value: the value to compare the attribute with: None for EXISTS and NOT_EXISTS, and a non-empty collection of
            values for IN. A plain str, int, float or bool becomes an `AttributeValue`.

    Raises:
        InvalidConstraintError: the key is not a name, a comparison lacks a value, EXISTS or NOT_EXISTS has one, an
            ordering has a bool or a str, IN has more than 1,000 values, or no attribute can satisfy the comparison.
    """

    key: str
    op: ConstraintOp
    value: AttributeValue | tuple[AttributeValue, ...] | None = None
    _compare: Callable[[Any, Any], bool] | None = field(init=False, compare=False, repr=False)

    if TYPE_CHECKING:  # the constructor converts plain values to AttributeValues

        def __init__(
            self,
            key: str,
            op: ConstraintOp,
            value: AttributeValue | Scalar | Iterable[AttributeValue | Scalar] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise InvalidConstraintError(f"a constraint's key is {shown(self.key)}; give the name of an attribute")
        try:
            object.__setattr__(self, "key", plain(str, self.key, "a constraint's key"))
        except InvalidMessageError as error:
            raise InvalidConstraintError(str(error)) from None
        if not isinstance(self.op, ConstraintOp):
            raise InvalidConstraintError(f"constraint on {self.key!r}: {self.op!r} is not a ConstraintOp")
        object.__setattr__(self, "_compare", _COMPARE.get(self.op))
        takes_value = self._compare is not None
        if takes_value != (self.value is not None):
            needs = "needs a" if takes_value else "takes no"
            raise InvalidConstraintError(f"constraint on {self.key!r}: {self.op.name} {needs} value")
        if self.op is ConstraintOp.IN:
            values = _values(self.key, self.value)
            object.__setattr__(self, "value", values)
            object.__setattr__(self, "_compare", partial(_is_among, frozenset(values)))
        elif takes_value:
            value = _value(self.value)
            object.__setattr__(self, "value", value)
            if isinstance(value.value, bool | str) and self.orders:
                raise InvalidConstraintError(
                    f"constraint {shown(str(self))}: {self.op.name} orders numbers only, and {shown(value.value)} is a"
                    f" {type(value.value).__name__}; name the values with IN or EQ, or order by an attribute that is a"
                    " number, such as tpu-vm-count"
                )
            if (self.op, value.value) in _NEVER:
                raise InvalidConstraintError(f"constraint on {self.key!r}: nothing is {self.op.value} {value.value!r}")

    @staticmethod
    def parse(text: str) -> "Constraint":
        """Parse a constraint, written like Kubernetes' label selectors: without ``notin``, and with comparisons.

        ``zone=us-a``, ``zone!=us-a``, ``gen>=4``, ``zone in (us-a, us-b)``, ``zone`` (the attribute exists) or
        ``!zone`` (it does not). `AttributeValue.parse` reads the values.

        Raises:
            InvalidConstraintError: the text has none of these forms.
        """
        if found := re.fullmatch(r"\s*(!?)\s*([^\s!=<>()]+)\s*", text):
            return Constraint(found[2], ConstraintOp.NOT_EXISTS if found[1] else ConstraintOp.EXISTS)
        if found := re.fullmatch(r"\s*([^\s!=<>()]+)\s+in\s*\(([^()]*)\)\s*", text):
            values = [AttributeValue.parse(value.strip()) for value in found[2].split(",") if value.strip()]
            return Constraint(found[1], ConstraintOp.IN, values)
        if found := re.fullmatch(r"\s*([^\s!=<>()]+)\s*(==?|!=|>=|<=|>|<)\s*([^\s=<>].*?)\s*", text):
            op = ConstraintOp.EQ if found[2] == "=" else ConstraintOp(found[2])
            return Constraint(found[1], op, AttributeValue.parse(found[3]))
        raise InvalidConstraintError(
            f"{text!r} is not a condition; write zone=us-a, zone!=us-a, gen>=4, 'zone in (us-a, us-b)', zone or !zone"
        )

    @property
    def orders(self) -> bool:
        """Whether the operator is an ordering, which only numbers allow."""
        return self.op in (ConstraintOp.GT, ConstraintOp.GE, ConstraintOp.LT, ConstraintOp.LE)

    def accepts(self, have: AttributeValue | None) -> bool:
        """Return whether an attribute's value satisfies the constraint; None means that the attribute is missing.

        Raises:
            TypeError: the values can't be ordered, such as a number and a str.
        """
        if self._compare is None:
            return (have is None) is (self.op is ConstraintOp.NOT_EXISTS)
        return have is not None and self._compare(have, self.value)

    def matches(self, attributes: Attributes) -> bool:
        """Return whether a worker with these attributes satisfies the constraint. Raises like `accepts`."""
        have = attributes.get(self.key)
        return self.accepts(have) if have is None or self._compare is None else self._compare(have, self.value)

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.key} {self.op.value}"
        value = f"({', '.join(map(str, self.value))})" if isinstance(self.value, tuple) else self.value
        return f"{self.key} {self.op.value} {value}"


def _value(value: Any) -> AttributeValue:
    return value if isinstance(value, AttributeValue) else AttributeValue(value)


def _values(key: str, values: Any) -> tuple[AttributeValue, ...]:
    if isinstance(values, (str, bytes, AttributeValue)) or not isinstance(values, Iterable):
        raise InvalidConstraintError(f"constraint on {key!r}: IN needs several values, such as ['a', 'b']")
    found = tuple(_value(value) for value in islice(values, MOST_VALUES + 1))
    if len(found) > MOST_VALUES:
        raise InvalidConstraintError(
            f"constraint on {key!r}: IN has more than {MOST_VALUES:,} values, which is the limit"
        )
    if not found:
        raise InvalidConstraintError(f"constraint on {key!r}: IN needs at least one value; nothing is in an empty list")
    return found
