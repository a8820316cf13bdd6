"""A task in a fork of the zygote, with real processes: how it ends, and that it leaves nothing to the next one."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from ray import cloudpickle

from iris_ray.actors.host.forks import Zygote
from iris_ray.errors import ResultNotPicklableError
from iris_ray.model.outcomes import EndKind
from iris_ray.processes.identity import ProcessIdentity, stat_of
from iris_ray.processes.tree import FORK_MARK, TOKEN_VARIABLE
from tests.support.forks import Ended, a_zygote, run_in, until, waiting_fork

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # else each fork would import this file, and pytest


def run_all(directory: Path, functions: dict[str, Callable[[], Any]], **zygote: Any) -> dict[str, Ended]:
    """Run each function in a fork of one zygote, one after the other."""

    async def run() -> dict[str, Ended]:
        async with a_zygote(**zygote) as one:
            return {name: await run_in(one, directory, function) for name, function in functions.items()}

    return asyncio.run(run())


# -- how it ends -------------------------------------------------------------------------------------------------------


class Loud(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


def fail() -> NoReturn:
    raise Loud("it broke", "of rust")


def close_output() -> str:
    for stream in sys.stdout, sys.stderr:
        stream.close()
    for descriptor in 1, 2:
        os.close(descriptor)
    return "silent"


def leave_by_signal() -> NoReturn:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the handler exits")


def fork_and_return(leave: Callable[[], Any]) -> list[int]:
    """Return the exit code of a child that does not call ``os._exit``."""
    if os.fork() == 0:
        return leave()
    return [os.waitstatus_to_exitcode(os.wait()[1])]


def write_to_connection() -> None:
    """Write to each of its sockets."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"p\0\0\0\0\xff\xff\xff\xff")


def kernels_threads() -> int:
    """Return how many threads the kernel knows, once those that have ended are gone there as well."""
    for _ in range(200):
        if (found := len(os.listdir("/proc/self/task"))) == threading.active_count():
            break
        time.sleep(0.01)
    return found


def try_to_join() -> None:
    import ray

    with contextlib.suppress(ValueError):  # before it connects, as it is no address
        ray.init("nowhere://")


ENDS: dict[str, Callable[[], Any]] = {
    "result": lambda: {"answer": 42},
    "large": lambda: b"x" * (100 << 20),
    "tried to join": try_to_join,
    "none": lambda: None,
    "error": fail,
    "unpicklable": lambda: (x for x in "abc"),
    "exit": lambda: sys.exit(3),
    "exit 0": lambda: sys.exit(0),
    "exit with words": lambda: sys.exit("no more"),
    "_exit": lambda: os._exit(7),
    "_exit 0": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGTERM": leave_by_signal,
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "output closed": close_output,
    "descriptors closed": lambda: os.closerange(3, 1024),
    "long error": lambda: (_ for _ in ()).throw(ValueError("x" * (140 << 20))),
    "odd text": lambda: (_ for _ in ()).throw(ValueError("\ud800\0 é")),
    "nonsense": write_to_connection,
    "child returns": lambda: fork_and_return(lambda: [99]),
    "child exits": lambda: fork_and_return(lambda: sys.exit(4)),
    "child fails": lambda: fork_and_return(fail),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return run_all(tmp_path_factory.mktemp("host"), ENDS)


def test_result_arrives_and_process_exits_in_order(ends: dict[str, Ended]) -> None:
    assert (ends["result"].result, ends["result"].code) == ({"answer": 42}, 0)
    assert (ends["none"].result, ends["none"].code) == (None, 0)


def test_end_says_whether_the_task_has_joined_ray(ends: dict[str, Ended]) -> None:
    for name, never in (("result", True), ("tried to join", False)):
        end = ends[name].end
        assert end is not None
        assert end.never_joined is never


def test_result_of_100_mb_arrives(ends: dict[str, Ended]) -> None:
    assert ends["large"].result == b"x" * (100 << 20)


def test_exception_arrives_with_its_traceback(ends: dict[str, Ended]) -> None:
    error, end = ends["error"].result, ends["error"].end
    assert end is not None
    assert (end.kind, type(error).__name__, str(error)) == (EndKind.RAISED, "Loud", "it broke because of rust")
    assert "in fail" in end.traceback
    assert ends["error"].code == 0


def test_unpicklable_result_is_a_typed_error(ends: dict[str, Ended]) -> None:
    assert isinstance(ends["unpicklable"].result, ResultNotPicklableError)


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [("exit", EndKind.EXITED, 3), ("exit 0", EndKind.RETURNED, 0), ("exit with words", EndKind.EXITED, 1)],
)
def test_sys_exit_is_told_with_its_code(ends: dict[str, Ended], name: str, kind: EndKind, code: int) -> None:
    end = ends[name].end
    assert end is not None
    assert (end.kind, end.exit_code) == (kind, code)


