"""Missing slices on KubeRay: what is asked for, beside Ray's own autoscaler, and what `why` says about it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from iris_ray.capacity.autoscaler import Demand, Slices, since_words
from iris_ray.capacity.kuberay_demand import LONGEST_RETRY_S, SPARE_S, DeniedDemand, KubeRayDemand, find_demand
from iris_ray.capacity.kubernetes import KubernetesApi
from iris_ray.errors import ProviderDeniedError, ProviderError
from tests.support.kuberay_scenarios import STORIES
from tests.support.kuberay_world import KubeRayWorld, OurApi
from tests.support.kubernetes import changed, played_world


@pytest.fixture
def quiet() -> Iterator[None]:
    """Ray's autoscaler logs much."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_rays_autoscaler_and_missing_slices(story: Callable[[], Any]) -> None:
    assert story() == STORIES[story]


class Ticking:
    """The demand in a world without an autoscaler, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.world = KubeRayWorld()
        self.api = OurApi(self.world)
        self.demand: Demand = KubeRayDemand(self.api, clock=lambda: self.now)

    def update(self, missing: dict[str, list[int]], seconds: float = 20.0) -> tuple[str, ...]:
        for _ in range(int(seconds * 2)):
            self.demand.update(missing, self.world.slices())
            self.now += 0.5
        self.world.make_pods()
        return self.demand.words(next(iter(missing))) if missing else ()


def test_demand_of_a_moment_asks_for_nothing() -> None:
    ticking = Ticking()
    ticking.update({})
    ticking.update({"v6e-8": [1]}, 2.0)
    ticking.update({})
    assert ticking.world.replicas("v6e-8") == 0


def test_request_is_told_with_its_age_until_nothing_is_missing() -> None:
    ticking = Ticking()
    ticking.update({})
    assert ticking.update({"v6e-8": [1, 1]}) == ("KubeRay is asked for 2 more",)
    assert ticking.update({"v6e-8": [1, 1]}, 3720.0) == ("KubeRay is asked for 2 more, for 1 h 2 min",)
    assert not ticking.demand.is_gone
    ticking.world.pods[0].joined = ticking.world.pods[1].joined = True
    ticking.update({})
    assert ticking.demand.is_gone
    assert ticking.demand.words("v6e-8") == ()


def test_slice_broken_for_long_is_not_on_its_way() -> None:
    ticking = Ticking()
    ticking.update({})
    ticking.update({"v6e-16": [1]})
    ticking.world.pods[0].joined = True  # and its brothers never come
    ticking.update({"v6e-16": [1]}, 500.0)
    assert ticking.world.replicas("v6e-16") == 1
    ticking.update({"v6e-16": [1]}, 200.0)
    assert ticking.world.replicas("v6e-16") == 2


@pytest.mark.parametrize(
    ("tpu_type", "gangs", "words"),
    [
        ("v4-8", [1], ("no worker group of the RayCluster makes slices of this type",)),
        ("v6e-16", [5], ("there may be no more slices than 4 of group v6e-16 (maxReplicas)",)),
    ],
)
def test_unfit_cluster_is_told(tpu_type: str, gangs: list[int], words: tuple[str, ...]) -> None:
    ticking = Ticking()
    ticking.update({})
    assert ticking.update({tpu_type: gangs}) == words


def test_group_without_hosts_is_told_and_not_asked() -> None:
    ticking = Ticking()
    del ticking.world.group("v6e-16")["numOfHosts"]
    ticking.update({})
    (words,) = ticking.update({"v6e-16": [1]}, 10.0)
    assert words.startswith("group v6e-16 makes none: its numOfHosts is 1")
    assert ticking.world.replicas("v6e-16") == 0


def test_suspended_group_is_not_said_to_be_asked() -> None:
    ticking = Ticking()
    ticking.world.group("v6e-8").update(suspend=True, replicas=1)
    ticking.update({})
    assert ticking.update({"v6e-8": [1]}) == ("group v6e-8 makes none: it is suspended",)


def test_failing_api_is_told_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking = Ticking()
    ticking.update({})
    with monkeypatch.context() as patch:
        patch.setattr(ticking.world, "patch", fails_with(ProviderError("no answer")))
        for _ in range(6):
            ticking.update({"v6e-8": [1]}, 0.5)
        with pytest.raises(ProviderError):
            ticking.update({"v6e-8": [1]}, 0.5)
        ticking.update({"v6e-8": [1]}, 4.5)  # the next look is later
        assert ticking.demand.words("v6e-8") == ("no answer",)
    ticking.update({"v6e-8": [1]})
    assert ticking.world.replicas("v6e-8") == 1


def test_pods_are_looked_at_rarely_and_events_after_denial_even_less(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking = Ticking()
    asked: list[str] = []
    labels = {"ray.io/group": "v6e-8"}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
    pod = {"metadata": {"name": "a-pod", "labels": labels}, "status": {"conditions": [condition]}}
    crash = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    crashing = {"metadata": {"name": "its-brother", "labels": labels}, "status": {"containerStatuses": [crash]}}
    healthy = {"metadata": {"name": "another", "labels": labels}, "status": {}}

    def pods(phase: str) -> list[Any]:
        asked.append(phase)
        return [pod] if phase == "Pending" else [crashing, healthy]

    monkeypatch.setattr(ticking.api, "pods", pods)
    monkeypatch.setattr(ticking.api, "pod_events", fails_with(ProviderDeniedError("not yours"), asked))
    ticking.update({})
    why = ("pod a-pod: Unschedulable: 0/3 nodes fit", "pod its-brother: CrashLoopBackOff")
    assert ticking.update({"v6e-8": [1]}, 63.0)[1:] == why
    assert {what: asked.count(what) for what in asked} == {"Pending": 4, "Running": 1, "refused": 1}
    said = {"involvedObject": {"name": "a-pod"}, "reason": "FailedScaleUp", "message": "out of resources"}
    monkeypatch.setattr(ticking.api, "pod_events", lambda reason: [said] if reason == said["reason"] else [])
    assert ticking.update({"v6e-8": [1]}, 60.0)[1:] == why
    ticking.update({"v6e-8": [1]}, LONGEST_RETRY_S)
    assert ticking.demand.words("v6e-8")[1] == "pod a-pod: FailedScaleUp: out of resources", "the role was bound later"


def test_slices_that_nobody_misses_any_more_are_withdrawn() -> None:
    ticking = Ticking()
    ticking.update({})
    ticking.update({"v6e-8": [1, 1, 1]})
    ticking.world.pods[0].joined = True
    ticking.update({"v6e-8": [1, 1]})
    ticking.update({"v6e-8": [1]}, SPARE_S - 10)
    assert ticking.world.replicas("v6e-8") == 3  # the job may come again
    ticking.update({"v6e-8": [1]}, 20.0)
    assert [pod.joined for pod in ticking.world.pods] == [True, False]
    ticking.update({}, 2 * SPARE_S)
    assert (ticking.world.replicas("v6e-8"), len(ticking.world.pods)) == (1, 1)
    assert ticking.demand.is_gone


def test_what_others_ask_for_is_not_withdrawn() -> None:
    """An operator, or Ray's autoscaler for other work, raises replicas, too."""
    ticking = Ticking()
    ticking.update({})
    ticking.update({"v6e-8": [1]})
    ticking.world.group("v6e-8")["replicas"] = 2
    ticking.world.make_pods()
    ticking.world.pods[0].joined = True
    ticking.update({}, 3 * SPARE_S)
    assert ticking.world.replicas("v6e-8") == 2
    assert ticking.demand.is_gone


