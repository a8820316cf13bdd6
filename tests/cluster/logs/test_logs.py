"""What tasks print, on real hosts: kept whatever ends them, fetched afterwards, and harmless however much it is."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import release, run_on_pod, run_on_pod_ray
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.calls.ray_internals import ClusterStore
from iris_ray.cli.conventions import INTERRUPTED, OK
from iris_ray.errors import UnknownNameError
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.client import host_logs
from iris_ray.logs.core import LogPosition, TaskLog
from iris_ray.logs.stream import stream_logs
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import command_line, environment, iris
from tests.support.gangs import Trace, all_jobs, controller_pid, the_controller
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


def fetch(job_id: str, task_index: int = 0, attempt: int | None = None, max_bytes: int = 1 << 20, **at: Any) -> TaskLog:
    return the_controller().ask(LogCalls.fetch_task_logs, job_id, task_index, LogPosition(attempt, **at), max_bytes)


def has_last_lines(key: TaskAttemptId) -> bool:
    """Whether the Controller has the last lines of that attempt in its memory; nothing else shows it."""
    controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    return ray.get(controller.__ray_call__.remote(lambda self: logs_of(self)._memory.last_lines(key) is not None))


def logs_of(controller: Any) -> Any:
    """Return the logs in the Controller, in its own process."""
    return next(running.part for running in controller._services if running.service.name == "logs")


def latest_job(name: str) -> str:
    return [job.job_id for job in all_jobs() if job.name == name][-1]


def only_task(index: int, function: Callable[[int], Any]) -> Callable[[], Any]:
    """Runs in that task alone; the others wait for the end. The function gets the attempt's number."""

    def alone() -> Any:
        import time

        from iris_ray import get_job_info

        me = get_job_info()
        assert me is not None
        if me.task_index != index:
            return time.sleep(600 if me.attempt < 5 else 0)
        return function(me.attempt)

    return alone


@pytest.mark.long
def test_logs_of_every_attempt_outlive_its_job() -> None:
    def dies(attempt: int) -> None:
        import ctypes
        import os
        import signal
        import subprocess
        import sys

        print(f"attempt {attempt} begins")
        print("to stderr", file=sys.stderr)
        if attempt == 1:
            os.write(1, b"x" * 200_000 + b"\nlast words")
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 2:
            ctypes.string_at(0)
        if attempt == 3:
            print("just before")
            os._exit(3)
        if attempt == 4:
            subprocess.run(["echo", "a child"], check=True)
            subprocess.run(["sh", "-c", "echo another session"], start_new_session=True, check=True)
            raise ValueError("on purpose")

    run_on_pod(only_task(1, dies), "v4-16", max_retries_failure=4)
    release()
    job = latest_job("alone")
    logs = [fetch(job, 1, attempt) for attempt in range(1, 6)]
    assert [log.text.splitlines()[:2] for log in logs] == [[f"attempt {n} begins", "to stderr"] for n in range(1, 6)]
    assert logs[0].data.endswith(b"x" * 200_000 + b"\nlast words")
    assert "Segmentation fault" in logs[1].text
    assert logs[2].text.endswith("just before\n")
    assert logs[3].text.endswith("a child\nanother session\n")
    wait_until(lambda: fetch(job, 1).finished)
    assert all(log.from_host and log.note is None for log in logs)
    empty = fetch(job, 0, 5)
    assert (empty.data, empty.note, empty.from_host) == (b"", None, True)

    at_once = fetch(job, 1, 1, offset=0, max_bytes=10)
    assert (at_once.data, at_once.more, at_once.next_offset) == (b"attempt 1 ", True, 10)
    assert fetch(job, 1, 1, offset=10, max_bytes=6).data == b"begins"
    assert fetch(job, 1, 3, offset=0, max_bytes=1000, tail_lines=1).data == b"just before\n"
    for wrong in ((job, 2), (job, 0, 6), (job, 0, 0), (job[:-1], 0)):
        with pytest.raises(UnknownNameError, match="there is no"):
            fetch(*wrong)


