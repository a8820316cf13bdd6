"""Plans of a provisioner on paper: its settings, slices as a provider lists them, and what a plan says."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.provider import OWNER_LABEL, Market, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioning import Joined, plan
from iris_ray.capacity.provisioning_actions import Action, Create, Delete, Wait
from iris_ray.capacity.provisioning_history import ProvisioningHistory
from iris_ray.model.topology import get_tpu_config

Q = QueuedState
TYPE = "v6e-16"
HERE = "projects/p/locations/here"
SETTINGS = Settings(
    "ann",
    (get_tpu_config("v6e-16"),),
    (Source(HERE, Market.SPOT),),
    least=0,
    most=4,
    idle_s=600.0,
    max_wait_s=900.0,
    take_back=Reach.HELD,
)
FREE, BUSY, PARTLY = Joined(True, False), Joined(True, True), Joined(False, False)
FIRST, SECOND = Source(HERE, Market.SPOT), Source("projects/p/locations/there", Market.SPOT)
RESERVED = Source.reserved(f"{HERE}/reservations/res:64")
BOTH: dict[str, Any] = {"sources": (FIRST, SECOND)}
NOTHING: Mapping[str, Joined] = {}


def queued(number: int, state: QueuedState = Q.ACTIVE, **changes: Any) -> QueuedSlice:
    values: dict[str, Any] = {
        "name": name(number),
        "accelerator_type": "v6e-16",
        "state": state,
        "labels": {OWNER_LABEL: "ann"},
        "location": HERE,
    }
    return QueuedSlice(**(values | changes))


def name(number: int) -> str:
    return f"iris-ann-v6e-16-{number}"


def make_plan(
    demand: int | tuple[int, ...] | None,
    *found: QueuedSlice,
    joined: Mapping[str, Joined] | None = None,
    history: ProvisioningHistory | None = None,
    now: float = 1000.0,
    **settings: Any,
) -> list[Action]:
    """A plan; so many slices that gangs of one slice miss, or what each gang misses."""
    missed = (1,) * demand if isinstance(demand, int) else demand
    waiting = None if missed is None else gangs({TYPE: missed})
    chosen = replace(SETTINGS, **settings)
    return plan(chosen, waiting, found, joined or {}, history or ProvisioningHistory(), now, 1.7e9 + now)


def gangs(missing: Mapping[str, Sequence[int]]) -> list[WaitingGang]:
    """Gangs that miss slices, by type, each of a job of its own; the first to be served first."""
    missed = [(tpu_type, slices) for tpu_type, each in missing.items() for slices in each]
    return [WaitingGang(tpu_type, slices, f"job-{n}") for n, (tpu_type, slices) in enumerate(missed)]


def creates(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Create)]


def deletes(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Delete)]


def waits(actions: list[Action]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, Wait)]


def asked(actions: list[Action]) -> list[str]:
    """The sources of new requests."""
    return [str(action.source) for action in actions if isinstance(action, Create)]
