"""What a task hears and says through its files, and the signals that come with it, in real processes."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from iris_ray import heartbeat, on_preemption, preemption_notice
from iris_ray.actors.host import notice_delivery, task_watch
from iris_ray.actors.host.host_directory import started_mark
from iris_ray.actors.host.output_pump import OutputPump
from iris_ray.actors.host.process_ledger import ProcessLedger
from iris_ray.actors.host.process_tree import ProcessTree, stat_of
from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.actors.host.watched_process import WatchedProcess
from iris_ray.actors.wire.messages import Progress
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.task.preemption import PreemptionNotice

NOTICE = Notice(NoticeKind.MAINTENANCE, "slice-a host 1: it is to be repaired", time.time() + 3600.0)
PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(tmp_path))
    monkeypatch.delenv(TaskFiles.VARIABLE, raising=False)
    (tmp_path / "tasks").mkdir()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskFiles:
    """This process is a task."""
    files = TaskFiles.of_process(tmp_path, os.getpid())
    monkeypatch.setenv(TaskFiles.VARIABLE, files.prefix)
    return files


def tell(files: TaskFiles, notice: Notice = NOTICE) -> None:
    """As a host does: whoever looks sees all of it or nothing."""
    unfinished = files.notice.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"kind": notice.kind.value, "reason": notice.reason, "deadline": notice.deadline}))
    unfinished.replace(files.notice)


def tree(pid: int) -> ProcessTree:
    stat = stat_of(pid)
    assert stat is not None
    return ProcessTree(pid, stat.started)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# -- what a task calls ----------------------------------------------------------------------------------------------


def test_outside_a_task_there_is_no_notice_no_callback_and_no_heartbeat(tmp_path: Path) -> None:
    threads = threading.active_count()
    assert preemption_notice() is None
    on_preemption(lambda notice: None)
    heartbeat(3)
    assert threading.active_count() == threads
    assert list((tmp_path / "tasks").iterdir()) == []


def test_notice_says_what_it_was_told_and_a_more_urgent_one_replaces_it(files: TaskFiles) -> None:
    assert preemption_notice() is None
    tell(files)
    notice = preemption_notice()
    assert notice == PreemptionNotice(NOTICE.kind, NOTICE.reason, NOTICE.deadline)
    assert 0 < notice.seconds_left <= NOTICE.deadline - time.time() + 1
    tell(files, Notice(NoticeKind.PREEMPTION, "now", 1.0))
    urgent = preemption_notice()
    assert urgent == PreemptionNotice(NoticeKind.PREEMPTION, "now", 1.0)
    assert urgent.seconds_left < 0


def test_callback_is_called_once_in_a_thread_of_its_own(files: TaskFiles) -> None:
    calls: list[tuple[PreemptionNotice, str]] = []
    on_preemption(lambda notice: calls.append((notice, threading.current_thread().name)))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "iris_ray.on_preemption"]
    assert thread.daemon, "it must not keep a process alive that is over"
    time.sleep(0.3)
    assert calls == []
    tell(files)
    thread.join(PATIENCE_S)
    assert calls == [(preemption_notice(), "iris_ray.on_preemption")]
    tell(files, Notice(NoticeKind.PREEMPTION, "now", 1.0))
    time.sleep(0.3)
    assert len(calls) == 1


def test_saved_says_so_and_never_returns(files: TaskFiles) -> None:
    tell(files)
    notice = preemption_notice()
    assert notice is not None
    thread = threading.Thread(target=notice.saved, daemon=True)
    assert not files.saved.exists()
    thread.start()
    until(files.saved.exists)
    thread.join(0.3)
    assert thread.is_alive()


def test_heartbeat_says_the_step_and_when(files: TaskFiles) -> None:
    heartbeat()
    assert files.heartbeat.read_text() == ""
    heartbeat(7)
    assert files.heartbeat.read_text() == "7"
    os.utime(files.heartbeat, (1.0, 1.0))
    heartbeat(7)
    assert time.time() - files.heartbeat.stat().st_mtime < 60, "the same step once more is a sign of life, too"


def beat(times: int) -> None:
    for _ in range(times):
        heartbeat(1234567890)


def test_heartbeat_of_several_threads_and_processes_at_once_is_always_whole(files: TaskFiles) -> None:
    """The unfinished file of one was renamed by another of the same process."""
    heartbeat(1234567890)
    errors: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, errors.append
    try:
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=beat, args=(100,)) for _ in range(2)]
        threads = [threading.Thread(target=beat, args=(100,)) for _ in range(4)]
        all_of_them: list[Any] = [*children, *threads]
        for one in all_of_them:
            one.start()
        while any(one.is_alive() for one in all_of_them):
            assert files.heartbeat.read_text() == "1234567890"
        for one in all_of_them:
            one.join()
    finally:
        threading.excepthook = before
    assert errors == []
    assert [child.exitcode for child in children] == [0, 0]
    assert [path.name for path in files.heartbeat.parent.iterdir()] == [files.heartbeat.name], "nothing is left over"


# -- files of a process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["recorded", "forgotten"])
def test_what_an_earlier_process_of_that_pid_was_told_is_gone(tmp_path: Path, when: str) -> None:
    files, ledger = TaskFiles.of_process(tmp_path, os.getpid()), ProcessLedger(tmp_path)
    tell(files)
    other = TaskFiles.of_process(tmp_path, os.getpid() + 1)
    for one in (files, other):
        for path in (one.notice, one.saved, one.heartbeat):
            path.write_text("{}")
    if when == "recorded":
        ledger.record(tree(os.getpid()), "token")
    else:
        ledger.forget(os.getpid())
    assert not any(path.exists() for path in (files.notice, files.saved, files.heartbeat))
    assert all(path.exists() for path in (other.notice, other.saved, other.heartbeat))
    files.remove()  # there is nothing left to remove


# -- its host -------------------------------------------------------------------------------------------------------


class Child:
    """A real process that runs a script as a task does: its files are known, and SIGTERM with a notice is swallowed."""

    BEFORE = """
        import faulthandler, os, signal, sys, time
        from pathlib import Path
        from iris_ray.actors.host.host_directory import host_directory, started_mark
        from iris_ray.actors.host.task_signals import STACKS_SIGNAL, survive_notices
        from iris_ray.actors.wire.task_files import TaskFiles
        files = TaskFiles.of_process(host_directory(), os.getpid())
        os.environ[TaskFiles.VARIABLE] = files.prefix
    """
    START = """
        print("ready", flush=True)
        sys.stdin.readline()
        survive_notices(files)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
        started_mark(host_directory(), os.getpid()).touch()
    """

    def __init__(self, script: str, before: str = "") -> None:
        parts = (self.BEFORE, before, self.START, script)
        code = "\n".join(map(textwrap.dedent, parts))
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.says("ready")

    def start(self) -> None:
        """Let the script begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def clear(self) -> str:
        """What it said on stderr."""
        self.process.kill()
        return self.process.communicate()[1]


