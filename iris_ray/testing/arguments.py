"""Checks the arguments of `SimulatedCluster`. Pure functions; each raises `InvalidRequestError`."""

from collections.abc import Mapping
from typing import Literal, get_args

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import is_amount, is_int, shown
from iris_ray.model.topology import TPUConfig, get_tpu_config

NoticeChannel = Literal["both", "ray", "metadata"]
"""Where a preemption is announced: as a drain of Ray's nodes, by the hosts' metadata servers, or both."""

LONGEST_S = 365 * 24 * 3600.0
"""The kernel's and Ray's own times overflow at some point; a year is enough."""


def checked_slices(slices: Mapping[str, int] | None) -> list[tuple[TPUConfig, int]]:
    """Return each TPU type with the number of its slices."""
    if slices is None:
        return []
    if not isinstance(slices, Mapping):
        raise InvalidRequestError(
            f'slices maps TPU types to the number of their slices, as in {{"v4-32": 2}}; it can\'t be {slices!r}.'
        )
    return [
        (get_tpu_config(name), checked_count(f"The number of {name} slices", number, least=0))
        for name, number in slices.items()
    ]


def checked_count(what: str, number: object, *, least: int) -> int:
    if not is_int(number, least):
        raise InvalidRequestError(f"{what} must be an int, {least} or more, not {shown(number)}.")
    return number


def checked_notice(notice_s: object) -> float:
    """Return the notice in seconds; None is 0."""
    return 0.0 if notice_s is None else checked_seconds("notice_s", notice_s)


def checked_seconds(what: str, seconds: object) -> float:
    if not is_amount(seconds) or seconds > LONGEST_S:
        given = shown(seconds)
        raise InvalidRequestError(f"{what} must be a number of seconds from 0 to {LONGEST_S:.0f}, not {given}.")
    return float(seconds)


def require_channel(heard_by: str) -> None:
    if heard_by not in get_args(NoticeChannel):
        raise InvalidRequestError(f"heard_by is one of {get_args(NoticeChannel)}, not {heard_by!r}.")
