"""A client through the dashboard: calls that cross to the head and back, without a cluster."""

import base64
import contextlib
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from iris_ray import IrisClient, RayJobConfig, Secret
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.version import versions_here
from iris_ray.client import transport as of_kernel
from iris_ray.client.transport import DirectTransport
from iris_ray.errors import (
    InvalidRequestError,
    JobCancelledError,
    LimitReachedError,
    NoClusterError,
    RayJobError,
    RemoteUserError,
    ResultNotPicklableError,
    ResultTooLargeError,
    ServiceUnavailableError,
    UnknownNameError,
    VersionMismatchError,
)
from iris_ray.remote import calls, transport
from iris_ray.remote.calls import HeadCall
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

    def submit(self, config: RayJobConfig, run_id: str, packages: Sequence[Path], says: bool) -> str:
        self.submitted.append(config)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print("Runtime env is setting up.")
            sys.path[:0] = [str(package.parent) for package in packages]
            try:
                calls.make_call(config.command[-1])
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
    monkeypatch.setattr(calls, "connect", lambda address: None)
    monkeypatch.setattr(calls, "SHORTEST_PAUSE_S", 0.001)
    monkeypatch.setattr(calls, "LONGEST_PAUSE_S", 0.001)
    return Head()


def call(head: Head, function: Callable[..., Any], *arguments: Any) -> HeadCall:
    return HeadCall.send(head, "mine", partial(function, *arguments))  # type: ignore[arg-type]


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
    monkeypatch.setattr(calls, "MOST_ANSWER_BYTES", 300)
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
        calls._unpack(unknown)


def test_other_iris_ray_on_head_is_refused_uncalled(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    here = versions_here()
    both = iter([here | {"protocol": 1, "version": "0.0.1"}, here])
    monkeypatch.setattr(calls, "versions_here", lambda: next(both))
    with pytest.raises(VersionMismatchError, match=r"the cluster's head is iris_ray .*, and this is iris_ray 0\.0\.1"):
        call(head, pytest.fail, "it was called").answer()


@pytest.mark.parametrize(
    ("state", "printed", "error", "said"),
    [
        ("stopped", "", JobCancelledError, "was stopped"),
        ("failed", "python: No module named iris_ray.remote.calls\n", VersionMismatchError, "build it with"),
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


def test_output_comes_once_over_broken_connections(head: Head) -> None:
    one = call(head, several)
    start = head.printed.index("between")
    head.breaks = [10, start + 3, start + 2, start + 5]
    lines: list[str] = []
    one.follow(lines.append)
    assert lines == ["between"]


def test_connection_that_always_breaks_ends_call(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PATIENCE_S", 0.002)
    one = call(head, several)
    head.breaks = [0] * 10
    with pytest.raises(NoClusterError, match="broken"):
        one.follow(print)
    assert head.stopped == [one.run_id]


# -- the client --------------------------------------------------------------------------------------------------------


class Joined(DirectTransport):
    """The transport of a process that has joined the cluster. Its Controller answers with the question."""

    def ask(self, patience_s: float, question: Any, /, *args: Any, **kwargs: Any) -> Any:
        return question.__name__, *args


@pytest.fixture
def client(head: Head, monkeypatch: pytest.MonkeyPatch) -> Iterator[IrisClient]:
    monkeypatch.setattr(transport, "DirectTransport", Joined)
    monkeypatch.setattr(transport, "RayJobs", lambda address: head)
    with IrisClient.remote("http://10.0.0.2:8265") as client:
        yield client


def launched(monkeypatch: pytest.MonkeyPatch, *answers: object) -> None:
    """Have the head submit jobs so: it yields these answers, of which errors are raised."""

    def submit(request: RunRequest, detached: bool) -> Iterator[object]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    monkeypatch.setattr(transport, "submit_on_head", submit)


def test_questions_are_asked_on_head_with_ids(client: IrisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, None, [7])
    job = client.submit(print)
    assert not client.is_direct
    answers: list[Any] = [client.job_status(job), job.status()]
    assert answers == [("job_status", job.job_id)] * 2
    answers = [client.task_status(job=job, task_index=3), client.list_workers()]
    assert answers == [("task_status", job.job_id, 3), ("list_workers",)]


def beside(job_id: str, task_index: int, command: Sequence[str], given: bytes) -> object:
    return job_id, task_index, command, given


def test_command_beside_task_is_run_by_head(client: IrisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.sessions.client.run_beside", beside)
    done: Any = client.exec("train-1", ["df"], 3)
    assert done == ("train-1", 3, ["df"], b"")


def told(job_id: str, task_index: int | None) -> None:
    print(f"{job_id} {task_index}")


@pytest.mark.usefixtures("client")
def test_output_of_function_on_head_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    transport.RemoteTransport("http://10.0.0.2:8265").show(told, "train-1", 3)
    assert capsys.readouterr().out == "train-1 3\n"


def test_missing_service_is_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_kernel, "REMOTE", "taken_out")
    with pytest.raises(ServiceUnavailableError, match=r"no service 'taken_out' here.*give HOST:PORT"):
        IrisClient.remote("http://10.0.0.2:8265")


def test_submitted_job_gives_results_or_its_error(client: IrisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, None, [7])
    assert client.submit(print).results(60) == [7]
    launched(monkeypatch, None, ValueError("as asked"))
    with pytest.raises(ValueError, match="as asked"):
        client.submit(print).results(60)
    launched(monkeypatch, LimitReachedError("too many"))
    with pytest.raises(LimitReachedError, match="too many"):
        client.submit(print)


def test_invalid_job_is_refused_before_sending(client: IrisClient, head: Head) -> None:
    with pytest.raises(InvalidRequestError, match="can't be called without arguments"):
        client.submit(divmod)
    assert not head.submitted


def test_value_of_secret_is_not_sent_and_its_name_is(
    client: IrisClient, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, None, [7])
    with pytest.raises(InvalidRequestError, match=r'value of KEY .* secrets set KEY.*from_store\("KEY"\)') as refused:
        client.submit(print, secrets={"KEY": Secret("s3cr3t")})
    assert "s3cr3t" not in str(refused.value)
    assert not head.submitted
    assert client.submit(print, secrets={"KEY": Secret.from_store("KEY")}).results(60) == [7]


def test_closed_client_ends_jobs_that_are_not_detached(
    head: Head, client: IrisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, None)
    head.state = "running"
    jobs = [client.submit(print, detached=detached) for detached in (True, False)]
    with pytest.raises(TimeoutError):
        jobs[0].results(0.01)
    client.close()
    head.state = "stopped"
    assert len(head.stopped) == 1
    assert head.stopped[0].startswith("print-")
    for job in jobs:
        with pytest.raises(JobCancelledError):
            job.results(60)


def test_workspace_travels_with_jobs_alone(head: Head, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transport, "DirectTransport", Joined)
    monkeypatch.setattr(transport, "RayJobs", lambda address: head)
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
        run_id = HeadCall.send(RayJobs(url), "mine", partial(divmod, 7, 2)).run_id
    job = dashboard.jobs[run_id]
    (package,) = job["runtime_env"]["py_modules"]
    assert package.startswith("gcs://")
    assert "working_dir" not in job["runtime_env"]
    assert f"python -m {calls.__name__} iris_ray_" in job["entrypoint"]