@pytest.mark.long
def test_lines_are_readable_during_run_and_after_controllers_death(trace: Trace) -> None:
    def says(facts: dict[str, Any]) -> None:
        print("I am", facts["index"])
        while not (directory / "finish").exists():
            time.sleep(0.02)
        print("the end")

    directory = trace.directory
    running = run_on_pod_ray.remote(trace.gang(says), "v4-16")
    job = trace.wait_for_tasks(2)[0]["job"]
    wait_until(lambda: fetch(job, 1).data == b"I am 1\n")
    assert not fetch(job, 1).finished
    pid = controller_pid()
    os.kill(pid, signal.SIGKILL)

    wait_until(lambda: controller_pid() != pid)
    assert fetch(job, 1).data == b"I am 1\n"
    trace.finish()
    ray.get(running)
    with host_logs(the_controller()) as logs:
        lines = [(line.task_index, line.data) for line in stream_logs(logs, job, 1)]
        assert lines == [(1, b"I am 1"), (1, b"the end")]
        assert {line.task_index for line in stream_logs(logs, job)} == {0, 1}


@pytest.mark.long
def test_new_controller_finds_earlier_attempts_on_hosts() -> None:
    def fails_twice() -> None:
        from iris_ray import get_job_info

        me = get_job_info()
        assert me is not None
        print("attempt", me.attempt)
        if me.attempt < 3:
            if me.task_index == 0:
                time.sleep(600)  # until it is stopped: the other one is to print first
            raise ValueError("on purpose")

    run_on_pod(fails_twice, "v4-16", max_retries_failure=2)
    job, pid = latest_job("fails_twice"), controller_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: controller_pid() != pid)

    def read_on_hosts() -> list[TaskLog] | None:
        logs = [fetch(job, 1, attempt) for attempt in (1, 2, 3)]
        return logs if all(log.from_host for log in logs) else None  # a reader may start late on a busy host

    found = wait_until(read_on_hosts)
    assert [log.text.splitlines()[0] for log in found] == ["attempt 1", "attempt 2", "attempt 3"]


@pytest.mark.proof
def test_binary_output_comes_back_unchanged() -> None:
    def prints() -> None:
        import os

        os.write(1, bytes(range(256)) * 1000)

    run_on_pod(prints, "v4-16")
    log = fetch(latest_job("prints"), 1)
    assert log.data == bytes(range(256)) * 1000
    assert isinstance(log.text, str)


