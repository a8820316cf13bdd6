"""What a worker is (attributes) and what a job asks of it (constraints).

Values are typed. Numbers equal numbers (``4 == 4.0``), and nothing else: a str never equals a number and ``True`` is
not ``1``. Ordering is defined among numbers and among strings; across kinds, and for booleans, it is an error, so that
a constraint that can't be evaluated is seen and not silently false.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True, eq=False)
class AttributeValue:
    """One typed value of a worker's attribute, or of a constraint."""

    value: Scalar

    @property
    def _kind(self) -> str:
        if isinstance(self.value, bool):
            return "bool"
        return "string" if isinstance(self.value, str) else "number"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttributeValue):
            return NotImplemented
        return self._kind == other._kind and self.value == other.value

    def __hash__(self) -> int:
        return hash((self._kind, self.value))

    def __lt__(self, other: "AttributeValue") -> bool:
        self._require_order(other)
        return self.value < other.value  # type: ignore[operator]

    def __le__(self, other: "AttributeValue") -> bool:
        self._require_order(other)
        return self.value <= other.value  # type: ignore[operator]

    def _require_order(self, other: "AttributeValue") -> None:
        if self._kind != other._kind or self._kind == "bool":
            raise TypeError(f"can't order {self.value!r} ({self._kind}) and {other.value!r} ({other._kind})")

    def __str__(self) -> str:
        return str(self.value)


Attributes = Mapping[str, AttributeValue]


class ConstraintOp(Enum):
    """How a constraint compares a worker's attribute with its own value."""

    EQ = "=="
    NE = "!="
    EXISTS = "exists"
    NOT_EXISTS = "not exists"
    GT = ">"
    GE = ">="
    LT = "<"
    LE = "<="


@dataclass(frozen=True, slots=True)
class Constraint:
    """One requirement on a worker. A missing attribute satisfies NOT_EXISTS and nothing else.

    Raises:
        ValueError: a comparison without a value, or EXISTS / NOT_EXISTS with one.
    """

    key: str
    op: ConstraintOp
    value: AttributeValue | None = None

    def __post_init__(self) -> None:
        takes_value = self.op not in (ConstraintOp.EXISTS, ConstraintOp.NOT_EXISTS)
        if takes_value != (self.value is not None):
            raise ValueError(
                f"constraint on {self.key!r}: {self.op.name} {'needs a' if takes_value else 'takes no'} value"
            )

    def matches(self, attributes: Attributes) -> bool:
        """Whether a worker with these attributes satisfies the constraint.

        Raises:
            TypeError: an ordering across kinds, such as GT between a number and a str.
        """
        have = attributes.get(self.key)
        if self.op is ConstraintOp.NOT_EXISTS:
            return have is None
        if have is None:
            return False
        if self.op is ConstraintOp.EXISTS:
            return True
        assert self.value is not None
        match self.op:
            case ConstraintOp.EQ:
                return have == self.value
            case ConstraintOp.NE:
                return have != self.value
            case ConstraintOp.GT:
                return self.value < have
            case ConstraintOp.GE:
                return self.value <= have
            case ConstraintOp.LT:
                return have < self.value
            case _:
                return have <= self.value

    def __str__(self) -> str:
        return f"{self.key} {self.op.value}" + ("" if self.value is None else f" {self.value}")


def matches_all(constraints: Iterable[Constraint], attributes: Attributes) -> bool:
    """Whether a worker satisfies every constraint."""
    return all(c.matches(attributes) for c in constraints)
