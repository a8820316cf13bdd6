"""A client through the dashboard: what crosses to the head and back, without a cluster."""

import base64
import contextlib
import inspect
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from iris_ray import IrisClient, RayJobConfig, Secret
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.version import versions_here
from iris_ray.client.job_handle import JobHandle
from iris_ray.errors import (
    InvalidRequestError,
    JobCancelledError,
    LimitReachedError,
    NoClusterError,
    RayJobError,
    RemoteUserError,
    ResultNotPicklableError,
    ResultTooLargeError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.remote import cluster_call, dashboard_client
from iris_ray.remote.cluster_call import ClusterCall, send_call
from iris_ray.remote.dashboard_client import HERE, DashboardClient, DashboardJobHandle
from iris_ray.remote.ray_jobs import RayJobs, RayJobStatus
from tests.support.command_line import address_of_nobody
from tests.support.dashboard import Dashboard, served


class Head:
    """Jobs of a head that is this process: each runs when it is submitted.

    Attributes:
        submitted: what was sent.
        state, message: of each job.
        printed: what the latest job has printed.
        silent: how many more questions have no answer.
        breaks: after so many characters each connection to the output ends, until all have been seen.
        stopped: jobs that somebody has stopped.
    """

    def __init__(self) -> None:
        self.submitted: list[RayJobConfig] = []
        self.state, self.message, self.printed = "succeeded", "", ""
        self.silent, self.breaks = 0, list[int]()
        self.stopped: list[str] = []

    def submit(self, config: RayJobConfig, run_id: str, packages: Sequence[Path]) -> str:
        self.submitted.append(config)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print("Runtime env is setting up.")
            sys.path[:0] = [str(package.parent) for package in packages]
            try:
                cluster_call._make(config.command[-1])
            finally:
                del sys.path[: len(packages)]
        self.printed = printed.getvalue()
        return run_id

    def status(self, run_id: str) -> RayJobStatus:
        if self.silent:
            self.silent -= 1
            raise NoClusterError("silent")
        return RayJobStatus(run_id, self.state, self.message, ())

    def logs(self, run_id: str) -> str:
        return self.printed

    def follow(self, run_id: str, show: Callable[[str], object]) -> RayJobStatus:
        if self.breaks:
            show(self.printed[: self.breaks.pop(0)])
            raise NoClusterError("broken")
        show(self.printed)
        return self.status(run_id)

    def stop(self, run_id: str) -> bool:
        self.stopped.append(run_id)
        return True


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    monkeypatch.setattr(cluster_call, "connect", lambda address: None)
    monkeypatch.setattr(cluster_call, "SHORTEST_PAUSE_S", 0.001)
    monkeypatch.setattr(cluster_call, "LONGEST_PAUSE_S", 0.001)
    return Head()


def call(head: Head, function: Callable[..., Any], *arguments: Any) -> ClusterCall:
    return send_call(head, "mine", function, *arguments)  # type: ignore[arg-type]


def raised(error: Exception) -> None:
    raise error


def several() -> Iterator[int]:
    yield 1
    print("between")
    yield 2


def test_answers_and_variables_cross_to_head_and_back(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_USER", "ann")
    monkeypatch.setenv("IRIS_TEAM", "vision")
    assert call(head, divmod, 7, 2).answer() == (3, 1)
    assert head.submitted[0].command[:5] == ["env", "IRIS_USER=ann", "IRIS_TEAM=vision", "python", "-m"]
    both = call(head, several)
    assert (both.answer(), both.answer(1)) == (1, 2)


@pytest.mark.parametrize("error", [UnknownNameError("there is no job"), ZeroDivisionError("by 0")], ids=repr)
def test_error_on_head_is_raised_here(head: Head, error: Exception) -> None:
    with pytest.raises(type(error), match=f"^{error}$"):
        call(head, raised, error).answer()


def test_answer_that_cannot_travel_is_typed_error(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResultNotPicklableError, match="a lock, can't be pickled"):
        call(head, threading.Lock).answer()
    monkeypatch.setattr(cluster_call, "MOST_ANSWER_BYTES", 300)
    assert call(head, bytes, 20).answer() == bytes(20)
    with pytest.raises(ResultTooLargeError, match="come at most 300"):
        call(head, bytes, 500).answer()


@pytest.mark.parametrize(
    ("failed", "error", "said"),
    [(True, RemoteUserError, "^of the task$"), (False, ResultNotPicklableError, "no_such_module.*install here")],
)
def test_answer_of_unknown_class_is_typed_error(failed: bool, error: type[Exception], said: str) -> None:
    unknown = base64.b64encode(pickle.dumps((failed, b"cno_such_module\nname\n.", "of the task"))).decode()
    with pytest.raises(error, match=said):
        cluster_call._opened(unknown)


def test_other_iris_ray_on_head_is_refused_uncalled(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    here = versions_here()
    both = iter([here | {"protocol": 1, "version": "0.0.1"}, here])
    monkeypatch.setattr(cluster_call, "versions_here", lambda: next(both))
    with pytest.raises(VersionMismatchError, match=r"the cluster's head is iris_ray .*, and this is iris_ray 0\.0\.1"):
        call(head, pytest.fail, "it was called").answer()


@pytest.mark.parametrize(
    ("state", "printed", "error", "said"),
    [
        ("stopped", "", JobCancelledError, "was stopped"),
        ("failed", "python: No module named iris_ray.remote.cluster_call\n", VersionMismatchError, "build it with"),
        ("failed", "one\nno space\n", RayJobError, "has ended: failed: why no space"),
    ],
)
def test_job_without_answer_is_typed_error(
    head: Head, state: str, printed: str, error: type[Exception], said: str
) -> None:
    one = call(head, several)
    head.state, head.message, head.printed = state, "why", printed
    with pytest.raises(error, match=said):
        one.answer()


def test_silent_dashboard_is_waited_for_a_while(head: Head) -> None:
    one = call(head, several)
    head.silent = 3
    assert one.answer(patience_s=60) == 1
    head.silent = 3
    with pytest.raises(NoClusterError):
        one.answer(patience_s=0)


def test_output_is_printed_once_over_broken_connections(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    one = call(head, several)
    start = head.printed.index("between")
    head.breaks = [10, start + 3, start + 2, start + 5]
    one.print_output()
    assert capsys.readouterr().out == "between\n"


def test_connection_that_always_breaks_ends_call(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_call, "PATIENCE_S", 0.002)
    one = call(head, several)
    head.breaks = [0] * 10
    with pytest.raises(NoClusterError, match="broken"):
        one.print_output()
    assert head.stopped == [one.run_id]


# -- the client --------------------------------------------------------------------------------------------------------


class Known(IrisClient):
    """The client of a process that has joined the cluster."""

    def __init__(self) -> None: ...

    def job_status(self, job: JobHandle | str) -> Any:
        return {"job": job}

    def task_status(self, job: JobHandle | str, task_index: int) -> Any:
        return job, task_index


@pytest.fixture
def client(head: Head, monkeypatch: pytest.MonkeyPatch) -> Iterator[DashboardClient]:
    monkeypatch.setattr(dashboard_client, "IrisClient", Known)
    monkeypatch.setattr(dashboard_client, "RayJobs", lambda address: head)
    with DashboardClient("http://10.0.0.2:8265") as client:
        yield client


def launched(monkeypatch: pytest.MonkeyPatch, *answers: object) -> None:
    """Have the head submit jobs so: it yields these answers, of which errors are raised."""

    def launch(request: RunRequest, detached: bool) -> Iterator[object]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    monkeypatch.setattr(dashboard_client, "_launch", launch)


def test_questions_are_asked_on_head_with_ids(client: DashboardClient, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, None, [7])
    job = client.submit(print)
    answers: list[Any] = [client.job_status(job), job.status()]
    assert answers == [{"job": job.job_id}] * 2
    answers = [client.task_status(job=job, task_index=3)]
    assert answers == [(job.job_id, 3)]


def test_each_question_of_a_client_is_asked_on_head() -> None:
    public = {name for name, _ in inspect.getmembers(IrisClient, callable) if not name.startswith("_")}
    assert public - HERE == set(vars(DashboardClient)) & public
    assert {"job_status", "cancel", "exec"} <= public - HERE


def test_submitted_job_gives_results_or_its_error(client: DashboardClient, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, None, [7])
    assert client.submit(print).results(60) == [7]
    launched(monkeypatch, None, ValueError("as asked"))
    with pytest.raises(ValueError, match="as asked"):
        client.submit(print).results(60)
    launched(monkeypatch, LimitReachedError("too many"))
    with pytest.raises(LimitReachedError, match="too many"):
        client.submit(print)


def test_invalid_job_is_refused_before_sending(client: DashboardClient, head: Head) -> None:
    with pytest.raises(InvalidRequestError, match="can't be called without arguments"):
        client.submit(divmod)
    assert not head.submitted


def test_value_of_secret_is_not_sent_and_its_name_is(
    client: DashboardClient, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, None, [7])
    with pytest.raises(InvalidRequestError, match=r'value of KEY .* secrets set KEY.*from_store\("KEY"\)') as refused:
        client.submit(print, secrets={"KEY": Secret("s3cr3t")})
    assert "s3cr3t" not in str(refused.value)
    assert not head.submitted
    assert client.submit(print, secrets={"KEY": Secret.from_store("KEY")}).results(60) == [7]


def test_closed_client_ends_jobs_that_are_not_detached(
    head: Head, client: DashboardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, None)
    head.state = "running"
    jobs = [client.submit(print, detached=detached) for detached in (True, False)]
    client.close()
    head.state = "stopped"
    assert len(head.stopped) == 1
    assert head.stopped[0].startswith("print-")
    for job in jobs:
        with pytest.raises(JobCancelledError):
            job.results(60)
    with pytest.raises(TimeoutError):
        DashboardJobHandle("mine", client, call(head, several)).results(0.01)


def test_workspace_travels_with_jobs_alone(head: Head, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dashboard_client, "RayJobs", lambda address: head)
    monkeypatch.setattr(dashboard_client, "IrisClient", Known)
    launched(monkeypatch, None, [7])
    with IrisClient.remote("https://ray.example.com", tmp_path) as client:
        client.submit(print)
        client.job_status("mine")
    assert [config.working_dir for config in head.submitted] == [tmp_path, None]


@pytest.mark.parametrize("workspace", [5, "no/such/directory"])
def test_invalid_workspace_is_refused_at_once(workspace: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"workspace is .*, which is not a directory"):
        IrisClient.remote("http://10.0.0.2:8265", workspace)


def test_silent_dashboard_is_reported_at_once() -> None:
    with pytest.raises(NoClusterError, match="nothing answers at http"):
        IrisClient.remote(f"http://{address_of_nobody()}")


def test_call_travels_as_package_of_real_dashboard() -> None:
    dashboard = Dashboard()
    with served(dashboard) as url:
        run_id = send_call(RayJobs(url), "mine", divmod, 7, 2).run_id
    job = dashboard.jobs[run_id]
    (package,) = job["runtime_env"]["py_modules"]
    assert package.startswith("gcs://")
    assert "working_dir" not in job["runtime_env"]
    assert f"python -m {cluster_call.__name__} iris_ray_" in job["entrypoint"]
