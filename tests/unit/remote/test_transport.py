"""A client through the dashboard: calls that cross to the head and back, without a cluster."""

import base64
import contextlib
import io
import math
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from iris_ray import IrisClient, RayJobConfig, Secret
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.status import HostCondition, TaskAttempt, TaskStatus, WorkerStatus
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
from iris_ray.history.calls import HistoryRows
from iris_ray.logs.core import TaskLog
from iris_ray.model.lifecycle import TaskState
from iris_ray.remote import calls, transport
from iris_ray.remote.calls import HeadCall, time_zone
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

    def submit(self, config: RayJobConfig, run_id: str, packages: Sequence[Path], says: bool, hides_env: bool) -> str:
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

    def _look(self, run_id: str) -> tuple[RayJobStatus, str]:
        return self.status(run_id), self.printed

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
    monkeypatch.setenv("IRIS_PRIORITY", "system")
    monkeypatch.setenv("IRIS_PRIORITY_REASON", "tests new hosts")
    monkeypatch.setenv("IRIS_NOTIFY", "slack:HOOK,on=failed http:OTHER")
    assert call(head, divmod, 7, 2).answer(tuple[int, int]) == (3, 1)
    own = ["IRIS_USER=ann", "IRIS_TEAM=vision", "IRIS_PRIORITY=system", "IRIS_PRIORITY_REASON=tests new hosts"]
    own += ["IRIS_NOTIFY=slack:HOOK,on=failed http:OTHER", f"TZ={time_zone()}"]
    assert head.submitted[0].command[:9] == ["env", *own, "python", "-m"]
    both = call(head, several)
    assert (both.answer(int), both.answer(int, 1)) == (1, 2)


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ("Europe/Berlin", "CET-1CEST,M3.5.0,M10.5.0/3"),
        (":Asia/Kathmandu", "<+0545>-5:45"),
        ("EST5EDT,M3.2.0,M11.1.0", "EST5EDT,M3.2.0,M11.1.0"),
        ("<-0330>3:30", "<-0330>3:30"),
        ("no/such", "<local>0:00"),
    ],
)
def test_time_zone_is_the_same_where_there_are_no_data_of_zones(
    named: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offsets(zone: str) -> list[int]:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        return [time.localtime(at).tm_gmtoff for at in (1767225600, 1782864000)]  # in winter and in summer

    here, said = offsets(named), time_zone()
    monkeypatch.setenv("TZDIR", "/nowhere")
    there = offsets(said)
    monkeypatch.undo()
    time.tzset()
    assert (said, there) == (rule, here)


def test_address_of_webhook_is_not_shown_on_head(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_NOTIFY", "https://hooks.example.org/s3cr3t")
    with pytest.raises(InvalidRequestError, match=r"^IRIS_NOTIFY has the address of a webhook"):
        call(head, divmod, 7, 2)
    assert head.submitted == []


@pytest.mark.parametrize("error", [UnknownNameError("there is no job"), ZeroDivisionError("by 0")], ids=repr)
def test_error_on_head_is_raised_here(head: Head, error: Exception) -> None:
    with pytest.raises(type(error), match=f"^{error}$"):
        call(head, raised, error).answer(None)


def test_answers_of_every_kind_come_as_they_were(head: Head) -> None:
    task = TaskStatus(
        "train-1/task-3", 3, TaskState.RUNNING, 2, 0.5, None, None, 1, 0,
        (TaskAttempt(1, TaskState.WORKER_FAILED, "v4-8-0", math.inf, 2.0, 137, "\u2028"),),
        "n", None, "v4-8-0", "h", None,
    )  # fmt: skip
    host = WorkerStatus(
        "n", "10.0.0.1", None, None, None, {"CPU": 1.0}, {}, {"a": 1, "b": True, "c": "1", "d": 1.5}, (), None, None,
        HostCondition.FREE,
    )  # fmt: skip
    answers: list[tuple[object, Any]] = [
        ([task], list[TaskStatus]), (host, WorkerStatus), ((3, b"\xff\n", b""), tuple[int, bytes, bytes]),
        (TaskLog("train-1", 0, 1, data=b"\x00\xff"), TaskLog),
        (HistoryRows(("a",), ((1,), (1.5,), ("1",), (None,))), HistoryRows), (None, None),
    ]  # fmt: skip
    for value, kind in answers:
        assert call(head, lambda value=value: value).answer(kind) == value


def test_answer_of_a_stranger_is_not_unpickled(head: Head) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it ran",)

    one = call(head, several)
    forged = base64.b64encode(pickle.dumps((False, pickle.dumps(Evil()), ""))).decode()
    for line in (forged, f"answer {forged}", f"error {forged}", 'answer ["seven"]', 'error ["exec", "x", "y", "z"]'):
        head.printed = f"{one.word} {line}\n"
        with pytest.raises(RayJobError, match="gave an answer that can't be read"):
            one.answer(int)
    head.printed = f'{one.word} error ["SystemExit", "x", "of the head"]'
    with pytest.raises(RemoteUserError, match="of the head"):
        one.answer(int)


def test_too_large_answer_is_typed_error(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_ANSWER_BYTES", 300)
    assert call(head, bytes, 20).answer(bytes) == bytes(20)
    with pytest.raises(ResultTooLargeError, match="come at most 300"):
        call(head, bytes, 500).answer(bytes)


def test_other_iris_ray_on_head_is_refused_uncalled(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    here = versions_here()
    both = iter([here | {"protocol": 1, "version": "0.0.1"}, here])
    monkeypatch.setattr(calls, "versions_here", lambda: next(both))
    with pytest.raises(VersionMismatchError, match=r"the cluster's head is iris_ray .*, and this is iris_ray 0\.0\.1"):
        call(head, pytest.fail, "it was called").answer(None)


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
        one.answer(int)


def test_silent_dashboard_is_waited_for_a_while(head: Head) -> None:
    one = call(head, several)
    head.silent = 3
    assert one.answer(int, patience_s=60) == 1
    head.silent = 3
    with pytest.raises(NoClusterError):
        one.answer(int, patience_s=0)


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
    """The transport of a process that has joined the cluster. Its Controller refuses all questions, and quotes them."""

    def ask(self, patience_s: float, question: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise UnknownNameError(f"{question.__name__}{args}")


@pytest.fixture
def client(head: Head, monkeypatch: pytest.MonkeyPatch) -> Iterator[IrisClient]:
    monkeypatch.setattr(transport, "DirectTransport", Joined)
    monkeypatch.setattr(transport, "RayJobs", lambda address: head)
    with IrisClient.remote("http://10.0.0.2:8265") as client:
        yield client


class Job:
    """A job of the head, which gives this or raises it.

    Attributes:
        given: the results, or an error.
    """

    def __init__(self, given: object) -> None:
        self.given = given

    def results(self) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def launched(monkeypatch: pytest.MonkeyPatch, given: object = None, refusal: Exception | None = None) -> None:
    """Have the head launch jobs that give this, or refuse them."""

    def launch(request: RunRequest, detached: bool) -> Job:
        if refusal is not None:
            raise refusal
        return Job(given)

    monkeypatch.setattr(transport, "launch", launch)


def test_questions_are_asked_on_head_with_ids(client: IrisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, [7])
    job = client.submit(print)
    assert not client.is_direct
    questions: dict[str, Callable[[], object]] = {
        f"job_status('{job.job_id}',)": job.status,
        f"task_status('{job.job_id}', 3)": lambda: client.task_status(job=job, task_index=3),
        "list_workers()": client.list_workers,
    }
    for asked, ask in questions.items():
        with pytest.raises(UnknownNameError, match=re.escape(asked)):
            ask()


def beside(job_id: str, task_index: int, command: Sequence[str], given: bytes) -> tuple[int, bytes, bytes]:
    return 5, repr((job_id, task_index, command)).encode(), b"\xff" + given


def test_command_beside_task_is_run_by_head(client: IrisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.sessions.client.run_beside", beside)
    done = client.exec("train-1", ["df"], 3, b"x")
    assert (done.returncode, done.stdout, done.stderr) == (5, b"('train-1', 3, ['df'])", b"\xffx")


def told(job_id: str, task_index: int | None) -> None:
    print(f"{job_id} {task_index}")


@pytest.mark.usefixtures("client")
def test_output_of_function_on_head_is_printed_here(capsys: pytest.CaptureFixture[str]) -> None:
    transport.RemoteTransport("http://10.0.0.2:8265").show(told, "train-1", 3)
    assert capsys.readouterr().out == "train-1 3\n"


def test_missing_service_is_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_kernel, "REMOTE", "taken_out")
    with pytest.raises(ServiceUnavailableError, match=r"no service 'taken_out' here.*run this on a node"):
        IrisClient.remote("http://10.0.0.2:8265")


def test_submitted_job_gives_results_or_its_error(client: IrisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, [7])
    assert client.submit(print).results(60) == [7]
    launched(monkeypatch, ValueError("as asked"))
    with pytest.raises(ValueError, match="as asked"):
        client.submit(print).results(60)
    launched(monkeypatch, [threading.Lock()])
    with pytest.raises(ResultNotPicklableError, match="can't be pickled"):
        client.submit(print).results(60)
    launched(monkeypatch, refusal=LimitReachedError("too many"))
    with pytest.raises(LimitReachedError, match="too many"):
        client.submit(print)


@pytest.mark.parametrize(
    ("failed", "error", "said"),
    [(True, RemoteUserError, "^of the task$"), (False, ResultNotPicklableError, "no_such_module.*install here")],
)
def test_results_of_unknown_class_are_typed_error(failed: bool, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        transport._unpacked(pickle.dumps((failed, b"cno_such_module\nname\n.", "of the task")))


def test_invalid_job_is_refused_before_sending(client: IrisClient, head: Head) -> None:
    with pytest.raises(InvalidRequestError, match="can't be called without arguments"):
        client.submit(divmod)
    assert not head.submitted


def test_value_of_secret_is_not_sent_and_its_name_is(
    client: IrisClient, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, [7])
    with pytest.raises(InvalidRequestError, match=r'value of KEY .* secrets set KEY.*from_store\("KEY"\)') as refused:
        client.submit(print, secrets={"KEY": Secret("s3cr3t")})
    assert "s3cr3t" not in str(refused.value)
    assert not head.submitted
    assert client.submit(print, secrets={"KEY": Secret.from_store("KEY")}).results(60) == [7]


def test_closed_client_ends_jobs_that_are_not_detached(
    head: Head, client: IrisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accepted(request: RunRequest, detached: bool) -> Iterator[None]:
        yield None

    monkeypatch.setattr(transport, "submit_on_head", accepted)
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
    launched(monkeypatch, [7])
    with IrisClient.remote("https://ray.example.com", tmp_path) as client:
        client.submit(print)
        with pytest.raises(UnknownNameError):
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
