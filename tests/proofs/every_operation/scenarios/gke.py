"""Demand on KubeRay: two slices are asked for and withdrawn before they come, then two come and are used."""

import contextlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_ray.capacity.kuberay_demand import SPARE_S, KubeRayDemand
from iris_ray.errors import ProviderError
from tests.proofs.every_operation.operations import NoAnswerError, Operations
from tests.proofs.every_operation.runs import Said, Scenario

if TYPE_CHECKING:
    from tests.support.kuberay_world import KubeRayWorld

TYPE, WANTED, TURN_S = "v6e-8", 2, 10.0
WITHDRAWN = int(4 * SPARE_S / TURN_S)


def gke() -> Scenario:
    return Scenario(
        "gke",
        lambda place: _keep(place, _new_world()),
        _act,
        _judge,
        (),
        {"an answer that is lost forgets the request": _forget, "each look asks for more": _ask_more},
    )


def _new_world() -> "KubeRayWorld":
    from tests.support.kuberay_world import KubeRayWorld

    return KubeRayWorld()


def _keep(place: Path, world: "KubeRayWorld") -> None:
    with io.FileIO(str(place / "world"), "w") as file:
        file.write(pickle.dumps(world))


def _read(place: Path) -> "KubeRayWorld":
    with io.FileIO(str(place / "world")) as file:
        world: KubeRayWorld = pickle.loads(file.readall())
    return world


class _Cluster:
    """The demand of a Controller's process, and the cluster, which outlives it in a file.

    Args:
        place: the directory of the file.
        operations: count the requests to the Kubernetes API.
    """

    def __init__(self, place: Path, operations: Operations | None = None) -> None:
        from tests.support.kuberay_world import OurApi

        self._place = place
        self.now = 0.0
        self.world = world = _read(place)
        self.most = 0

        class Api(OurApi):
            def ray_cluster(self) -> Any:
                return ask("request read", super().ray_cluster)

            def patch_ray_cluster(self, patch: Sequence[Mapping[str, Any]]) -> Any:
                return ask("request write", super().patch_ray_cluster, patch)

            def pods(self, phase: str) -> Any:
                return ask("request read", super().pods, phase)

            def pod_events(self, reason: str) -> Any:
                return ask("request read", super().pod_events, reason)

        def ask(kind: str, method: Callable[..., Any], *given: Any) -> Any:
            def asked() -> Any:
                found = method(*given)
                _keep(place, world)
                return found

            try:
                return asked() if operations is None else operations.do(kind, asked)
            except NoAnswerError as error:
                raise ProviderError(str(error)) from error

        self.demand = KubeRayDemand(Api(world), clock=lambda: self.now)

    @property
    def replicas(self) -> int:
        return self.world.replicas(TYPE)

    def turn(self, missing: Mapping[str, Sequence[int]], hosts_come: bool = False) -> None:
        """Look as the Controller does, which looks again after an error; then KubeRay and the hosts act."""
        for _ in range(2):
            with contextlib.suppress(ProviderError):
                self.demand.update(missing, self.world.slices())
            self.now += TURN_S / 2
        assert self.replicas <= WANTED, f"{self.replicas} slices for a gang of {WANTED}"
        self.world.make_pods()
        for pod in self.world.pods if hosts_come else ():
            pod.joined = True
        _keep(self._place, self.world)


def _act(place: Path, said: Said, operations: Operations) -> None:
    cluster = _Cluster(place, operations)
    for _ in range(3):
        cluster.turn({})
    for _ in range(4):
        cluster.turn({TYPE: [1, 1]})
    for _ in range(WITHDRAWN):
        cluster.turn({})
    assert cluster.replicas == 0, f"{cluster.replicas} slices will come for jobs that are gone"
    said("withdrawn")
    for _ in range(5):
        cluster.turn({TYPE: [1, 1]})
    for _ in range(2):
        cluster.turn({}, hosts_come=True)
    said("come")
    _require_used(cluster)


def _judge(place: Path, said: list[list[Any]]) -> None:
    cluster = _Cluster(place)
    for _ in range(3):
        cluster.turn({})
    missing = WANTED - len(cluster.world.slices())
    for _ in range(5 if missing else 0):
        cluster.turn({TYPE: [1] * missing})
    for _ in range(2):
        cluster.turn({}, hosts_come=True)
    _require_used(cluster)


def _require_used(cluster: _Cluster) -> None:
    for _ in range(WITHDRAWN):
        cluster.turn({})
        assert len(cluster.world.slices()) == WANTED, "a slice that is used was taken"


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _forget() -> None:
    update = KubeRayDemand.update

    def updated(demand: KubeRayDemand, *given: Any) -> None:
        try:
            update(demand, *given)
        except ProviderError:
            demand._unanswered = {}
            raise

    KubeRayDemand.update = updated  # type: ignore[method-assign, assignment]


def _ask_more() -> None:
    from iris_ray.capacity import kuberay_demand
    from iris_ray.capacity.kuberay import Raise

    def more(groups: Any, there: int, gangs: Any, settled: int) -> list[Raise]:
        return [Raise(group, group.wanted + sum(gangs)) for group in groups if settled]

    setattr(kuberay_demand, "raises", more)  # noqa: B010
