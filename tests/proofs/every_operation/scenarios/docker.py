"""Two tasks that are containers: one has a secret and fails, one gets a SIGTERM; the engine is a stand-in."""

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

from iris_ray.actors.host.exit_status import ProgramExit
from iris_ray.actors.host.owned import end_owned
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.docker import host
from iris_ray.docker.core import ContainerSpec
from iris_ray.docker.host import ContainerEngine, ContainerState, run_in_container
from iris_ray.errors import ContainerEngineError
from iris_ray.model.job_info import JobInfo
from iris_ray.settings import CONTAINER_ENGINE
from tests.proofs.every_operation.runs import Said, Scenario
from tests.support.containers import StandIn

SECRET = b"not on a disk"
CODES = {"fails": 5, "told": 7}
GONE_S = 10.0


def docker() -> Scenario:
    return Scenario(
        "docker",
        lambda place: _prepare(place),
        lambda place, said, operations: _act(place, said),
        _judge,
        (ContainerEngineError, OSError),
        {"the record comes after the container": _record_late, "a lost state counts as success": _succeed},
    )


def _prepare(place: Path) -> None:
    StandIn(place)
    for name in ("tasks", "memory"):
        (place / name).mkdir()
    (place / "secret").write_bytes(SECRET)


def _files(place: Path, name: str) -> TaskFiles:
    return TaskFiles(str(place / "tasks" / str(CODES[name])))


def _program(place: Path, name: str) -> str:
    """What a task's container does. It leaves a file once it has done all."""
    done = place / f"{name}.done"
    if name == "fails":
        return f'test "$(cat $KEY)" = "{SECRET.decode()}" && touch {done}; exit {CODES[name]}'
    ends = f"touch {done}; exit {CODES[name]}"
    return f"trap '{ends}' TERM; kill -TERM {os.getpid()}; while :; do sleep 0.02; done"


def _task(place: Path, name: str) -> dict[str, str]:
    """Return the variables of a task, and set aside where its secrets go."""
    setattr(host, "MEMORY", str(place / "memory"))  # noqa: B010
    job_id = f"{name}-{place.parent.name}"
    info = JobInfo(job_id, f"{job_id}/task-0", 0, 1, 1, 0, 1, "", 0, "")
    own = {TaskFiles.VARIABLE: _files(place, name).prefix, "KEY": str(place / "secret")}
    return info.to_env() | own | {CONTAINER_ENGINE.name: str(place / "engine-docker" / "docker")}


def _act(place: Path, said: Said) -> None:
    for name in CODES:
        os.environ |= _task(place, name)
        spec = ContainerSpec("image", ("sh", "-c", _program(place, name)), secrets=("KEY",) if name == "fails" else ())
        try:
            run_in_container(spec)
            said(name, 0)
        except ProgramExit as end:
            said(name, end.code)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _judge(place: Path, said: list[list[Any]]) -> None:
    """Do what the host does after the end of a task's process, and look at what is left."""
    for name, code in said:
        done = (place / f"{name}.done").exists()
        assert code != 0, f"{name} is said to have succeeded"
        assert code != CODES[name] or done, f"{name} is said to have ended with {code}, and has not run to its end"
    engine = place / "engine-docker"
    pids = [int(path.read_text()) for path in engine.glob("*/pid")]
    for name in CODES:
        _task(place, name)
        assert end_owned(_files(place, name)) == []
    assert [path.name for path in engine.iterdir() if path.is_dir()] == []
    deadline = time.monotonic() + GONE_S
    while running := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.01)
    for directory in ("tasks", "memory"):
        assert [path.name for path in (place / directory).iterdir()] == []


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError), io.FileIO(f"/proc/{pid}/stat") as file:
        return file.readall().rpartition(b")")[2].split()[0] != b"Z"
    return False


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _record_late() -> None:
    run, write = ContainerEngine.run, host.ContainerRecord.write
    late: list[Any] = []

    def written(engine: ContainerEngine, *arguments: Any) -> int:
        code = run(engine, *arguments)
        write(*late.pop())
        return code

    setattr(host.ContainerRecord, "write", lambda *arguments: late.append(arguments))  # noqa: B010
    ContainerEngine.run = written  # type: ignore[method-assign, assignment]


def _succeed() -> None:
    state = ContainerEngine.state
    ContainerEngine.state = lambda engine, name: (  # type: ignore[method-assign, assignment]
        state(engine, name) or ContainerState("exited", 0, False)
    )
