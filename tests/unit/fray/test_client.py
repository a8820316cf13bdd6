"""The client has Fray's methods with Fray's arguments, and is the current one where it should be."""

import inspect
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.errors import InvalidRequestError, UnknownNameError
from iris_ray.fray.actor_handle import ActorFuture, ActorGroup, ActorMethod
from iris_ray.fray.client import Client
from iris_ray.fray.current import as_current_client
from iris_ray.fray.job_handle import JobHandle, last_traceback


def test_names_are_importable_without_fray_and_iris() -> None:
    script = "import sys, iris_ray.fray as f\nf.Client, f.JobHandle\nprint({'fray', 'iris'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_missing_fray_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['fray.client'] = None\nfrom iris_ray.fray.current import require_fray\nrequire_fray()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install marin-fray. The package fray is a different one" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("ours", "module"),
    [(Client, "client"), (JobHandle, "client"), (ActorGroup, "actor"), (ActorMethod, "actor"), (ActorFuture, "actor")],
)
def test_methods_take_the_same_arguments_as_frays(ours: type, module: str) -> None:
    protocol = getattr(pytest.importorskip(f"fray.{module}", reason="needs Fray: make marin"), ours.__name__)
    assert not {name for name in vars(protocol) if not name.startswith("_")} - set(dir(ours))
    for name, method in vars(protocol).items():
        if (name == "__call__" or not name.startswith("_")) and inspect.isfunction(method):
            wanted = [(p.name, p.kind) for p in inspect.signature(method).parameters.values()]
            shown = [(p.name, p.kind) for p in inspect.signature(getattr(ours, name)).parameters.values()]
            missing = [parameter for parameter in wanted if parameter not in shown]
            assert not missing, f"{name}: {missing}"


def test_current_client_is_ours_in_new_threads_until_shutdown() -> None:
    current = pytest.importorskip("fray.current_client", reason="needs Fray: make marin")
    ours: Any = object()
    seen: list[Any] = []
    with as_current_client(ours):
        thread = threading.Thread(target=lambda: seen.append(current.current_client()))
        thread.start()
        thread.join()
        seen.append(current.current_client())
    assert seen == [ours, ours]
    assert type(current.current_client()).__name__ == "LocalClient"


def test_client_of_a_dashboard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.fray.client.require_fray", lambda: None)
    with pytest.raises(InvalidRequestError, match=r"reaches only its dashboard; .*submit --ray-job"):
        Client(SimpleNamespace(is_direct=False))  # type: ignore[arg-type]


FIRST = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 1"]
SECOND = ["", "During handling of the above exception, another exception occurred:", "", *FIRST]


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (["step 1"], []),
        (["step 1", *FIRST], FIRST),
        ([*FIRST, "caught", *FIRST, "bye"], [*FIRST, "bye"]),
        ([*FIRST, "caught", *FIRST, *SECOND], [*FIRST, *SECOND]),
    ],
    ids=["none", "one", "the last of two", "with its cause"],
)
def test_last_traceback_of_log_has_its_causes(log: list[str], found: list[str]) -> None:
    assert last_traceback(log) == found


class Told:
    """A group or job of a client, which the Controller knows or has forgotten."""

    def __init__(self, forgotten: bool) -> None:
        self.forgotten = forgotten
        self.told = False

    def shutdown(self) -> None:
        if self.forgotten:
            raise UnknownNameError("there is no job of that name")
        self.told = True

    def wait(self, *, raise_on_failure: bool) -> None:
        self.shutdown()


def test_shutdown_ends_other_jobs_although_one_is_forgotten() -> None:
    client = Client.__new__(Client)  # a real one needs Fray and a cluster
    groups: Any = [Told(forgotten=True), Told(forgotten=False)]
    jobs: Any = [Told(forgotten=True), Told(forgotten=False)]
    client._groups, client._jobs = list(groups), list(jobs)
    client.shutdown()
    assert groups[1].told
    assert jobs[1].told
