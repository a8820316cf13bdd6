"""The process that runs user code, as a plain object in the test's own process."""

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from iris_ray.actors.host import task_environment, task_process, user_code
from iris_ray.actors.host.task_environment import PORTS_HELD, hold_ports
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.protocol.messages import TaskLaunch
from iris_ray.actors.protocol.services import Service
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import ResultNotPicklableError, ResultTooLargeError
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.task.job_info import get_job_info

HERE = "127.0.0.1"
INFO = JobInfo("job", "job/task-1", 1, 4, 2, 0, 2, "slice-a", 1, f"{HERE}:20002")


@pytest.fixture(autouse=True)
def _environment_comes_back(tmp_path: Path) -> Iterator[None]:
    before = dict(os.environ)
    os.environ["IRIS_RAY_HOST_DIR"] = str(tmp_path)
    (tmp_path / "dev").mkdir()  # a simulated host: the real chips of this machine do not count
    TaskFiles.of_process(tmp_path, os.getpid()).stacks.parent.mkdir()  # as its host has done before
    yield
    os.environ.clear()
    os.environ.update(before)


def let_go(process: TaskProcess) -> None:
    """Close the ports that it holds, as the end of the process would."""
    for held in process._held:
        held.close()


def run(function: Callable[[], Any], env: dict[str, str] | None = None, num_slices: int = 2) -> TaskEnd:
    multislice = MultisliceInfo(HERE, 0, num_slices, 20_000, 20_001)
    launch = TaskLaunch(cloudpickle.dumps(function), env or {}, INFO, multislice, None, "label")
    return TaskProcess(HERE, (), ()).run(launch)