@pytest.mark.parametrize(("name", "code"), [("_exit", 7), ("_exit 0", 0), ("SIGKILL", -9), ("SIGSEGV", -11)])
def test_process_that_ends_without_a_word_leaves_its_code(ends: dict[str, Ended], name: str, code: int) -> None:
    assert (ends[name].end, ends[name].code) == (None, code)


def test_signals_end_the_function_as_python_does(ends: dict[str, Ended]) -> None:
    terminated, interrupted = ends["SIGTERM"].end, ends["interrupt"].end
    assert terminated is not None
    assert (terminated.kind, terminated.exit_code) == (EndKind.EXITED, 128 + signal.SIGTERM)
    assert interrupted is not None
    assert (interrupted.kind, interrupted.error) == (EndKind.RAISED, "KeyboardInterrupt")


def test_result_arrives_from_process_that_closed_its_output(ends: dict[str, Ended]) -> None:
    assert ends["output closed"].result == "silent"


def test_process_that_closed_its_connection_ends_without_a_word(ends: dict[str, Ended]) -> None:
    assert (ends["descriptors closed"].end, ends["descriptors closed"].code) == (None, 1)


def test_error_of_any_length_and_text_arrives(ends: dict[str, Ended]) -> None:
    long, odd = ends["long error"].end, ends["odd text"].end
    assert long is not None
    assert long.kind is EndKind.RAISED
    assert long.error.startswith("ValueError: xxx")
    assert long.traceback.startswith("Traceback")
    assert odd is not None
    assert odd.error == "ValueError: \ud800\0 é"


def test_process_that_says_nonsense_fails(ends: dict[str, Ended]) -> None:
    end = ends["nonsense"].end
    assert end is not None
    assert (end.kind, "nonsense: a frame of 4,294,967,295 bytes" in end.error) == (EndKind.RAISED, True)


@pytest.mark.parametrize(("name", "code"), [("child returns", 0), ("child exits", 4), ("child fails", 1)])
def test_child_that_leaves_the_function_does_not_answer_for_the_task(
    ends: dict[str, Ended], name: str, code: int
) -> None:
    assert ends[name].result == [code]


# -- a process of its own ----------------------------------------------------------------------------------------------


def look() -> dict[str, Any]:
    """Return what an earlier task might have changed."""
    import logging
    import resource
    import socket
    import threading
    import warnings

    handlers = {
        number: str(signal.getsignal(number)).partition(" at ")[0]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD, signal.SIGPIPE)
    }
    umask = os.umask(0o22)
    os.umask(umask)
    return {
        "modules": sorted(sys.modules),
        "environment": dict(os.environ) | dict.fromkeys(("IRIS_RAY_TASK_TOKEN", "IRIS_RAY_TASK_FILES"), ""),
        "directory": os.getcwd(),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": [thread.name for thread in threading.enumerate()],
        "kernel's threads": kernels_threads(),
        "main": threading.current_thread() is threading.main_thread(),
        "handlers": handlers,
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "path": sys.path[:],
        "arguments": sys.argv[:],
        "umask": umask,
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "affinity": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "timeout": socket.getdefaulttimeout(),
        "filters": len(warnings.filters),
        "level": logging.getLogger().level,
        "standard input": os.read(0, 1),
    }


def leave_traces() -> None:
    import colorsys  # noqa: F401
    import logging
    import resource
    import socket
    import threading
    import warnings

    os.environ["LEFT_OVER"] = "yes"
    os.chdir("/")
    for _ in range(10):
        os.open("/dev/null", os.O_RDONLY)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    for number in signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD:
        signal.signal(number, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 600)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    sys.path.insert(0, "/nowhere")
    sys.argv.append("--more")
    os.umask(0o77)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    os.nice(1)
    socket.setdefaulttimeout(1.0)
    warnings.simplefilter("error")
    logging.getLogger().setLevel("DEBUG")