def test_withdrawal_is_tried_again_after_another_change(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking = Ticking()
    ticking.update({})
    ticking.update({"v6e-8": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(ticking.api, "patch_ray_cluster", fails_with(ProviderError("422 the test failed")))
        ticking.update({}, SPARE_S + 20)
    assert (ticking.world.replicas("v6e-8"), ticking.demand.is_gone) == (1, False)
    ticking.update({}, SPARE_S + 20)
    assert (ticking.world.replicas("v6e-8"), ticking.demand.is_gone) == (0, True)


def test_emulated_gke_deletes_the_pods_of_withdrawn_slices() -> None:
    with played_world() as played:
        api = KubernetesApi.of_this_pod({**POD, **played.world.client_environment()})
        assert api is not None
        demand = KubeRayDemand(api, clock=lambda: played.runner.now)
        played.world.set_stock("tpu-v6e-slice", 0)
        left = []
        for missing, seconds in (({}, 10), ({"v6e-16": [2]}, 20), ({"v6e-16": [1]}, 90), ({}, 90)):
            for _ in range(seconds):
                demand.update(missing, {})
                played.play(1)
            left.append(len(played.names("v6e-16")))
        assert left == [0, 8, 4, 0]
        assert demand.is_gone


def fails_with(error: Exception, asked: list[str] | None = None) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        if asked is not None:
            asked.append("refused")
        raise error

    return fail


POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "RAY_CLUSTER_NAME": "tpus",
    "RAY_CLUSTER_NAMESPACE": "default",
    "KUBERAY_GEN_RAY_START_CMD": "ray start --head --no-monitor",
}


@pytest.mark.parametrize(
    ("error", "kind"),
    [(None, KubeRayDemand), (ProviderError("no answer"), KubeRayDemand), (ProviderDeniedError("no"), DeniedDemand)],
)
def test_kuberay_is_asked_unless_it_denies(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, kind: type
) -> None:
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(KubernetesApi, "ray_cluster", fails_with(error) if error else lambda _: {})
    demand = find_demand()
    assert isinstance(demand, kind)
    assert demand.is_shown(None)


class PaperDemand(Demand):
    """Keeps what it was told was missing."""

    way = "paper"

    @property
    def is_gone(self) -> bool:
        return not self.asked

    def words(self, device: str) -> tuple[str, ...]:
        return (f"paper shows {self.asked[device]} more",) if device in self.asked else ()

    def update(self, missing: Mapping[str, Sequence[int]], slices: Slices) -> None:
        self.asked = {tpu_type: sum(gangs) for tpu_type, gangs in missing.items()}


def test_denial_that_passes_makes_way_for_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    ticking, paper = Ticking(), PaperDemand(True)
    looks: list[str] = []
    allowed = ticking.api.ray_cluster
    denial = ProviderDeniedError("403 tpus is forbidden")
    monkeypatch.setattr(ticking.api, "ray_cluster", fails_with(denial, looks))
    demand = ticking.demand = DeniedDemand(ticking.api, denial, paper, clock=lambda: ticking.now)
    why = "by paper, which miscounts slices on KubeRay, because 403 tpus is forbidden"
    assert ticking.update({"v6e-8": [1]}) == ("paper shows 1 more", why)
    ticking.update({"v6e-8": [1]}, 3600.0)
    assert len(looks) == 10, "after 15 s, then 30, 60 … 600"
    assert (demand.way, demand.problem) == ("paper", str(denial))
    monkeypatch.setattr(ticking.api, "ray_cluster", allowed)
    assert ticking.update({"v6e-8": [1]}, 620.0)[0].startswith("KubeRay is asked for 1 more")
    assert (demand.problem, paper.asked, ticking.world.replicas("v6e-8")) == (None, {}, 1)


@pytest.mark.parametrize("reads_events", [True, False])
def test_emulated_gke_makes_pods_and_says_why_they_wait(reads_events: bool) -> None:
    """Over HTTPS, from the shipped file, which lets the head's account read events."""
    with played_world() if reads_events else played_world(changed()) as played:
        api = KubernetesApi.of_this_pod({**POD, **played.world.client_environment()})
        assert api is not None
        demand = KubeRayDemand(api, clock=lambda: played.runner.now)
        played.world.set_stock("tpu-v6e-slice", 0)
        for missing in ({}, {"v6e-16": [2]}):
            for _ in range(30):
                demand.update(missing, {})
                played.play(1)
        assert len(played.names("v6e-16")) == 8
        asked, why = demand.words("v6e-16")
    assert asked == "KubeRay is asked for 2 more"
    assert why.startswith("8 pods wait, such as tpus-v6e-16-worker-")
    assert ("FailedScaleUp" in why and "out of resources" in why) if reads_events else "Unschedulable" in why


@pytest.mark.parametrize(("seconds", "words"), [(59.0, ""), (60.0, ", for 1 min"), (7320.0, ", for 2 h 2 min")])
def test_age_is_told_from_a_minute_on(seconds: float, words: str) -> None:
    assert since_words(seconds) == words