class TwoPartError(Exception):
    """Pickles, but can't be unpickled: its constructor takes arguments that its args no longer hold."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class BadString(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises(error: BaseException | type[BaseException]) -> Callable[[], None]:
    def function() -> None:
        raise error if isinstance(error, BaseException) else error()

    return function


# -- how it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, "text", {"a": [1, 2]}, (1, 2)], ids=repr)
def test_run_returns_pickled_result(value: Any) -> None:
    end = run(lambda: value)
    assert (end.kind, end.error) == (EndKind.RETURNED, "")
    assert cloudpickle.loads(end.payload) == value


@pytest.mark.parametrize("make", [SystemExit, lambda: SystemExit(0), lambda: SystemExit(None)], ids=["()", "0", "None"])
def test_run_sys_exit_zero_returns_none(make: Callable[[], SystemExit]) -> None:
    end = run(raises(make()))
    assert end.kind is EndKind.RETURNED
    assert cloudpickle.loads(end.payload) is None


@pytest.mark.parametrize("code", [3, -1, "out of luck"], ids=repr)
def test_run_sys_exit_nonzero_is_an_exit(code: int | str) -> None:
    end = run(raises(SystemExit(code)))
    assert (end.kind, end.payload) == (EndKind.EXITED, None)
    assert repr(code) in end.error


def test_run_exception_returns_with_traceback() -> None:
    end = run(raises(ValueError("timed out")))
    assert (end.kind, end.error) == (EndKind.RAISED, "ValueError: timed out")
    assert "in function" in end.traceback
    rebuilt = cloudpickle.loads(end.payload)
    assert (type(rebuilt), rebuilt.args) == (ValueError, ("timed out",))


def test_run_unpicklable_exception_is_reported_as_text() -> None:
    end = run(raises(HoldsALock))
    assert (end.kind, end.payload) == (EndKind.RAISED, None)
    assert str(HoldsALock()) in end.error
    assert str(HoldsALock()) in end.traceback


def test_run_exception_with_odd_constructor_is_pickled() -> None:
    def function() -> None:
        raise TwoPartError("it broke", "of rust")

    end = run(function)
    rebuilt = cloudpickle.loads(end.payload)
    assert (type(rebuilt), vars(rebuilt)) == (TwoPartError, vars(TwoPartError("it broke", "of rust")))
    assert str(rebuilt) == str(TwoPartError("it broke", "of rust"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_run_base_exception_is_contained_and_no_return(error: type[BaseException]) -> None:
    end = run(raises(error))
    assert (end.kind, end.payload) == (EndKind.RAISED, None)
    assert error.__name__ in end.error


def test_run_exception_without_text_is_contained() -> None:
    end = run(raises(BadString))
    assert end.kind is EndKind.RAISED
    assert "BadString" in end.error


def test_run_unpicklable_result_is_a_typed_error() -> None:
    end = run(threading.Lock)
    assert end.kind is EndKind.RAISED
    rebuilt = cloudpickle.loads(end.payload)
    assert isinstance(rebuilt, ResultNotPicklableError)
    assert "lock" in str(rebuilt)


def test_run_oversized_result_is_a_typed_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "MOST_RESULT_BYTES", 3 << 20)
    assert user_code.returned(bytes(2 << 20)).kind is EndKind.RETURNED
    rebuilt = cloudpickle.loads(run(lambda: bytes(4 << 20)).payload)
    assert isinstance(rebuilt, ResultTooLargeError)
    assert "a bytes of 4 MiB, and the limit is 3 MiB; write it to files" in str(rebuilt)


def test_run_oversized_exception_is_reported_as_text() -> None:
    end = run(raises(ValueError("no room for", bytes(2 << 20))))
    assert (end.kind, end.payload) == (EndKind.RAISED, None)
    assert "no room for" in end.error


def test_run_function_that_cannot_be_unpickled_is_an_error() -> None:
    launch = TaskLaunch(b"no pickle", {}, INFO, MultisliceInfo(HERE, 0, 1), None, "label")
    assert TaskProcess(HERE, (), ()).run(launch).kind is EndKind.RAISED


@pytest.mark.parametrize("state", ["closed", "none", "broken"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_run_result_survives_user_code_changing_its_output(
    monkeypatch: pytest.MonkeyPatch, stream: str, state: str
) -> None:
    """An error while cleaning up replaced a successful result (defect 9)."""
    monkeypatch.setattr(sys, stream, StringIO())

    class Broken(StringIO):
        def flush(self) -> None:
            raise OSError("no space left on device")

    def function() -> int:
        closed = open(os.devnull, "w")  # noqa: SIM115
        closed.close()
        setattr(sys, stream, {"closed": closed, "none": None, "broken": Broken()}[state])
        return 7

    process = TaskProcess(HERE, (), ())
    launch = TaskLaunch(b"", {}, INFO, MultisliceInfo(HERE, 0, 1), None, "label")
    monkeypatch.setattr(cloudpickle, "loads", lambda _: function)
    assert process.run(launch).kind is EndKind.RETURNED


# -- its environment ------------------------------------------------------------------------------------------------


def test_run_sets_environment_before_loading_user_code() -> None:
    os.environ["MEGASCALE_NUM_SLICES"] = "9"
    os.environ["TPU_VISIBLE_CHIPS"] = "0"
    end = run(lambda: dict(os.environ), {"MINE": "yes", "MEGASCALE_SLICE_ID": "7"})
    seen = cloudpickle.loads(end.payload)
    assert seen["MINE"] == "yes"
    assert (seen["MEGASCALE_NUM_SLICES"], seen["MEGASCALE_SLICE_ID"]) == ("2", "0")
    assert "TPU_VISIBLE_CHIPS" not in seen
    own = Path(seen["IRIS_RAY_HOST_DIR"]) / "jobs" / "job" / "files"
    assert own.is_dir()
    assert get_job_info(seen) == replace(INFO, local_dir=str(own))


def test_run_on_a_single_slice_leaves_no_megascale_variable() -> None:
    """Inherited ones alone were enough to hang it (defect 12)."""
    os.environ["MEGASCALE_COORDINATOR_ADDRESS"] = "stale:1"
    end = run(lambda: [name for name in os.environ if name.startswith("MEGASCALE_")], num_slices=1)
    assert cloudpickle.loads(end.payload) == []


def test_run_gives_user_code_the_calling_thread() -> None:
    assert cloudpickle.loads(run(lambda: threading.current_thread() is threading.main_thread()).payload)


def test_process_imports_requested_modules() -> None:
    sys.modules.pop("colorsys", None)
    process = TaskProcess(HERE, (), ("colorsys",))
    assert "colorsys" in sys.modules
    let_go(process)


@pytest.mark.parametrize(("of_user", "seen"), [(None, "tpu,cpu"), ("cpu", "cpu")])
def test_preloaded_jax_expects_chips_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_user: str | None, seen: str
) -> None:
    """JAX reads the variable when it is imported, before the process knows its task."""
    (tmp_path / "reads_at_import.py").write_text("import os; platforms = os.environ['JAX_PLATFORMS']")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reads_at_import", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", of_user or "")  # restored at the end
    if of_user is None:
        del os.environ["JAX_PLATFORMS"]
    let_go(TaskProcess(HERE, (), ("reads_at_import",)))
    assert sys.modules["reads_at_import"].platforms == seen


# -- its ports ------------------------------------------------------------------------------------------------------


def test_process_holds_free_ports_until_task_starts() -> None:
    process = TaskProcess(HERE, (), ())
    ready = process.ready()
    assert ready.pid == os.getpid()
    assert len(set(ready.ports)) == PORTS_HELD
    for port in ready.ports:
        with socket.socket() as probe, pytest.raises(OSError, match="in use"):
            probe.bind((HERE, port))

    def bind_all() -> bool:
        for port in ready.ports:
            with socket.socket() as probe:
                probe.bind((HERE, port))
        return True

    launch = TaskLaunch(cloudpickle.dumps(bind_all), {}, INFO, MultisliceInfo(HERE, 0, 1), None, "label")
    assert cloudpickle.loads(process.run(launch).payload) is True


def test_hold_ports_avoids_ports_of_earlier_attempts() -> None:
    few = range(32_700, 32_768)
    held = hold_ports(HERE, 3, frozenset(range(65_536)) - frozenset(few))
    try:
        assert {one.getsockname()[1] for one in held} <= set(few)
    finally:
        for one in held:
            one.close()


@pytest.mark.timeout(2)
def test_hold_ports_on_another_hosts_address_raises() -> None:
    with pytest.raises(OSError):  # noqa: PT011
        hold_ports("192.0.2.1", 1, ())  # reserved for documentation


class ForbiddenPorts(socket.socket):
    """What a host lets a process have that may bind few ports, or none."""

    forbidden: Collection[int] = task_environment.PORTS

    def bind(self, address: Any) -> None:
        if address[1] in self.forbidden:
            raise PermissionError(errno.EACCES, "Permission denied")
        super().bind(address)


@pytest.mark.timeout(20)
def test_hold_ports_skips_forbidden_ports_and_raises_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_environment, "socket", SimpleNamespace(socket=ForbiddenPorts))
    with pytest.raises(PermissionError):
        hold_ports(HERE, 1, ())
    monkeypatch.setattr(ForbiddenPorts, "forbidden", task_environment.PORTS[::2])
    for one in hold_ports(HERE, 8, ()):
        assert one.getsockname()[1] % 2 == 1
        one.close()


def fails(files: TaskFiles, info: JobInfo) -> dict[str, str]:
    raise OSError("the disk is full")


def named(files: TaskFiles, info: JobInfo) -> dict[str, str]:
    return {"OF_A_SERVICE": f"{info.task_id} of {files.pid}", "IRIS_RAY_TASK_FILES": files.prefix}


def test_variables_of_services_are_there_and_a_service_that_fails_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    services = Service("broken", variables=f"{__name__}:fails"), Service("sound", variables=f"{__name__}:named")
    monkeypatch.setattr(task_process, "installed_services", lambda: services)
    end = run(lambda: os.environ["OF_A_SERVICE"], env={"OF_A_SERVICE": "the user's"})
    assert cloudpickle.loads(end.payload) == f"job/task-1 of {os.getpid()}"
