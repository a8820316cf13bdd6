"""A task that leaves after a notice counts as one that has saved."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from iris_ray.actors.host.user_code import run_function
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.outcomes import EndKind
from tests.support.processes import PATIENCE_S, Make

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


def test_task_that_exits_after_a_notice_has_saved_however_it_got_to_that(leavers: dict[str, str]) -> None:
    """A preempted job must never count as done. Only a code other than 0 tells a failure, and a handler may use any."""
    assert leavers.pop("thread") == "saved with its checkpoint", "as an ordinary exit, it waits for threads that save"
    assert {name for name, became in leavers.items() if became == "saved"} == {
        "function", "method", "partial", "object", "resets", "flag",
    }  # fmt: skip
    assert (leavers["code"], leavers["error"], leavers["untold"]) == ("exited", "raised", "returned")


@pytest.mark.parametrize(("code", "kind"), [(0, EndKind.RETURNED), (3, EndKind.EXITED)])
def test_exit_on_a_host_whose_disk_can_not_tell_of_a_notice_is_an_exit(code: int, kind: EndKind) -> None:
    unreadable = TaskFiles("/tmp/" + 300 * "x")  # the kernel refuses such a name, as a faulty disk refuses any
    end = run_function(cloudpickle.dumps(lambda: sys.exit(code)), unreadable)
    assert end.kind is kind
    assert end.exit_code == code
