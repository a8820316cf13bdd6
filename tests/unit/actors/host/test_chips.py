"""Which processes hold a host's chips, and when the chips are free; with the real libtpu and its real lock."""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from ray import cloudpickle

from iris_ray.actors.host import chips, host_actor, task_watch
from iris_ray.actors.host.chips import (
    Devices,
    Holder,
    LockProbe,
    blocks,
    find_holders,
    host_devices,
    in_use,
    lock_holder,
    remove_if_it_blocks,
    wait_until_free,
)
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.protocol.answers import Unfit, Unreachable
from iris_ray.actors.protocol.messages import HostPlace, HostReady, ProcessSpec, ProcessStart, TaskLaunch
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import EndKind, TaskEnd
from tests.support.chip_holders import ChipHolder
from tests.support.gangs import alive
from tests.support.processes import TOKEN, Waiting, WaitingActor, earlier_than, tree

SOON = 0.2
UNPRIVILEGED_USER = 65534


class Host:
    """A simulated TPU host with one chip."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock_directory = directory / "lock"
        for name in ("dev", "lock", "tasks"):
            (directory / name).mkdir()
        (directory / "dev" / "accel0").touch()
        self.devices = host_devices({"IRIS_RAY_HOST_DIR": str(directory)})
        self.ledger = ProcessLedger(directory)
        self._holders: list[ChipHolder] = []

    def holder(self, *, real: bool = True, launcher: tuple[str, ...] = (), **environ: str) -> ChipHolder:
        self._holders.append(ChipHolder(self.lock_directory, real=real, launcher=launcher, **environ))
        return self._holders[-1]

    def why_not(self) -> str | None:
        """Why the chips are not free."""
        not_free = wait_until_free(self.devices, self.ledger, SOON)
        return None if not_free is None else not_free.why

    def clear(self) -> None:
        for holder in self._holders:
            holder.end()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(tmp_path))
    host = Host(tmp_path)
    yield host
    host.clear()


# -- libtpu's lock -----------------------------------------------------------------------------------------------------


def test_live_holder_blocks_libtpu_and_is_named(host: Host) -> None:
    holder = host.holder()
    assert holder.said == "holds"
    assert "lockfile" in host.holder().said, "libtpu itself refuses a second process"
    (seen,) = find_holders(host.devices, host.ledger).seen
    assert (seen.pid, seen.ours) == (holder.pid, False)
    assert seen.started == psutil.Process(holder.pid).create_time()
    assert f"held by pid {holder.pid} (python" in (host.why_not() or "")
    assert alive(holder.pid)


def test_leftover_lock_file_neither_blocks_nor_disappears(host: Host) -> None:
    host.holder().end()
    before = host.devices.lock.stat()
    assert host.why_not() is None
    assert host.devices.lock.stat().st_ino == before.st_ino
    assert host.holder().said == "holds"


def test_lock_query_does_not_take_lock_from_holder(host: Host) -> None:
    holder = host.holder()
    for _ in range(3):
        assert lock_holder(host.devices.lock) == holder.pid


def test_lock_held_outside_container_is_seen_without_pid(host: Host) -> None:
    holder = host.holder(real=False)
    script = (
        "from iris_ray.actors.host.chips import *; import psutil\n"
        "print(len(psutil.pids()) < 4, *map(str, find_holders(host_devices()).seen))"
    )
    contained = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*contained, "true"], capture_output=True).returncode:
        pytest.skip("the test needs a PID namespace, which this kernel does not allow its user")
    said = subprocess.run([*contained, sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "True a process that can't be seen from here"
    assert lock_holder(host.devices.lock) == holder.pid


def test_records_are_read_once_however_many_hold_the_chips(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has opened a chip may have thousands of forks, and each has the chip open."""
    reads, read = [], ProcessLedger._entries

    def counted(ledger: ProcessLedger, *rest: Any, **more: Any) -> Any:
        reads.append(ledger)
        return read(ledger, *rest, **more)

    monkeypatch.setattr(ProcessLedger, "_entries", counted)
    monkeypatch.setattr(chips, "_pids_with_open_chips", lambda _: ({os.getpid(), os.getppid(), 1}, 0))
    assert len(find_holders(host.devices, host.ledger).seen) == 3
    assert len(reads) == len(("tasks", "shared-tasks"))


def test_message_names_few_of_many_holders() -> None:
    why = in_use([Holder(pid, "python") for pid in range(1, 5001)]).why
    assert "pid 1 (python), pid 2 (python)" in why
    assert "and 4,990 more, which does not belong" in why
    assert len(why) < 400