Make = Callable[..., Child]


@pytest.fixture
def make() -> Iterator[Make]:
    children = []

    def make(*args: str) -> Child:
        children.append(Child(*args))
        return children[-1]

    yield make
    for child in children:
        if child.process.returncode is None:
            child.clear()
        for stream in (child.process.stdin, child.process.stdout, child.process.stderr):
            if stream is not None:
                stream.close()


class NoOutput(OutputPump):
    """Reads nothing."""

    def __init__(self) -> None:
        pass

    def close(self) -> None:
        pass


def watched(child: Child, tmp_path: Path, what: Callable[[TaskWatch], Awaitable[Any]]) -> Any:
    """Do something with the watch that TPUHostActor has over a process, from before its start."""

    async def run() -> Any:
        one = tree(child.process.pid)
        process = WatchedProcess(one.pid, one.started)
        watch = TaskWatch(None, process, one, "token", ProcessLedger(tmp_path), None, NoOutput())
        try:
            return await asyncio.wait_for(what(watch), PATIENCE_S)
        finally:
            child.process.kill()
            child.process.wait()
            await watch.how_it_ended()

    return asyncio.run(run())


def started(child: Child, what: Callable[[TaskWatch], Awaitable[Any]]) -> Callable[[TaskWatch], Awaitable[Any]]:
    """The same once the child may begin; the mark of an earlier process would have been removed."""

    def start(watch: TaskWatch) -> Awaitable[Any]:
        child.start()
        return what(watch)

    return start