def test_task_leaves_nothing_to_the_next_one(tmp_path: Path) -> None:
    ends = run_all(tmp_path, {"before": look, "leaves": leave_traces, "after": look})
    assert ends["leaves"].result is None
    before, after = ends["before"].result, ends["after"].result
    assert before == after
    assert (before["threads"][0], before["main"]) == ("MainThread", True)
    assert before["kernel's threads"] == len(before["threads"]) <= 2, "one of our own waits for traces"
    assert before["standard input"] == b""
    assert before["blocked"] == []


def test_task_starts_with_few_open_files(tmp_path: Path) -> None:
    """Standard streams, its connection, and its own files: none of the zygote's or of tasks beside it."""

    def list_open_files() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of this listing
                if int(name) > 2:
                    found.append(os.readlink(f"/proc/self/fd/{name}"))
        return found

    async def run() -> None:
        async with a_zygote() as zygote:
            alone = await run_in(zygote, tmp_path, list_open_files)
            beside = [await waiting_fork(zygote, tmp_path) for _ in range(3)]
            among_others = await run_in(zygote, tmp_path, list_open_files)
            for process, _ in beside:
                process.close()
            assert len(among_others.result) == len(alone.result) <= 6, among_others.result

    asyncio.run(run())


def test_fork_leads_a_session_and_has_a_token_of_its_own(tmp_path: Path) -> None:
    def look_at_token() -> tuple[str, bool, str]:
        import subprocess

        token = os.environ["IRIS_RAY_TASK_TOKEN"]
        mark = f"iris-ray-task-{token} " in Path("/proc/self/maps").read_text()
        return token, mark, subprocess.check_output(["sh", "-c", "echo $IRIS_RAY_TASK_TOKEN"], text=True).strip()

    async def run() -> None:
        async with a_zygote() as zygote:
            assert zygote.tree is not None
            tokens = set()
            for _ in range(2):
                process, ready = await waiting_fork(zygote, tmp_path)
                stat = stat_of(ready.pid)
                assert stat is not None
                assert (stat.session, stat.group, stat.parent) == (ready.pid, ready.pid, zygote.tree.pid)
                assert os.getsid(zygote.tree.pid) not in (os.getsid(0), ready.pid)
                process.close()
                ended = await run_in(zygote, tmp_path, look_at_token)
                assert ended.result == (ended.ready.token, True, ended.ready.token)
                tokens |= {ready.token, ended.ready.token, zygote.tree.token}
            assert len(tokens) == 5

    asyncio.run(run())


def test_forks_draw_different_random_numbers(tmp_path: Path) -> None:
    def draw() -> list[object]:
        import tempfile
        import uuid

        import numpy

        drawn = [random.random(), numpy.random.rand(), numpy.random.default_rng().random(), uuid.uuid4(), uuid.uuid1()]
        return [*drawn, tempfile.mktemp()]

    ends = run_all(tmp_path, {str(n): draw for n in range(3)}, preload=["numpy.random", "uuid", "tempfile"])
    for drawn in zip(*(end.result for end in ends.values()), strict=True):
        assert len(set(drawn)) == 3, drawn


def test_200_forks_leave_nothing_in_zygote_and_host(tmp_path: Path) -> None:
    daemon = tmp_path / "daemon"

    def leave_daemon() -> None:
        """Leave a daemon that holds the connection, and end without a word."""
        if child := os.fork():
            daemon.write_text(str(child))
            os._exit(1)
        os.setsid()
        while True:
            signal.pause()

    async def usage(zygote: psutil.Process) -> tuple[list[int], int]:
        counts = [zygote.num_threads(), zygote.num_fds(), len(zygote.children())]
        own = [psutil.Process().num_threads(), psutil.Process().num_fds()]
        readers = len(asyncio.get_running_loop()._selector.get_map())  # type: ignore[attr-defined]
        return [*counts, *own, readers], zygote.memory_full_info().uss

    async def several(zygote: Zygote, process: psutil.Process) -> None:
        for number in range(10):
            assert (await run_in(zygote, tmp_path, lambda: None)).code == 0
            waiting, ready = await waiting_fork(zygote, tmp_path)
            if number % 2:
                waiting.kill()
            else:
                waiting.close()
            await until(partial(lambda pid: pid not in zygote.forked, ready.pid))
            waiting.close()
        daemon.write_text("")
        crashing = asyncio.ensure_future(run_in(zygote, tmp_path, leave_daemon))
        while not (written := await asyncio.to_thread(daemon.read_text)):
            await asyncio.sleep(0.01)
        os.kill(int(written), signal.SIGKILL)
        assert (await crashing).end is None
        await until(lambda: not process.children())

    async def run() -> None:
        async with a_zygote() as zygote:
            assert zygote.tree is not None
            process = psutil.Process(zygote.tree.pid)
            await several(zygote, process)
            before, memory = await usage(process)
            assert before[:3] == [1, before[1], 0]
            for _ in range(9):
                await several(zygote, process)
            after, more = await usage(process)
            assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
            assert more - memory < 1 << 20, "bytes"
            assert zygote.forked == {}

    asyncio.run(run())


