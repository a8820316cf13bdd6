"""Fixtures for tests on real Ray clusters. They import Ray when they are used: the core is tested without it."""

import argparse
import io
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine

from tests.support.proofs import LONGER, examples

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster
    from tests.support.clusters import Clusters, Shape
    from tests.support.gangs import Trace

TESTS = Path(__file__).parent
LOOK_AT_ALL_PROCESSES = tuple(
    f"tests/unit/{room}/" for room in ("actors/host", "docker", "hangs", "inspection", "logs", "preflight", "sessions")
)
"""Tests there look for processes on the whole machine, so they don't run side by side."""
CLUSTERS_AT_ONCE = 2
"""How many processes run tests on clusters side by side."""
CLUSTER_TESTS, PROOFS = TESTS / "cluster", TESTS / "proofs"
PASSED = pytest.StashKey[bool]()
SHRINKING_S = 20
"""How long Hypothesis looks for a shorter example of what fails. Its 300 s can't be set otherwise."""

os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when Ray is imported; tests look at every line
os.environ.setdefault("RAY_worker_niceness", "0")  # else they get next to nothing beside a busy process
os.environ.setdefault("IRIS_RAY_CODE", "0")  # else each job would take this checkout along
os.environ.setdefault("IRIS_RAY_TEST_HOST_SILENCE_S", "10")  # machines that run tests are often busy

# A shell that runs the tests in the background may ignore these, and so would every process that a test starts.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)


PROFILES = ("test", "proofs", "long", "all")
SHARED = ("cluster", "cloud_cluster", "gpu_cluster")
"""Fixtures that are clusters which tests share, in the order in which their tests run."""
OWN = "no_shared_cluster"
"""The fixture of tests that start a cluster of their own in this process. They come last."""