SLEEP = "time.sleep(60)"
SAVE = """
    import iris_ray
    while (notice := iris_ray.preemption_notice()) is None:
        time.sleep(0.01)
    print(notice.kind.value, flush=True)
    notice.saved()
"""


def test_host_tells_a_task_that_saves(make: Make, tmp_path: Path) -> None:
    child = make(SAVE)
    assert watched(child, tmp_path, started(child, lambda watch: watch.notify(NOTICE))) is True
    child.says("maintenance")


def test_host_that_tells_a_task_which_ends_without_having_saved_hears_that(make: Make, tmp_path: Path) -> None:
    child = make("import iris_ray\nwhile iris_ray.preemption_notice() is None: time.sleep(0.01)")
    assert watched(child, tmp_path, started(child, lambda watch: watch.notify(NOTICE))) is False


def test_host_waits_with_its_signal_until_the_task_has_begun(make: Make, tmp_path: Path) -> None:
    """Whoever waits for a task has no handlers yet, and would die of either signal."""
    child = make(SAVE)

    async def tell_early(watch: TaskWatch) -> bool:
        told = asyncio.ensure_future(watch.notify(NOTICE))
        watch.dump_stacks()
        await asyncio.sleep(0.3)
        assert not told.done()
        assert not watch.ended
        child.start()
        return await told

    assert watched(child, tmp_path, tell_early) is True
    assert "most recent call" not in child.clear()


def test_host_asks_nobody_who_is_over(make: Make, tmp_path: Path) -> None:
    child = make("")

    async def ask_late(watch: TaskWatch) -> bool:
        while not watch.ended:
            await asyncio.sleep(0.01)
        watch.dump_stacks()
        return await watch.notify(NOTICE)

    assert watched(child, tmp_path, started(child, ask_late)) is False


