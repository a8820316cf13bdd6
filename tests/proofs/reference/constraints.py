"""What constraints mean, and what can't be evaluated."""

from typing import Any

from iris_ray.model.constraints import Attributes, Constraint, ConstraintOp, Scalar
from iris_ray.model.workers import Worker

Op = ConstraintOp


def kind(value: Scalar) -> str:
    return "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def satisfies(constraint: Constraint, attributes: Attributes) -> bool:
    """Raises TypeError if the two can't be ordered."""
    if constraint.key not in attributes:
        return constraint.op is Op.NOT_EXISTS
    if constraint.op in (Op.EXISTS, Op.NOT_EXISTS):
        return constraint.op is Op.EXISTS
    have: Any = attributes[constraint.key].value
    if isinstance(constraint.value, tuple):  # IN
        return any(kind(have) == kind(asked.value) and have == asked.value for asked in constraint.value)
    assert constraint.value is not None
    asked: Any = constraint.value.value
    equal = kind(have) == kind(asked) and have == asked
    if constraint.op in (Op.EQ, Op.NE):
        return equal == (constraint.op is Op.EQ)
    if kind(have) != kind(asked) or kind(have) == "bool":
        raise TypeError(f"{have!r} and {asked!r} have no order")
    return {Op.GT: have > asked, Op.GE: have >= asked, Op.LT: have < asked, Op.LE: have <= asked}[constraint.op]


def is_an_error(constraint: Constraint, attributes: Attributes) -> bool:
    try:
        satisfies(constraint, attributes)
    except TypeError:
        return True
    return False


def is_hopeless(constraint: Constraint, all_of_them: tuple[Constraint, ...], workers: list[Worker]) -> bool:
    """Whether it can't be evaluated on any of the workers that have the attribute and satisfy the other constraints."""
    others = [other for other in all_of_them if other is not constraint]
    having = [
        worker
        for worker in workers
        if constraint.key in worker.attributes
        and all(is_an_error(other, worker.attributes) or satisfies(other, worker.attributes) for other in others)
    ]
    return bool(having) and all(is_an_error(constraint, worker.attributes) for worker in having)


def is_met(preference: Constraint, hosts: list[Worker]) -> bool:
    """What can't be evaluated is not met."""
    return not any(is_an_error(preference, w.attributes) or not satisfies(preference, w.attributes) for w in hosts)