@pytest.mark.long
def test_gigabytes_of_output_flood_neither_disk_nor_driver(cluster: SimulatedCluster) -> None:
    script = """
        import sys

        import ray

        from iris_ray import get_job_info, run_on_pod

        ray.init(sys.argv[1])

        def gushes():
            import os

            chunk = b"".join(b"%d of %d\\n" % (n, n) for n in range(100_000))
            written = 0
            while get_job_info().task_index == 0 and written < 400_000_000:
                written += os.write(1, chunk)
            print("that was all")
            return written

        print("written:", sum(run_on_pod(gushes, "v4-16")))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), cluster.address],
        capture_output=True,
        timeout=240,
        env={**os.environ, "RAY_COLOR_PREFIX": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout) < 10_000_000
    assert b"left out here; see iris-ray logs gushes" in done.stdout
    job = latest_job("gushes")
    log = fetch(job, 0, None, offset=0, max_bytes=1, tail_lines=1)
    assert f"written: {log.end - len('that was all') - 1}\n".encode() in done.stdout, "offsets count every byte"
    first = fetch(job, 0)
    assert first.offset > 0
    assert first.note is not None
    kept = [
        path.stat().st_size
        for slice_name in cluster.slice_names
        for host in cluster.worker_ids(slice_name)
        for path in (cluster.host_dir(slice_name, host) / "task-logs" / job).glob("task-0.*")
    ]
    assert sum(kept) <= 5 * (64 << 20)
    assert sum(kept) == log.end - first.offset


@pytest.mark.proof
def test_last_lines_outlive_their_host(cluster: SimulatedCluster, trace: Trace) -> None:
    def says(facts: dict[str, Any]) -> None:
        print("attempt", facts["attempt"], "of", facts["index"])
        while not (directory / "finish").exists():
            time.sleep(0.02)

    directory = trace.directory
    running = run_on_pod_ray.remote(trace.gang(says), "v4-16")
    first = trace.wait_for_tasks(2)
    wait_until(lambda: has_last_lines(TaskAttemptId(first[1]["job"], 1, 1)))
    cluster.kill_host(first[1]["slice"], 1)
    trace.wait_for_tasks(2, attempt=2)
    log = fetch(first[1]["job"], 1, 1)
    assert (log.data, log.from_host) == (b"attempt 1 of 1\n", False)
    assert "its host is gone" in (log.note or "")
    assert fetch(first[0]["job"], 0, 1).from_host, "the slice's other host is still there"
    trace.finish()
    ray.get(running)


def test_user_variable_values_are_in_no_log_or_mark(cluster: SimulatedCluster) -> None:
    @ray.remote(runtime_env={"env_vars": {"MY_KEY": "swordfish", "OMP_NUM_THREADS": "3"}})
    def knows() -> None:
        import os

        print("it has", len(os.environ["MY_KEY"]), "letters")

    run_on_pod(knows, "v4-16")
    assert fetch(latest_job("knows")).data == b"it has 9 letters\n"
    read = 0
    for slice_name in cluster.slice_names:
        for host in cluster.worker_ids(slice_name):
            for part in ("task-logs", "tasks"):
                for path in (cluster.host_dir(slice_name, host) / part).rglob("*"):
                    if path.is_file() and path.stat().st_size < 1 << 20:
                        read += 1
                        assert b"swordfish" not in path.read_bytes()
    assert read
    put_down = ClusterStore().items("")
    assert any(latest_job("knows").encode() in value for value in put_down.values())
    assert not [key for key, value in put_down.items() if b"swordfish" in value]


@pytest.mark.long
def test_logs_command_prints_follows_and_names_attempts(
    cluster: SimulatedCluster, trace: Trace, tmp_path: Path
) -> None:
    def fails_once(facts: dict[str, Any]) -> None:
        print(f"attempt {facts['attempt']} of task {facts['index']}")
        while not (directory / f"end-{facts['attempt']}").exists():
            time.sleep(0.02)
        if facts["index"] == 1 and facts["attempt"] == 1:
            raise ValueError("on purpose")

    directory = trace.directory
    running = run_on_pod_ray.remote(trace.gang(fails_once), "v4-16")
    job = trace.wait_for_tasks(2)[0]["job"]
    printed = tmp_path / "printed"

    def follow(*arguments: str) -> "subprocess.Popen[bytes]":
        with printed.open("wb") as out:
            return subprocess.Popen(
                command_line("logs", "-f", job, *arguments),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(cluster),
            )

    stopped = follow("0")
    wait_until(lambda: b"attempt 1 of task 0\n" in printed.read_bytes())
    stopped.send_signal(signal.SIGINT)
    assert stopped.wait(60) == INTERRUPTED
    following = follow()
    wait_until(lambda: b"task-1| attempt 1 of task 1\n" in printed.read_bytes())
    (directory / "end-1").touch()
    wait_until(lambda: b"task-1| attempt 2 of task 1\n" in printed.read_bytes())
    (directory / "end-2").touch()
    assert following.wait(60) == OK
    text = printed.read_text()
    assert "task-0| attempt 1 of task 0\n" in text
    assert "task-0| attempt 2 of task 0\n" in text
    assert "attempt 2 of task 1\n" in text.replace("task-1| attempt 2 of task 1\n", ""), "it says that a new one begins"
    ray.get(running)

    assert iris(cluster, "logs", job).stdout == "attempt 2 of task 0\n"
    assert sorted(iris(cluster, "logs", job, "--grep", "^attempt . of task 1").stdout.splitlines()) == [
        f"task-1.attempt-{n}| attempt {n} of task 1" for n in (1, 2)
    ]