def test_simulated_hosts_have_own_devices(host: Host) -> None:
    assert host.devices == Devices(host.lock_directory / "libtpu_lockfile", (host.directory / "dev" / "accel0",))
    configured = {"IRIS_RAY_HOST_DIR": str(host.lock_directory)}  # a real host whose owner chose where our files go
    assert host_devices(configured).lock == Path("/tmp/libtpu_lockfile")


# -- open chips --------------------------------------------------------------------------------------------------------


def test_open_chip_is_held_also_under_another_path(host: Host) -> None:
    (chip,) = host.devices.chips
    elsewhere = host.directory / "container" / chip.name
    elsewhere.parent.mkdir()
    elsewhere.hardlink_to(chip)
    assert find_holders(host.devices).seen == ()
    with elsewhere.open():
        assert [holder.pid for holder in find_holders(host.devices).seen] == [os.getpid()]
        assert f"pid {os.getpid()} (" in (host.why_not() or "")
    assert host.why_not() is None


def test_uncheckable_processes_of_other_users_are_counted(host: Host, common: Path) -> None:
    if os.geteuid() != 0:
        hidden = find_holders(host.devices).hidden
        assert hidden >= any(process.uids().real != os.getuid() for process in psutil.process_iter())
        return
    as_root = find_holders(host.devices).hidden
    chip = common / "accel0"
    with chip.open("w"), without_privileges():
        assert find_holders(Devices(common / "libtpu_lockfile", (chip,))).hidden > as_root


def test_refusal_says_how_many_processes_were_uncheckable(host: Host, common: Path) -> None:
    holder = ChipHolder(common, real=False)
    chip = common / "accel0"
    try:
        with chip.open("w"), without_privileges():
            devices = Devices(common / "libtpu_lockfile", (chip,))
            hidden = find_holders(devices).hidden
            not_free = wait_until_free(devices, ProcessLedger(common), SOON)
        assert not_free is not None
        assert f"pid {holder.pid}" in not_free.why
        assert ("processes of other users could not be checked" in not_free.why) == (hidden > 0)
    finally:
        holder.end()


# -- what is ours ------------------------------------------------------------------------------------------------------


def start(actor: TPUHostActor, process: WaitingActor) -> Coroutine[Any, Any, HostReady | Unreachable]:
    """Ask a host to start a process that waits for a task."""
    return actor.start_process(
        ProcessStart("slice-a", ProcessSpec(as_actor=True), cast(Any, process), frozenset(), "01")
    )


def refused(actor: TPUHostActor, process: WaitingActor) -> Unfit | None:
    """Return a host's answer if it can't start a process for its first task."""

    async def run() -> HostReady | Unreachable:
        answer = await start(actor, process)
        await actor.teardown("slice-a")
        return answer

    answer = asyncio.run(run())
    assert isinstance(answer, Unfit | HostReady)
    return answer if isinstance(answer, Unfit) else None


@pytest.fixture
def actor(host: Host) -> TPUHostActor:
    return TPUHostActor(HostPlace("node-1", "127.0.0.1", "slice-a", 1), True, None)


@pytest.fixture
def _soon_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """For hosts whose chips stay in use, however long one waits."""
    for module in (host_actor, task_watch):
        monkeypatch.setattr(module, "wait_until_free", functools.partial(wait_until_free, timeout_s=SOON))


def test_own_leftover_process_is_ended_for_next_task(host: Host, actor: TPUHostActor, waiting: Waiting) -> None:
    holder = host.holder()
    host.ledger.record(tree(holder, "an earlier task's"))
    assert find_holders(host.devices, host.ledger).seen[0].ours
    assert refused(actor, waiting()) is None
    assert not alive(holder.pid)
    assert host.holder().said == "holds"


@pytest.mark.usefixtures("_soon_sure")
def test_host_is_not_blamed_for_chips_held_by_sharing_task(host: Host, actor: TPUHostActor, waiting: Waiting) -> None:
    holder = host.holder()
    ProcessLedger(host.directory, exclusive=False).record(tree(holder, "a neighbour's"))
    assert find_holders(host.devices, host.ledger).seen[0].ours
    unfit = refused(actor, waiting())
    assert unfit is not None
    assert (unfit.ours, "belongs to another task" in unfit.why) == (True, True)
    assert launch(lambda: None).kind is EndKind.CHIPS_TAKEN
    assert alive(holder.pid)


