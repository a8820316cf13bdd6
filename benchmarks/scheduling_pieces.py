"""What a plan would cost without one of the things that the scheduler remembers.

    python benchmarks/scheduling_pieces.py               # the table; about two minutes
    python benchmarks/scheduling_pieces.py teams tasks   # these worlds only

Needs neither Ray nor TPUs. Each world is planned four times, as the Controller plans, with a change between the plans.
The figures are the Python calls of all plans, relative to those of the scheduler as it is, so a busy machine does not
affect them. A cache keeps only its latest entry when it is taken out. The plans must not change, or the row says so.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import scheduling_adversary as adversary
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team
from iris_ray.scheduler import Planner, eviction_costs, evictions, limited_kinds, team_quotas, together, victims
from iris_ray.scheduler.group_rooms import GroupRooms
from iris_ray.state import ControllerState
from iris_ray.state.events import TeamsSetEvent, TimePassedEvent
from iris_ray.state.instructions import Instructions
from scheduling_costs.worlds import SLICE, TPU_TYPE, bare, gang

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
HOSTS, PLANS = 800, 4
SLICES = HOSTS // SLICE


class Latest(dict[Any, Any]):
    """A cache of one entry."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.clear()
        super().__setitem__(key, value)


class Nothing(set[Any]):
    """A set that stays empty."""

    def add(self, element: Any) -> None:
        del element


def forgets(owner: type, name: str, instead: Callable[[], object] = Latest) -> AbstractContextManager[object]:
    """Replace an attribute of all objects of a class once they are made."""
    make = owner.__init__  # type: ignore[misc]

    def made(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        setattr(self, name, instead())

    return mock.patch.object(owner, "__init__", made)


def clears(owner: type, method: str, name: str) -> AbstractContextManager[object]:
    """Clear an attribute before each call of a method."""
    before = getattr(owner, method)

    def cleared(self: Any, *args: Any, **named: Any) -> Any:
        getattr(self, name).clear()
        return before(self, *args, **named)

    return mock.patch.object(owner, method, cleared)


PIECES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "LimitedKinds": lambda: mock.patch.object(limited_kinds.LimitedKinds, "add"),
    "GroupRooms._once_left": lambda: clears(GroupRooms, "_fits_once_left", "_once_left"),
    "FleetOnceLeft._free": lambda: clears(together.FleetOnceLeft, "_free_already", "_free"),
    "Evictor._hopeless": lambda: forgets(evictions.Evictor, "_hopeless", Nothing),
    "VictimSearch._known_hosts": lambda: forgets(victims.VictimSearch, "_known_hosts"),
    "VictimSearch._known_costs": lambda: forgets(victims.VictimSearch, "_known_costs"),
    "EvictionCosts._costs": lambda: forgets(eviction_costs.EvictionCosts, "_costs"),
    "_Offers._turns": lambda: clears(victims._Offers, "best", "_turns"),
    "TeamQuotas._sources": lambda: forgets(team_quotas.TeamQuotas, "_sources"),
    "Reclaim._known": lambda: forgets(team_quotas.Reclaim, "_known"),
}


def large_gang() -> ControllerState:
    """A fleet of BATCH, and a gang of a higher band for half of it."""
    spec = replace(gang(0, "large"), priority=PRODUCTION, coscheduling=CoschedulingConfig(num_groups=(SLICES // 2,)))
    return adversary.with_queue(adversary.full(BATCH, SLICES), [spec])


def reclaiming() -> ControllerState:
    """Twenty teams that have lent all of their quota to twenty others, and want it back."""
    state = bare(HOSTS)
    lenders = [Team(f"lender-{n}", {TPU_TYPE: Quota(adversary.CHIPS * (SLICES // 20))}) for n in range(20)]
    borrowers = [Team(f"borrower-{n}", {TPU_TYPE: Quota(0.0)}) for n in range(20)]
    state.handle_event(TeamsSetEvent((*lenders, *borrowers)))
    for n in range(SLICES):
        adversary.start(state, n, BATCH, f"borrower-{n % 20}")
    waiting = (replace(gang(n, f"own-{n}"), user=f"user-{n}", team=f"lender-{n % 20}") for n in range(60))
    return adversary.with_queue(adversary.begin(state), waiting)


WORLDS: Mapping[str, Callable[[], ControllerState]] = {
    "groups": lambda: adversary.with_queue(adversary.full(BATCH, SLICES), adversary.groups(15)),
    "groups-stay": lambda: adversary.with_queue(adversary.full(PRODUCTION), adversary.groups(15)),
    "gangs": lambda: adversary.with_queue(
        adversary.full(BATCH, SLICES * 3 // 4), adversary.gangs(2 * SLICES, INTERACTIVE)
    ),
    "large": large_gang,
    "tasks": partial(adversary.small_tasks, 20, 64),
    "teams": partial(adversary.in_teams, 150, 1500, 2),
    "reclaiming": reclaiming,
}


def calls_of(make: Callable[[], ControllerState]) -> tuple[int, list[object]]:
    """Return the number of Python calls of a world's plans, and what these decided."""
    state = make()
    planner, calls, decided = Planner(state, look_again_s=0.5), 0, list[object]()

    def count(frame: object, what: str, about: object) -> None:
        del frame, about
        nonlocal calls
        calls += what == "call"

    for number in range(PLANS):
        now = adversary.NOW + number
        state.handle_event(TimePassedEvent(now))
        sys.setprofile(count)
        placed = planner.plan(now, Instructions())
        sys.setprofile(None)
        decided += [one.event for one in placed]
        decided += [(job_id, job.promise) for job_id, job in state.jobs.items() if job.promise is not None]
        adversary.change(state, number, now)
        state.unrecorded.clear()
    return calls, decided


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", help=f"some of {', '.join(WORLDS)}")
    asked = parser.parse_args().worlds or list(WORLDS)
    adversary.HOSTS = HOSTS
    logging.disable(logging.WARNING)
    usual = {}
    for name in asked:
        calls_of(WORLDS[name])  # so that the next run finds all that Python itself remembers
        usual[name] = calls_of(WORLDS[name])
    print(f"| Without | {' | '.join(asked)} |\n|---|{'---:|' * len(asked)}")
    print(f"| nothing (calls) | {' | '.join(f'{usual[name][0]:,}' for name in asked)} |", flush=True)
    for piece, without in PIECES.items():
        row = []
        for name in asked:
            with without():
                calls, decided = calls_of(WORLDS[name])
            row.append(f"{calls / usual[name][0]:.2f} ×{'' if decided == usual[name][1] else ' (other plans)'}")
        print(f"| `{piece}` | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
