"""User code in a task: SIGTERM with and without a notice, and exits after one."""

import json
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError

from iris_ray.actors.host.user_code import run_function
from iris_ray.actors.pool.gang_run import failure_error
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.outcomes import EndKind, TpuRunError
from tests.support.processes import NOTICE, PATIENCE_S, Child, Make

# -- SIGTERM ----------------------------------------------------------------------------------------------------------


SAY_AND_EXIT = "signal.signal(signal.SIGTERM, lambda *_: (print('handler', flush=True), os._exit(7)))"
WAIT = "print('waits', flush=True)\nnext_start()\nprint('goes on', flush=True)"


def terminate(child: Child, tmp_path: Path, with_notice: bool) -> None:
    child.start()
    child.says("waits")
    if with_notice:
        TaskFiles.of_process(tmp_path, child.process.pid).write_notice(NOTICE)
    child.process.send_signal(signal.SIGTERM)


def test_sigterm_with_notice_is_swallowed_without_user_handler(make: Make, tmp_path: Path) -> None:
    child = make(WAIT, SAY_AND_EXIT)
    terminate(child, tmp_path, with_notice=True)
    time.sleep(0.2)
    child.start()
    child.says("goes on")
    assert child.end() == 0


@pytest.mark.parametrize("with_notice", [True, False])
def test_sigterm_reaches_user_handler(make: Make, tmp_path: Path, with_notice: bool) -> None:
    child = make(SAY_AND_EXIT + "\n" + WAIT)
    terminate(child, tmp_path, with_notice)
    child.says("handler")
    assert child.end() == 7


@pytest.mark.parametrize(("before", "code"), [(SAY_AND_EXIT, 7), ("", 128 + signal.SIGTERM)], ids=["a handler", "none"])
def test_sigterm_without_notice_ends_process(make: Make, tmp_path: Path, before: str, code: int) -> None:
    child = make(WAIT, before)
    terminate(child, tmp_path, with_notice=False)
    assert child.end() == code


def test_sigterm_from_noticed_task_ends_its_children(make: Make, tmp_path: Path) -> None:
    """``terminate()`` of a pool of processes would wait for them for ever."""
    child = make("""
        import multiprocessing
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.2)
        print("waits", flush=True)
        next_start()
        worker.terminate()
        worker.join(10)
        print(worker.exitcode is not None, flush=True)
        worker.kill()
    """)
    terminate(child, tmp_path, with_notice=True)
    child.start()
    child.says("True")


def test_pools_of_processes_in_a_task_end(make: Make) -> None:
    """A child that waits for a lock hears SIGTERM only without a handler of Python's, if it came just before that."""
    child = make("""
        import multiprocessing
        for _ in range(100):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                pool.map(abs, [-1, -2])
        pid = os.fork()
        if pid == 0:
            print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    """)
    child.start()
    child.says("True")


def test_task_heeds_signals_before_its_start_is_known(make: Make, tmp_path: Path) -> None:
    """The mark of its start tells its host that signals may come: what runs then must not die of them."""
    script = """
        import faulthandler
        import iris_ray.actors.host.task_process as task_process
        from iris_ray.actors.protocol.task_files import LOOK_SIGNAL, STACKS_SIGNAL
        from iris_ray.model.job_info import JobInfo
        from iris_ray.actors.protocol.messages import TaskLaunch
        from iris_ray.model.multislice import MultisliceInfo
        from ray import cloudpickle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.unregister(STACKS_SIGNAL)
        faulthandler.unregister(LOOK_SIGNAL)
        (host_directory() / "dev").mkdir()
        redirect = task_process.redirect_output
        def marked(directory, launch):
            pipe = redirect(directory, launch)
            assert TaskFiles.of_process(directory, os.getpid()).started.exists()
            files.notice.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), STACKS_SIGNAL)
            os.kill(os.getpid(), LOOK_SIGNAL)
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
    assert TaskFiles.of_process(tmp_path, child.process.pid).started.exists()


# -- exits after a notice ---------------------------------------------------------------------------------------------


# Runs each function in a forked process of its own, as a task that has had a notice, and says what became of it.
LEAVE = """
    import concurrent.futures, functools, json, threading
    import iris_ray.actors.host.task_process as task_process
    from iris_ray.actors.protocol.messages import TaskLaunch
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


def test_any_exit_after_a_notice_counts_as_saved(leavers: dict[str, str]) -> None:
    """A preempted job must never count as done. Only a code other than 0 tells a failure, and a handler may use any."""
    assert leavers.pop("thread") == "saved with its checkpoint", "as an ordinary exit, it waits for threads that save"
    assert {name for name, became in leavers.items() if became == "saved"} == {
        "function", "method", "partial", "object", "resets", "flag",
    }  # fmt: skip
    assert (leavers["code"], leavers["error"], leavers["untold"]) == ("exited", "raised", "returned")


@pytest.mark.parametrize(("code", "kind"), [(0, EndKind.RETURNED), (3, EndKind.EXITED)])
def test_exit_is_plain_if_disk_cannot_tell_of_notice(code: int, kind: EndKind) -> None:
    unreadable = TaskFiles("/tmp/" + 300 * "x")  # the kernel refuses such a name, as a faulty disk refuses any
    end = run_function(cloudpickle.dumps(lambda: sys.exit(code)), unreadable)
    assert end.kind is kind
    assert end.exit_code == code


# -- errors -----------------------------------------------------------------------------------------------------------


def test_error_of_nested_ray_task_keeps_its_type_for_caller(tmp_path: Path) -> None:
    """`ray.get` in a task raises an error that is a RayTaskError and a ValueError, as the task's caller expects it."""

    def fail() -> None:
        inner = RayTaskError(
            "inner", "In inner:\nValueError: no such thing", ValueError("no such thing"), ip="10.0.0.1"
        )
        raise inner.as_instanceof_cause()

    end = run_function(cloudpickle.dumps(fail), TaskFiles(str(tmp_path / "task")))
    assert isinstance(end.payload, bytes)
    result = TpuRunError(end.error, end.traceback, end.payload)
    error = pickle.loads(pickle.dumps(failure_error("outer", "outer-1", "task 0 failed", result)))
    with pytest.raises(ValueError, match="In inner"):
        raise error.as_instanceof_cause()


# -- exit handlers ----------------------------------------------------------------------------------------------------

ENDS = """
import atexit, sys
from pathlib import Path
from jax._src import api, dispatch, distributed
from ray import cloudpickle
from iris_ray.actors.host.user_code import run_exit_handlers, run_function
from iris_ray.actors.protocol.task_files import TaskFiles

def user_code():
    atexit.register(print, "the tracker's last data", flush=True)
    if sys.argv[1] != "None":
        raise eval(sys.argv[1])

distributed.shutdown = lambda: print("JAX waits for the others", flush=True)
run_function(cloudpickle.dumps(user_code), TaskFiles.of_process(Path(sys.argv[2]), 1))
run_exit_handlers()
"""


@pytest.mark.parametrize(("error", "waits"), [("None", True), ("ValueError()", False), ("SystemExit(3)", False)])
def test_failed_task_runs_all_exit_handlers_but_jaxs(tmp_path: Path, error: str, waits: bool) -> None:
    """JAX's would wait for the gang's other tasks, which are killed."""
    command = [sys.executable, "-c", ENDS, error, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "the tracker's last data" in done.stdout
    assert ("JAX waits for the others" in done.stdout) is waits