def test_host_asked_after_the_deadline_answers_in_bounded_time(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that never saves is asked again and again: questions that stayed would keep its host from all others."""
    monkeypatch.setattr(notice_delivery, "LATE_ANSWER_S", 0.1)
    passed = Notice(NoticeKind.PREEMPTION, "now", time.time() - 1.0)
    child = make("    sys.stdin.readline()" + SAVE)

    async def ask_twice(watch: TaskWatch) -> list[bool]:
        first = await watch.notify(passed)
        child.start()
        while not TaskFiles.of_process(tmp_path, child.process.pid).saved.exists():
            await asyncio.sleep(0.01)
        return [first, await watch.notify(passed)]

    assert watched(child, tmp_path, started(child, ask_twice)) == [False, True]


def test_host_tells_of_a_more_urgent_notice_without_a_second_signal(make: Make, tmp_path: Path) -> None:
    """The handler may be saving: it would be started once more, within itself."""
    child = make("""
        import iris_ray
        def handler(*_):
            print("saving", flush=True)
            while iris_ray.preemption_notice().reason != "now":
                time.sleep(0.01)
            time.sleep(0.3)
            print("saved", flush=True)
            iris_ray.preemption_notice().saved()
        signal.signal(signal.SIGTERM, handler)
        print("waits", flush=True)
        time.sleep(60)
    """)

    async def tell_twice(watch: TaskWatch) -> list[bool]:
        child.says("waits")
        first = asyncio.ensure_future(watch.notify(NOTICE))
        await asyncio.to_thread(child.says, "saving")
        second = await watch.notify(Notice(NoticeKind.PREEMPTION, "now", time.time() + 60.0))
        await asyncio.to_thread(child.says, "saved")
        return [await first, second]

    assert watched(child, tmp_path, started(child, tell_twice)) == [False, True]


def test_host_knows_how_far_a_task_is(make: Make, tmp_path: Path) -> None:
    child = make("import iris_ray\niris_ray.heartbeat()\nprint(1, flush=True)\nsys.stdin.readline()\n"
                 "iris_ray.heartbeat(12)\nprint(2, flush=True)\n" + SLEEP)  # fmt: skip

    async def look(watch: TaskWatch) -> list[Progress]:
        found = [watch.progress()]
        child.start()
        child.says("1")
        found.append(watch.progress())
        child.start()
        child.says("2")
        os.utime(TaskFiles.of_process(tmp_path, child.process.pid).heartbeat, (time.time() - 100,) * 2)
        return [*found, watch.progress()]

    nothing, alive, further = watched(child, tmp_path, look)
    assert nothing == Progress(None, None)
    assert (alive.step, further.step) == (None, 12)
    assert 0 <= alive.age < 60
    assert 99 < further.age < 160


@pytest.mark.parametrize(
    ("script", "where"),
    [
        (SLEEP, "in sleeper"),
        ("import re; re.match('(a+)+b', 'a' * 60)", "in sleeper"),  # in C, with the GIL, for ever
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.stderr = None; " + SLEEP, "in sleeper"),
    ],
    ids=["sleeps", "spins in C", "without sys.stderr"],
)
def test_stacks_of_a_process_that_hangs_are_printed_with_those_of_its_threads(
    make: Make, tmp_path: Path, script: str, where: str
) -> None:
    child = make(f"""
        import threading
        def waiter():
            threading.Event().wait()
        threading.Thread(target=waiter, daemon=True).start()
        def sleeper():
            print("hangs", flush=True); {script}
        sleeper()
    """)  # fmt: skip

    async def dump(watch: TaskWatch) -> str:
        child.says("hangs")
        watch.dump_stacks()
        assert child.process.stderr is not None
        stacks = ""
        while where not in stacks:
            stacks += await asyncio.to_thread(child.process.stderr.readline)
        assert not watch.ended, "it only looks"
        return stacks

    stacks = watched(child, tmp_path, started(child, dump))
    assert "in waiter" in stacks
    assert "most recent call first" in stacks


# -- its children ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False])
def test_children_of_a_task_that_crashes_are_ended_with_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    """Forked ones, and those with an environment of their own: they hold memory and chips, and carry no token."""
    monkeypatch.setattr(task_watch, "DESCENDANTS_S", 0.05 if noted else PATIENCE_S)
    child = make("""
        import subprocess
        os.setpgid(0, 0)
        pids = [os.fork()]
        if not pids[0]:
            time.sleep(60)
        pids.append(subprocess.Popen(["sleep", "60"], env={}).pid)
        pids.append(subprocess.Popen(["sleep", "60"], env={}, start_new_session=True).pid)
        print(*pids, flush=True)
        time.sleep(60)
    """)

    async def crash(watch: TaskWatch) -> list[bool]:
        assert child.process.stdout is not None
        children = [psutil.Process(int(pid)) for pid in child.process.stdout.readline().split()]
        await asyncio.sleep(0.5)
        child.process.kill()
        child.process.wait()
        await watch.how_it_ended()
        assert all(one.is_running() for one in children)
        await watch.end("another task ended")
        left = [one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children]
        for one in children:
            if one.is_running():
                one.kill()
        return left

    left = watched(child, tmp_path, started(child, crash))
    assert left == [False, False, not noted], "who left the group at once, before anybody saw it, can't be known"


# -- SIGTERM --------------------------------------------------------------------------------------------------------

SAY_AND_EXIT = "signal.signal(signal.SIGTERM, lambda *_: (print('handler', flush=True), os._exit(7)))"
WAIT = "print('waits', flush=True)\nsys.stdin.readline()\nprint('goes on', flush=True)"


def terminate(child: Child, tmp_path: Path, with_notice: bool) -> None:
    child.start()
    child.says("waits")
    if with_notice:
        tell(TaskFiles.of_process(tmp_path, child.process.pid))
    child.process.send_signal(signal.SIGTERM)


def test_sigterm_with_a_notice_is_swallowed_where_user_code_has_no_handler(make: Make, tmp_path: Path) -> None:
    child = make(WAIT, SAY_AND_EXIT)
    terminate(child, tmp_path, with_notice=True)
    time.sleep(0.2)
    child.start()
    child.says("goes on")
    assert child.end() == 0


@pytest.mark.parametrize("with_notice", [True, False])
def test_sigterm_reaches_the_handler_of_user_code(make: Make, tmp_path: Path, with_notice: bool) -> None:
    child = make(SAY_AND_EXIT + "\n" + WAIT)
    terminate(child, tmp_path, with_notice)
    child.says("handler")
    assert child.end() == 7


@pytest.mark.parametrize(("before", "code"), [(SAY_AND_EXIT, 7), ("", 128 + signal.SIGTERM)], ids=["a handler", "none"])
def test_sigterm_without_a_notice_ends_the_process_as_before(
    make: Make, tmp_path: Path, before: str, code: int
) -> None:
    child = make(WAIT, before)
    terminate(child, tmp_path, with_notice=False)
    assert child.end() == code


def test_sigterm_from_a_task_that_has_had_a_notice_still_ends_its_own_children(make: Make, tmp_path: Path) -> None:
    """They inherit the handler, and ``terminate()`` of a pool of processes would wait for them for ever."""
    child = make("""
        import multiprocessing
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.2)
        print("waits", flush=True)
        sys.stdin.readline()
        worker.terminate()
        worker.join(10)
        print(worker.exitcode is not None, flush=True)
        worker.kill()
    """)
    terminate(child, tmp_path, with_notice=True)
    child.start()
    child.says("True")


def test_task_heeds_signals_before_anybody_knows_that_it_has_begun(make: Make, tmp_path: Path) -> None:
    """The mark of its start tells its host that signals may come: what runs then must not die of them."""
    script = """
        import iris_ray.actors.host.task_process as task_process
        from iris_ray.model.job_info import JobInfo
        from iris_ray.actors.wire.messages import TaskLaunch
        from iris_ray.model.multislice import MultisliceInfo
        from ray import cloudpickle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.unregister(STACKS_SIGNAL)
        (host_directory() / "dev").mkdir()
        redirect = task_process.redirect_output
        def marked(directory, launch):
            pipe = redirect(directory, launch)
            assert started_mark(directory, os.getpid()).exists()
            files.notice.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), STACKS_SIGNAL)
            return pipe
        task_process.redirect_output = marked
        info = JobInfo("job", "job/task-1", 1, 4, 2, 0, 2, "slice-a", 1, "127.0.0.1:20002")
        place = MultisliceInfo("127.0.0.1", 0, 1, 20_000, 20_001)
        launch = TaskLaunch(cloudpickle.dumps(lambda: 7), {}, info, place, None, "label")
        print(task_process.TaskProcess("127.0.0.1", (), ()).run(launch).kind.name, file=sys.__stdout__, flush=True)
    """
    child = make(script)
    child.start()
    assert child.process.stdout is not None
    assert "RETURNED" in child.process.stdout.read()
    assert child.end() == 0
    assert started_mark(tmp_path, child.process.pid).exists()


# -- leaving after a notice -----------------------------------------------------------------------------------------

# Runs each function in a forked process of its own, as a task that has had a notice, and says what became of it.
LEAVE = """
    import concurrent.futures, functools, json, threading
    import iris_ray.actors.host.task_process as task_process
    from iris_ray.actors.wire.messages import TaskLaunch
    from iris_ray.model.job_info import JobInfo
    from iris_ray.model.multislice import MultisliceInfo
    from ray import cloudpickle

    def told(handler):
        signal.signal(signal.SIGTERM, handler)
        TaskFiles.of_this_task().notice.touch()
        os.kill(os.getpid(), signal.SIGTERM)

    def leave(code, *_):
        sys.exit(code)

    class Handler:
        def method(self, *_):
            sys.exit(3)
        def __call__(self, *_):
            sys.exit()

    def resets(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    def runs_on():
        told(lambda *_: None)
        sys.exit(0)  # its loop has seen that it was told, and has saved

    def fails():
        told(lambda *_: None)
        sys.exit(3)

    def raises():
        told(lambda *_: None)
        raise ValueError

    def was_not_told():
        sys.exit(0)

    def saves(*_):
        with concurrent.futures.ThreadPoolExecutor() as idle:
            idle.submit(int).result()
            concurrent.futures.ThreadPoolExecutor().submit(int).result()  # nobody shuts this one down
        threading.Thread(target=lambda: (time.sleep(0.5), Path(f"{os.getpid()}.checkpoint").touch())).start()
        sys.exit(0)

    def saves_behind():
        told(saves)

    cases = {
        "function": lambda: told(lambda *_: sys.exit(3)),
        "method": lambda: told(Handler().method),
        "partial": lambda: told(functools.partial(leave, 0)),
        "object": lambda: told(Handler()),
        "resets": lambda: told(resets),
        "flag": runs_on,
        "code": fails,
        "error": raises,
        "untold": was_not_told,
        "thread": saves_behind,
    }
    os.chdir(host_directory())
    (host_directory() / "dev").mkdir()
    info = JobInfo("job", "job/task-1", 1, 4, 2, 0, 2, "slice-a", 1, "127.0.0.1:20002")
    pids = {}
    for name, function in cases.items():
        pids[name] = os.fork()
        if pids[name] == 0:
            launch = TaskLaunch(cloudpickle.dumps(function), {}, info, MultisliceInfo("127.0.0.1", 0, 1), None, "l")
            end = task_process.TaskProcess("127.0.0.1", (), ()).run(launch)
            Path(f"{os.getpid()}.end").write_text(end.kind.value)
            os._exit(0)
    became = {}
    for name, pid in pids.items():
        saved = TaskFiles.of_process(host_directory(), pid).saved
        end, checkpoint = Path(f"{pid}.end"), Path(f"{pid}.checkpoint")
        while not saved.exists() and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
        if saved.exists():
            became[name] = "saved with its checkpoint" if checkpoint.exists() else "saved"
            os.kill(pid, signal.SIGKILL)
        else:
            became[name] = end.read_text() if end.exists() else "crashed"
    Path("became.json").write_text(json.dumps(became))
"""


@pytest.fixture
def leavers(make: Make, tmp_path: Path) -> Any:
    child = make(LEAVE)
    child.process.communicate("\n", PATIENCE_S)
    return json.loads((tmp_path / "became.json").read_text())


def test_task_that_exits_after_a_notice_has_saved_however_it_got_to_that(leavers: dict[str, str]) -> None:
    """A preempted job must never count as done. Only a code other than 0 tells a failure, and a handler may use any."""
    assert leavers.pop("thread") == "saved with its checkpoint", "as an ordinary exit, it waits for threads that save"
    assert {name for name, became in leavers.items() if became == "saved"} == {
        "function", "method", "partial", "object", "resets", "flag",
    }  # fmt: skip
    assert (leavers["code"], leavers["error"], leavers["untold"]) == ("exited", "raised", "returned")