def part(text: str) -> tuple[int, int]:
    """Return which part is asked for, from 0, and how many there are."""
    which, _, of = text.partition("/")
    if not 1 <= int(which) <= int(of):
        raise argparse.ArgumentTypeError(f"{text} is not a part: 1/3, 2/3 and 3/3 are")
    return int(which) - 1, int(of)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--profile",
        choices=PROFILES,
        default="test",
        help="test: every test, in its small size (the default); proofs: tests/proofs, and what is marked so, in full; "
        "long: long loops, and what takes longer than twenty seconds on a cluster; all: the three of them",
    )
    parser.addoption(
        "--part",
        type=part,
        default=(0, 1),
        metavar="K/N",
        help="only the K-th of N parts, by the names of the tests, which together are all tests of the profile",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose what Hypothesis tries where a test doesn't say so itself."""
    settings.register_profile(
        "iris_ray",
        max_examples=examples(50),
        deadline=None,
        derandomize=not LONGER,
        phases=set(Phase) - {Phase.explain},
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("iris_ray")
    engine.MAX_SHRINKING_SECONDS = SHRINKING_S


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the profile doesn't ask for; have the tests on clusters come last, those that share one in a row.

    Of several processes each has a cluster of its own, and runs whole modules on it. The largest modules come first, so
    that no process is idle at the end.
    """
    for item in items:
        if item.path.is_relative_to(CLUSTER_TESTS) or turn(item):
            item.add_marker(pytest.mark.cluster)
    profile, (which, of) = config.getoption("profile"), config.getoption("part")
    wanted: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_in_part = zlib.crc32(item.nodeid.encode()) % of == which
        (wanted if is_in_part and profile in ("all", *profiles_of(item)) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    of_module = Counter(item.path for item in wanted)
    items[:] = sorted(
        wanted,
        key=lambda item: (
            item.get_closest_marker("cluster") is not None,
            turn(item),
            -of_module[item.path] if turn(item) else 0,
        ),
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole modules and folders to the processes of ``pytest -n 3``: what a module shares is made once.

    Tests without Ray nodes wait more than they compute. Those in tests/cluster, which come after them, need a core for
    each process, so two processes run them and the third ends.
    Proofs and pages go test by test: some take long, and some need a cluster beside others that must come before it.
    The mark ``xdist_group`` does not serve: pytest-xdist 3.8 does not heed it with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            only_clusters_are_left = next(iter(self.workqueue)).startswith("tests/cluster/")
            if only_clusters_are_left and node not in self.nodes[:CLUSTERS_AT_ONCE]:
                node.shutdown()  # when it has run what it has
            else:
                super()._assign_work_unit(node)

        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if path.startswith(LOOK_AT_ALL_PROCESSES):
                return "processes of this machine"
            return path if path.startswith(("tests/cluster/", "tests/unit/")) else nodeid

    return ByFolder(config, log)


def profiles_of(item: pytest.Item) -> list[str]:
    """The profiles in which a test runs; those in tests/proofs that are not marked run again with more examples."""
    if item.get_closest_marker("small"):
        return ["test"]
    if item.get_closest_marker("long"):
        return ["long"]
    if item.get_closest_marker("proof"):
        return ["proofs"]
    return ["test", "proofs"] if LONGER and item.path.is_relative_to(PROOFS) else ["test"]


def turn(item: pytest.Item) -> int:
    """When a test runs: 0 needs no cluster in this process, then one shape after another."""
    fixtures = getattr(item, "fixturenames", ())
    return next((n for n, name in enumerate((*SHARED, OWN), 1) if name in fixtures), 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have the fixtures know at their end whether the test has passed."""
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(scope="session")
def clusters() -> Iterator["Clusters"]:
    from tests.support.clusters import Clusters

    running = Clusters()
    yield running
    running.give_back_and_end()


@pytest.fixture(scope="module")
def cluster(clusters: "Clusters") -> Iterator["SimulatedCluster"]:
    """Three v4-16 slices of two hosts each. One that a test breaks is replaced by one of another name.

    Its GCS keeps everything on disk, so that it can be killed. Tests that start a cluster of their own try the other.
    """
    yield from shared(clusters, three_slices())


@pytest.fixture
def no_shared_cluster(clusters: "Clusters") -> None:
    """Room for a cluster of the test's own: there can be one in a process."""
    clusters.give_back_and_end()


def three_slices() -> "Shape":
    from iris_ray.testing import SimulatedCluster
    from tests.support.clusters import Shape

    return Shape("three slices", lambda: SimulatedCluster({"v4-16": 3}, persistent=True, quiet=True))


def shared(clusters: "Clusters", shape: "Shape") -> Iterator["SimulatedCluster"]:
    """A cluster of that shape for one module, on which nothing runs before and after. Its slices may be warm."""
    world = clusters.of(shape)
    yield world.cluster
    if not clusters.run(world):
        return
    try:
        world.check()
    except Exception:
        clusters.end()
        raise


@pytest.fixture(autouse=True)
def as_good_as_new(request: pytest.FixtureRequest) -> Iterator[None]:
    """Repair the cluster that a test shares, if it does, and check at the end that it has left no job."""
    if not set(SHARED) & set(request.fixturenames):
        yield
        return
    from tests.support.clusters import unfinished_jobs

    world = request.getfixturevalue("clusters").world
    world.repair()
    of_the_module = unfinished_jobs()
    yield
    if not request.node.stash.get(PASSED, False):
        world.clear(of_the_module)
        return
    try:
        world.check(of_the_module)
    except AssertionError:
        world.clear(of_the_module)
        raise


@pytest.fixture
def trace(tmp_path: Path) -> "Trace":
    from tests.support.gangs import Trace

    return Trace(tmp_path)


class Terminal:
    """Keeps what this process prints, the lines that Ray brings from other processes included.

    Instead of capsys and capfd on a cluster: they close their files at the end of a test, and Ray's thread that prints
    what tasks say dies if it writes to a closed one; no later test would see a line.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._printed = io.StringIO()

    def listen(self) -> None:
        """To be called by the test: between a fixture and its test pytest sets the streams to its own."""
        self._monkeypatch.setattr(sys, "stdout", self._printed)
        self._monkeypatch.setattr(sys, "stderr", self._printed)

    @property
    def lines(self) -> list[str]:
        return self._printed.getvalue().splitlines()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(monkeypatch)
