"""What a provisioner asks the Controller in a turn, and what it then deletes. The zone and the cluster are on paper."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.demand import WaitingGang
from iris_ray.capacity.holdings import Reach
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted, SharedSlice
from iris_ray.capacity.provider import HostSettings, Market, NewSlice, QueuedSlice, Source
from iris_ray.capacity.provisioner import Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.capacity.reservations import TAKEN_AFTER_S
from iris_ray.model.topology import TPUConfig, get_tpu_config
from tests.support.provisioning import BUSY, FREE, HERE, SETTINGS, queued
from tests.unit.capacity.test_provisioner import PaperJobs

RES, OTHER = (Source.reserved(f"{HERE}/reservations/{name}:64") for name in ("res", "other"))
LARGE = WaitingGang("v6e-64", 1, "large", may_reserve=True)


class Zone:
    """The slices that a test lists. Those that are deleted stay."""

    location = HERE

    def __init__(self, slices: Sequence[QueuedSlice]) -> None:
        self.slices = slices
        self.deleted: list[str] = []

    def require_type(self, config: TPUConfig) -> None:
        raise NotImplementedError

    def queued_slices(self) -> list[QueuedSlice]:
        return [*self.slices]

    def create(self, wanted: NewSlice) -> str | None:
        raise NotImplementedError

    def delete(self, name: str) -> str | None:
        self.deleted.append(name)
        return None


class Cluster(PaperJobs):
    """Gangs and answers that a test names."""

    def __init__(self, gangs: Sequence[WaitingGang], slices: Sequence[QueuedSlice]) -> None:
        super().__init__()
        self.gangs = list(gangs)
        self.joined = {one.name: BUSY for one in slices}
        self.left: dict[str, ChipsLeft] = {}  # by the name of a slice that is offered
        self.asked: list[ChipsWanted] = []

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        return self.gangs, self.joined

    def leave_chips(self, wanted: ChipsWanted) -> ChipsLeft:
        self.asked.append(wanted)
        found = (self.left[one.name] for one in wanted.slices if one.name in self.left)
        return next(found, ChipsLeft(why_not="jobs hold too few"))


def slices_of(source: Source, *numbers: int, tpu_type: str = "v6e-16") -> list[QueuedSlice]:
    about: dict[str, Any] = {"accelerator_type": tpu_type, "reservation": source.reservation, "market": Market.RESERVED}
    return [queued(number, name=f"iris-ann-{tpu_type}-{number}", **about) for number in numbers]


def names(slices: Sequence[QueuedSlice | SharedSlice]) -> list[str]:
    return [one.name for one in slices]


class Paper:
    """A provisioner, with the clock by which it lives."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        cluster: Cluster,
        zone: Zone,
        *sources: Source,
        take_back: Reach = Reach.HELD,
    ) -> None:
        self.now = 0.0
        clock = SimpleNamespace(time=lambda: 1.7e9, monotonic=lambda: self.now)
        monkeypatch.setattr(provisioner_module, "time", clock)
        types = tuple(map(get_tpu_config, ("v6e-16", "v6e-32", "v6e-64")))
        settings = replace(SETTINGS, configs=types, sources=sources, most=9, idle_s=1e6, take_back=take_back)
        self._provisioner = Provisioner(settings, [zone], cluster, HostSettings("", {}, ""), print_line=lambda *_: None)
        self._provisioner.turn()

    def turn(self) -> None:
        """Take a turn once gangs have lacked slices in use for long enough."""
        self.now += TAKEN_AFTER_S
        self._provisioner.turn()


def why_of(cluster: Cluster) -> str:
    """Why jobs of lower bands leave no slices, as it is reported."""
    assert cluster.reported is not None
    ((_, why),) = cluster.reported.waits
    return why.split("jobs of lower bands leave none: ")[1]


def test_slices_may_be_held_for_a_gang_if_the_one_before_it_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are asked about in one plan, since other slices suffice for each of them."""
    small, medium = slices_of(RES, 0, 1, 2, 3), slices_of(RES, 0, 1, tpu_type="v6e-32")
    first = replace(LARGE, tpu_type="v6e-32", missing=2, job_id="first")
    cluster = Cluster([first, LARGE], [*small, *medium])
    paper = Paper(monkeypatch, cluster, Zone([*small, *medium]), replace(RES, chips=128))
    paper.turn()
    assert [(one.job_id, one.may_hold) for one in cluster.asked] == [("first", True), ("large", True)]
    cluster.asked.clear()
    cluster.left["iris-ann-v6e-16-0"] = ChipsLeft(tuple(names(small)), is_held=True)
    paper.turn()
    assert [(one.job_id, one.may_hold) for one in cluster.asked] == [("first", True), ("large", False)]
    assert why_of(cluster) == "jobs hold too few; none are held for it: a job before it holds slices"


def test_gang_for_which_no_slices_are_held_says_by_which_option(monkeypatch: pytest.MonkeyPatch) -> None:
    small = slices_of(RES, 0, 1, 2, 3)
    cluster = Cluster([LARGE], small)
    paper = Paper(monkeypatch, cluster, Zone(small), RES, take_back=Reach.LOWER_BANDS)
    paper.turn()
    (question,) = cluster.asked
    assert not question.may_hold
    assert why_of(cluster) == "jobs hold too few; none are held for it: --take-back lower-bands"


@pytest.mark.parametrize("granted", [False, True])
def test_held_slices_are_deleted_only_if_a_gang_before_their_own_does_not_get_them(
    granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise jobs would leave the others for the first gang in vain."""
    small = slices_of(RES, 0, 1, 2, 3)
    held = replace(LARGE, tpu_type="v6e-32", job_id="held", holds=("iris-ann-v6e-16-0", "iris-ann-v6e-16-1"))
    cluster, zone = Cluster([LARGE, held], small), Zone(small)
    paper = Paper(monkeypatch, cluster, zone, RES)
    cluster.joined |= dict.fromkeys(held.holds, FREE)
    if granted:
        cluster.left["iris-ann-v6e-16-0"] = ChipsLeft(tuple(names(small)), ("batch",), 30.0)
    paper.turn()
    assert "large" in [one.job_id for one in cluster.asked]
    assert zone.deleted == [] if granted else [*held.holds]


def test_next_source_is_asked_about_if_the_preferred_one_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = slices_of(RES, 0, 1, 2, 3), slices_of(OTHER, 4, 5, 6, 7)
    cluster = Cluster([LARGE], [*first, *second])
    cluster.left["iris-ann-v6e-16-4"] = ChipsLeft(tuple(names(second)), is_held=True)
    paper = Paper(monkeypatch, cluster, Zone([*first, *second]), RES, OTHER)
    paper.turn()
    assert [names(one.slices) for one in cluster.asked] == [names(first), names(second)]
    cluster.gangs, cluster.asked = [replace(LARGE, holds=tuple(names(second)))], []
    paper.turn()
    assert [names(one.slices) for one in cluster.asked] == [names(second)], "they would no longer be held"


def test_slices_of_another_provisioner_stay_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two provisioners would else hold slices for the job in turn, and never all until they are idle."""
    small = slices_of(RES, 0, 1, 2, 3)
    cluster = Cluster([replace(LARGE, holds=("iris-bob-v6e-16-0", "iris-bob-v6e-16-1"))], small)
    Paper(monkeypatch, cluster, Zone(small), RES).turn()
    assert cluster.asked == []
