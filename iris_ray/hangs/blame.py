"""Finds the process that holds up its gang, by comparing the gang's processes while none makes progress."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from iris_ray.hangs.calls import TaskLook
from iris_ray.model.outcomes import TaskKey

SPINS, WAITS = 0.7, 0.3
"""The number of cores from which a process spins, and the number up to which it waits."""
LATE_S, LATER = 1.0, 4.0
"""The seconds, and the multiple of the gang's usual time, from which an answer of a host is late."""
CLEAR = 2
"""The points that make a case: see `_Case`."""
NAMED = 3

_IN_JAX = re.compile(r"[(/]jax(?:lib)?/")


@dataclass(frozen=True, slots=True)
class StallFinding:
    """What a comparison of a gang's processes has shown.

    Attributes:
        culprit: the process that holds the others up; None if that is not clear.
        why: the facts about it, or why it is not clear; to stand behind a colon.
    """

    culprit: TaskKey | None
    why: str


@dataclass(slots=True)
class _Case:
    """The case against one process: its points, and what each is for.

    A process that can't be seen or does not run at all has 4: nothing else needs to be known. One that is behind in
    its steps, or is not where most others are, has 2: enough if nothing speaks against another one. What often has
    other causes has 1, and decides only between two.
    """

    points: int = 0
    facts: list[str] = field(default_factory=list)

    def add(self, points: int, fact: str) -> None:
        self.points += points
        self.facts.append(fact)


def find_culprit(
    looks: Mapping[TaskKey, TaskLook | None], steps: Mapping[TaskKey, int], host: Callable[[TaskKey], str]
) -> StallFinding:
    """Return which process holds up its gang.

    Args:
        looks: of each process that has not returned; None if its host did not answer in time.
        steps: the latest step of each process that has named one.
        host: returns the host of a process.
    """
    cases = {key: _Case() for key in looks}
    seen = {key: look for key, look in looks.items() if look is not None}
    _unseen(cases, looks)
    _not_running(cases, seen)
    _behind(cases, {key: step for key, step in steps.items() if key in cases})
    _elsewhere(cases, seen)
    _busy(cases, seen)
    _late(cases, seen)
    return _judged(cases, seen, host)


def _judged(
    cases: Mapping[TaskKey, _Case], seen: Mapping[TaskKey, TaskLook], host: Callable[[TaskKey], str]
) -> StallFinding:
    most = max((case.points for case in cases.values()), default=0)
    first = [key for key in sorted(cases) if cases[key].points == most]
    if most >= CLEAR and len({host(key) for key in first}) == 1:
        return StallFinding(first[0], "; ".join(cases[first[0]].facts))
    if most < CLEAR:
        places = {look.stack[0] for look in seen.values() if look.stack}
        where = f" (at {places.pop()})" if len(places) == 1 else ""
        return StallFinding(None, f"no process differs clearly from the others{where}")
    facts = Counter("; ".join(cases[key].facts) for key in first)
    told = ", ".join(f"{count} × {fact}" for fact, count in facts.most_common(NAMED))
    return StallFinding(None, f"{len(first)} of {len(cases)} processes are equally suspect: {told}")


# -- facts: each counts only if it is true of the smaller part of the gang ---------------------------------------------


def _few(keys: Iterable[TaskKey], all_of_them: int) -> list[TaskKey]:
    """Return the keys if they are at most half of all, and not all: the greater part can't hold itself up."""
    found = list(keys)
    return found if 2 * len(found) <= all_of_them else []


def _unseen(cases: Mapping[TaskKey, _Case], looks: Mapping[TaskKey, TaskLook | None]) -> None:
    for key in _few((key for key, look in looks.items() if look is None), len(looks)):
        cases[key].add(4, "its host did not answer in time, and the other hosts did")


def _not_running(cases: Mapping[TaskKey, _Case], seen: Mapping[TaskKey, TaskLook]) -> None:
    said = {"T": "its process is stopped (state T)", "D": "its process waits for a disk or a device (state D)"}
    for state, fact in said.items():
        stuck = [key for key, look in seen.items() if look.state == state]
        for key in stuck if len(cases) == 1 else _few(stuck, len(cases)):
            cases[key].add(4, fact)


def _behind(cases: Mapping[TaskKey, _Case], steps: Mapping[TaskKey, int]) -> None:
    furthest = max(steps.values(), default=0)
    for key in _few((key for key, step in steps.items() if step < furthest), len(steps)):
        cases[key].add(2, f"it is at step {steps[key]}, and the furthest at step {furthest}")


def _elsewhere(cases: Mapping[TaskKey, _Case], seen: Mapping[TaskKey, TaskLook]) -> None:
    """Compare stacks: most processes wait in one place, or at least in JAX, for the one that is elsewhere."""
    stacks = {key: look.stack for key, look in seen.items() if look.stack}
    if len(stacks) < 2:
        return
    places = {key: _places(stack) for key, stack in stacks.items()}
    usual, count = Counter(places.values()).most_common(1)[0]
    usual_frame = next(stacks[key][0] for key, where in places.items() if where == usual)
    is_usual = 2 * count > len(stacks)
    waiting = {key for key, stack in stacks.items() if _IN_JAX.search(stack[0])}
    busy = set(_few(stacks.keys() - waiting, len(stacks)))
    for key, stack in stacks.items():
        odd = is_usual and places[key] != usual
        if key in busy:
            others = f"{len(waiting)} others wait in JAX"
            cases[key].add(3 if odd else 2, f"it is in {stack[0]}, and {others}")
        elif odd and not busy:
            cases[key].add(2, f"it is in {stack[0]}, and {count} of {len(stacks)} are in {usual_frame}")


def _places(stack: Iterable[str]) -> tuple[str, ...]:
    """Return files and lines without directories and names: py-spy and a task that tells its stack differ in these."""
    return tuple(frame.rpartition("(")[2].rpartition("/")[2] for frame in stack)


def _busy(cases: Mapping[TaskKey, _Case], seen: Mapping[TaskKey, TaskLook]) -> None:
    """Compare the use of CPU: one spins and the others wait, or the other way round."""
    for key, look in seen.items():
        others = [other.cpu for name, other in seen.items() if name != key]
        if not others:
            return
        usual = median(others)
        if look.cpu >= SPINS and usual <= WAITS:
            cases[key].add(1, f"it uses {look.cpu:.1f} cores, and the others {usual:.1f}")
        elif look.cpu <= WAITS / 3 and usual >= SPINS:
            cases[key].add(1, f"it uses no CPU, and the others {usual:.1f} cores")


def _late(cases: Mapping[TaskKey, _Case], seen: Mapping[TaskKey, TaskLook]) -> None:
    usual = median([look.late_s for look in seen.values()]) if seen else 0.0
    for key, look in seen.items():
        if look.late_s >= LATE_S and look.late_s >= LATER * usual:
            cases[key].add(1, f"its host took {look.late_s:.1f} s to answer, and the others {usual:.1f} s")