def test_child_outside_process_group_is_ended_for_next_task(host: Host, actor: TPUHostActor, waiting: Waiting) -> None:
    """setsid starts it in a session of its own; its parent is not the task's process, which is gone."""
    task = subprocess.Popen(["sleep", "60"])
    host.ledger.record(tree(task, "an earlier task's"))
    TaskFiles.of_process(host.directory, task.pid).started.touch()
    task.kill()
    task.wait()
    holder = host.holder(launcher=("setsid", "--wait"), IRIS_RAY_TASK_TOKEN="an earlier task's")
    assert os.getpgid(holder.pid) == holder.pid != os.getpgid(0)
    assert find_holders(host.devices, host.ledger).seen[0].ours
    assert refused(actor, waiting()) is None
    assert not alive(holder.pid)
    assert host.holder().said == "holds"


@pytest.mark.usefixtures("_soon_sure")
@pytest.mark.parametrize("token", ["", "some other host's"])
def test_foreign_holder_is_named_and_never_ended(host: Host, actor: TPUHostActor, waiting: Waiting, token: str) -> None:
    holder = host.holder(IRIS_RAY_TASK_TOKEN=token)
    refusal = refused(actor, waiting())
    assert refusal is not None
    assert refusal.node_id == "node-1"
    assert refusal.why.startswith(f"its chips are held by pid {holder.pid} (python")
    assert refusal.reason == f"slice-a host 1: {refusal.why}"
    assert alive(holder.pid)
    holder.end()
    assert refused(actor, waiting()) is None


def test_process_reusing_a_tasks_pid_is_not_ours(host: Host) -> None:
    holder = host.holder(real=False)
    host.ledger.record(tree(holder))
    entry = host.directory / "tasks" / f"{holder.pid}.json"
    entry.write_text(entry.read_text().replace('"started": ', '"started": 1'))
    assert not find_holders(host.devices, host.ledger).seen[0].ours


def test_process_whose_pid_was_reused_is_not_watched(host: Host, actor: TPUHostActor, waiting: Waiting) -> None:
    process = waiting()
    process.identity = earlier_than(process.identity)
    with pytest.raises(RuntimeError, match=f"pid {process.identity.pid}, has ended"):
        asyncio.run(start(actor, process))
    assert list(host.directory.rglob("*.json")) == [], "it is not recorded as ours"


# -- after a task ------------------------------------------------------------------------------------------------------


def stopped(
    host: Host, actor: TPUHostActor, process: WaitingActor, during: Callable[[], ChipHolder]
) -> tuple[TaskEnd | None, ChipHolder]:
    """Return how a task ended, as its host tells it once the host is free, and which process held the chips."""

    async def run() -> tuple[TaskEnd | None, ChipHolder]:
        assert isinstance(await start(actor, process), HostReady)
        task = process.identity
        TaskFiles.of_process(host.directory, task.pid).started.touch()
        holder = during()
        task.signal(signal.SIGKILL)
        while not actor._watches[task.pid].ended:
            await asyncio.sleep(0.01)
        return await actor.stop(task.pid, None), holder

    return asyncio.run(run())


def test_end_is_confirmed_once_stray_child_releases_chips(host: Host, actor: TPUHostActor, waiting: Waiting) -> None:
    launcher = "setsid", "--wait"
    end, child = stopped(host, actor, waiting(), lambda: host.holder(launcher=launcher, IRIS_RAY_TASK_TOKEN=TOKEN))
    assert end is not None
    assert end.kind is EndKind.CRASHED
    assert not alive(child.pid)
    assert lock_holder(host.devices.lock) is None
    assert host.holder().said == "holds"


@pytest.mark.usefixtures("_soon_sure")
def test_end_is_not_confirmed_while_stranger_holds_chips(host: Host, actor: TPUHostActor, waiting: Waiting) -> None:
    end, stranger = stopped(host, actor, waiting(), host.holder)
    assert end is None
    assert alive(stranger.pid)


# -- right before user code --------------------------------------------------------------------------------------------


def launch(function: Callable[[], Any], slice_name: str = "slice-a", per_host: int = 1) -> TaskEnd:
    info = JobInfo("job", "job/task-1", 1, 4, 2, 0, 1, slice_name, 1, "127.0.0.1:20002", processes_per_host=per_host)
    multislice = MultisliceInfo("127.0.0.1", 0, 1, 20_000, 20_001)
    before = dict(os.environ)
    process = TaskProcess("127.0.0.1", (), ())
    try:
        return process.run(TaskLaunch(cloudpickle.dumps(function), {}, info, multislice, None, "label"))
    finally:
        for held in process._held:  # a process that may not start holds its ports until it ends
            held.close()
        os.environ.clear()
        os.environ.update(before)