# -- what user code may do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_works_in_a_fork(tmp_path: Path, method: str) -> None:
    def use_processes() -> tuple[list[int], list[int], int | None, int]:
        import concurrent.futures
        import multiprocessing

        context: Any = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            mapped = pool.map(abs, [-1, -2, -3])
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
            submitted = list(executor.map(abs, [-4, -5]))
        one = context.Process(target=sys.exit, args=(5,))
        one.start()
        one.join()
        shared = context.Value("i", 6)
        return mapped, submitted, one.exitcode, shared.value

    ended = run_all(tmp_path, {"task": use_processes})["task"]
    assert (ended.result, ended.code) == (([1, 2, 3], [4, 5], 5, 6), 0)


def test_signal_handlers_of_user_code_run_in_its_fork(tmp_path: Path) -> None:
    def handle() -> list[int]:
        import time

        heard = list[int]()
        for number in signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM:
            signal.signal(number, lambda number, _: heard.append(number))
        for number in signal.SIGUSR1, signal.SIGTERM, signal.SIGINT:
            os.kill(os.getpid(), number)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while len(heard) < 4:
            time.sleep(0.001)
        return heard

    heard = run_all(tmp_path, {"task": handle})["task"].result
    assert sorted(heard) == sorted([signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM])


def test_exit_handlers_and_threads_end_before_the_process(tmp_path: Path) -> None:
    def leave_work() -> None:
        import atexit
        import threading
        import time

        def save(name: str, after_s: float) -> None:
            time.sleep(after_s)
            (tmp_path / name).write_text(str(time.monotonic()))

        threading.Thread(target=save, args=("thread", 0.3)).start()
        atexit.register(save, "handler", 0.0)

    ended = run_all(tmp_path, {"task": leave_work})["task"]
    assert ended.code == 0
    assert float((tmp_path / "thread").read_text()) <= float((tmp_path / "handler").read_text())


def test_crash_leaves_stack_in_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def crash() -> None:
        print("step 1")
        os.kill(os.getpid(), signal.SIGSEGV)

    assert run_all(tmp_path, {"task": crash}, without=["PYTHONUNBUFFERED"])["task"].code == -signal.SIGSEGV
    told = capfd.readouterr()
    assert "in crash" in told.err
    assert "step 1" in told.out, "each line is written at once"


def test_daemons_of_a_task_stay_recognisable_and_end_with_the_zygote(tmp_path: Path) -> None:
    def leave_daemon() -> int:
        said, say = os.pipe()
        if between := os.fork():
            os.waitpid(between, 0)
            return int(os.read(said, 20))
        os.setsid()
        if daemon := os.fork():
            os.write(say, str(daemon).encode())
            os._exit(0)
        while True:
            signal.pause()

    async def run() -> ProcessIdentity:
        async with a_zygote() as zygote:
            assert zygote.tree is not None
            ended = await run_in(zygote, tmp_path, leave_daemon)
            stat = stat_of(ended.result)
            assert stat is not None
            assert stat.parent == zygote.tree.pid
            assert f"{FORK_MARK}{ended.ready.token} " in Path(f"/proc/{stat.pid}/maps").read_text()
            assert f"{TOKEN_VARIABLE}={zygote.tree.token}" in Path(f"/proc/{stat.pid}/environ").read_text()
            assert stat.identity in zygote.tree.search()
            return stat.identity

    daemon = asyncio.run(run())
    asyncio.run(until(lambda: not daemon.runs()))