def test_user_code_does_not_run_while_chips_are_held(host: Host) -> None:
    ran = host.directory / "ran"
    function = lambda path=str(ran): open(path, "x").close()  # noqa: E731
    holder = host.holder()
    end = launch(function)
    assert end.kind is EndKind.HOST_UNFIT
    assert f"held by pid {holder.pid} (python" in end.error
    assert "end it if it is no longer needed" in end.error
    assert not ran.exists()
    assert not TaskFiles.of_process(host.directory, os.getpid()).started.exists()
    holder.end()
    assert launch(function).kind is EndKind.RETURNED
    assert ran.exists()


@pytest.mark.parametrize(("ours", "kind"), [(True, EndKind.RETURNED), (False, EndKind.HOST_UNFIT)])
def test_process_runs_beside_its_hosts_others_but_no_stranger(host: Host, ours: bool, kind: EndKind) -> None:
    """Another one of the same gang may have been faster to take libtpu's lock."""
    holder = host.holder(real=False)
    if ours:
        host.ledger.record(tree(holder))
    assert launch(lambda: None, per_host=2).kind is kind


def test_task_without_chips_runs_beside_chip_holder(host: Host) -> None:
    host.holder(real=False)
    assert launch(lambda: None, slice_name="").kind is EndKind.RETURNED


def test_task_keeps_lock_taken_by_preloaded_module(host: Host) -> None:
    """Closing any descriptor of a file drops the process's own lock on it."""
    import fcntl

    host.devices.lock.touch()
    with host.devices.lock.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert launch(lambda: None).kind is EndKind.RETURNED
        assert "unavailable" in host.holder(real=False).said


# -- lock files that block ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Act as a user other than root, who may open every file."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(UNPRIVILEGED_USER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def common(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory like /tmp, with a read-only lock file of a user without privileges."""
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o1777)
    with without_privileges():
        (directory / "libtpu_lockfile").touch()
        (directory / "libtpu_lockfile").chmod(0o444)
    yield directory
    shutil.rmtree(directory)


def test_stale_unopenable_lock_file_is_removed(common: Path) -> None:
    lock = common / "libtpu_lockfile"
    with without_privileges():
        assert blocks(lock)
        assert wait_until_free(Devices(lock, ()), ProcessLedger(common), SOON) is None
        assert not lock.exists()


def test_held_lock_file_survives_race_for_removal(common: Path) -> None:
    lock = common / "libtpu_lockfile"
    lock.chmod(0o666)
    holder = ChipHolder(common, real=False)
    lock.chmod(0o444)
    try:
        with without_privileges():
            ledger = ProcessLedger(common)
            for not_free in (
                wait_until_free(Devices(lock, ()), ledger, SOON),
                remove_if_it_blocks(lock, ledger),  # it looked free a moment ago
            ):
                assert not_free is not None
                assert f"held by pid {holder.pid}" in not_free.why
            assert lock.exists()
    finally:
        holder.end()


def test_pipe_in_place_of_lock_file_blocks_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of the host can put one into /tmp. To open it for reading would wait for a writer, for ever."""
    os.mkfifo(host.devices.lock)
    opened = os.open

    def without_waiting(path: Path, flags: int, *args: int) -> int:
        assert flags & (os.O_NONBLOCK | os.O_RDWR), f"{path} would be waited for"
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", without_waiting)
    monkeypatch.setattr(chips, "blocks", lambda _: True)  # the pipe is another user's
    assert lock_holder(host.devices.lock) is None
    assert LockProbe(host.devices.lock).holder() is None
    assert remove_if_it_blocks(host.devices.lock, host.ledger) is None
    assert not host.devices.lock.exists()


def test_unremovable_stale_lock_file_is_reported_with_advice(common: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the test acts as two users, which only root can")
    lock = common / "libtpu_lockfile"
    os.chown(lock, 0, 0)
    lock.chmod(0o644)
    with without_privileges():
        not_free = wait_until_free(Devices(lock, ()), ProcessLedger(common), SOON)
    assert not_free is not None
    assert "belongs to root" in not_free.why
    assert f"sudo rm {lock}" in not_free.why
    assert lock.exists()
