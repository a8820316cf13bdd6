"""What a host does with a task's process: it tells it of notices, looks how far it is, and ends what it leaves."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from iris_ray.actors.calls.clocks import Moment
from iris_ray.actors.host import notices as task_notices
from iris_ray.actors.host import task_watch
from iris_ray.actors.host.chips import Devices, wait_until_free
from iris_ray.actors.host.exit_status import WatchedProcess
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.actors.protocol.messages import HostPlace, HostReady, ProcessSpec, ProcessStart, Progress, TaskLaunch
from iris_ray.actors.protocol.task_files import STACKS_SIGNAL, TaskFiles
from iris_ray.model.notices import Notice, NoticeKind, Replacement
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.processes.tree import Listing, ProcessTree
from tests.support.forks import a_zygote, launch_of, waiting_fork
from tests.support.processes import (
    NOTICE,
    PATIENCE_S,
    TOKEN,
    Child,
    ChildRunner,
    Make,
    NoOutput,
    Nursery,
    Waiting,
    WaitingActor,
    alive,
    counted_looks,
    identity_of,
    started,
    tree,
    watched,
)

SLEEP = "time.sleep(60)"
SAVE = """
    import iris_ray
    while (notice := iris_ray.preemption_notice()) is None:
        time.sleep(0.01)
    print(notice.kind.value, flush=True)
    notice.saved()
"""


def test_host_ends_processes_named_by_task(make: Make, tmp_path: Path) -> None:
    other = make("while True: time.sleep(60)")

    async def end(watch: TaskWatch) -> bool:
        TaskFiles.of_process(tmp_path, child.process.pid).add_member(identity_of(other.process))
        await watch.how_it_ended()
        await watch.end("enough")
        return other.process.poll() is None and alive(member)

    child = make("")
    member = psutil.Process(other.process.pid)
    assert watched(child, tmp_path, started(child, end)) is False


@pytest.mark.usefixtures("own_host")
async def test_host_knows_tasks_end_after_later_ones_ended(waiting: Waiting) -> None:
    """A host may have eight processes of a gang, and those of gangs that failed at once before it."""
    *ending, last = [waiting() for _ in range(17)]
    actor = TPUHostActor(HostPlace("node-1", "127.0.0.1", "slice-a", 1), False, cast(Any, None))

    async def start(process: WaitingActor) -> None:
        start = ProcessStart("slice-a", ProcessSpec(as_actor=True), cast(Any, process), frozenset(), "01")
        ready = await actor.start_process(start)
        assert ready == HostReady(process.identity.pid, (), "")

    for process in ending:
        await start(process)
    for process in ending:
        process.identity.signal(signal.SIGKILL)
        while not actor._watches[process.identity.pid].ended:
            await asyncio.sleep(0.01)
    await start(last)
    end = await actor.stop(ending[0].identity.pid, None)
    await actor.teardown("slice-a")
    assert end is not None
    assert end.kind is EndKind.NEVER_STARTED


def test_host_delivers_notice_to_task_that_saves(make: Make, tmp_path: Path) -> None:
    child = make(SAVE)
    assert watched(child, tmp_path, started(child, lambda watch: watch.notify(NOTICE))) is True
    child.says("maintenance")


def test_host_hears_of_task_ending_without_saving(make: Make, tmp_path: Path) -> None:
    child = make("import iris_ray\nwhile iris_ray.preemption_notice() is None: time.sleep(0.01)")
    assert watched(child, tmp_path, started(child, lambda watch: watch.notify(NOTICE))) is False


def test_host_delays_signal_until_task_has_begun(make: Make, tmp_path: Path) -> None:
    """Whoever waits for a task has no handlers yet, and would die of either signal."""
    child = make(SAVE)

    async def tell_early(watch: TaskWatch) -> bool:
        told = asyncio.ensure_future(watch.notify(NOTICE))
        watch.signal(STACKS_SIGNAL)
        await asyncio.sleep(0.3)
        assert not told.done()
        assert not watch.ended
        child.start()
        return await told

    assert watched(child, tmp_path, tell_early) is True
    assert "most recent call" not in child.clear()


def test_unwritable_notice_is_written_later(make: Make, tmp_path: Path) -> None:
    """A disk may be full for a moment."""
    child = make(SAVE)

    async def tell_on_a_faulty_disk(watch: TaskWatch) -> bool:
        obstacle = Path(f"{TaskFiles.of_process(tmp_path, child.process.pid).notice}.{os.getpid()}")
        obstacle.mkdir()
        child.start()
        told = asyncio.ensure_future(watch.notify(NOTICE))
        await asyncio.sleep(0.1)
        obstacle.rmdir()
        return await told

    assert watched(child, tmp_path, tell_on_a_faulty_disk) is True


def test_host_asks_no_ended_task(make: Make, tmp_path: Path) -> None:
    child = make("")

    async def ask_late(watch: TaskWatch) -> bool:
        while not watch.ended:
            await asyncio.sleep(0.01)
        watch.signal(STACKS_SIGNAL)
        return await watch.notify(NOTICE)

    assert watched(child, tmp_path, started(child, ask_late)) is False


def test_host_asked_after_deadline_answers_in_bounded_time(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that never saves is asked again and again: questions that stayed would keep its host from all others."""
    monkeypatch.setattr(task_notices, "LATE_ANSWER_S", 0.1)
    passed = Notice(NoticeKind.PREEMPTION, "now", time.time() - 1.0)
    child = make("    sys.stdin.readline()" + SAVE)

    async def ask_twice(watch: TaskWatch) -> list[bool]:
        first = await watch.notify(passed)
        monkeypatch.setattr(task_notices, "LATE_ANSWER_S", PATIENCE_S)
        child.start()
        while not TaskFiles.of_process(tmp_path, child.process.pid).saved.exists():
            await asyncio.sleep(0.01)
        return [first, await watch.notify(passed)]

    assert watched(child, tmp_path, started(child, ask_twice)) == [False, True]


def test_host_tells_more_urgent_notice_without_second_signal(make: Make, tmp_path: Path) -> None:
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


def test_task_is_told_once_of_notice_from_peer_and_pool(make: Make, tmp_path: Path) -> None:
    """The pool may be late, and may name the later deadline of another host. The answer is that of the first notice."""
    child = make(SAVE)
    first, late = (Notice(NoticeKind.PREEMPTION, f"in {s} s", time.time() + s) for s in (50.0, 60.0))

    async def tell_twice(watch: TaskWatch) -> tuple[bool, Notice | None]:
        watch.hear(first)
        watch.hear(late)
        has_saved = await watch.notify(late)
        return has_saved, TaskFiles.of_process(tmp_path, child.process.pid).read_notice()

    assert watched(child, tmp_path, started(child, tell_twice)) == (True, first)


def test_task_is_told_what_replaces_a_notice_that_was_called_off(make: Make, tmp_path: Path) -> None:
    child = make(SAVE)
    now = time.time()
    evicted, later = Notice(NoticeKind.EVICTION, "evicted", now + 50.0), now + 60.0

    async def tell(watch: TaskWatch) -> Notice | None:
        watch.hear(evicted)
        watch.hear(Notice(NoticeKind.PREEMPTION, "less urgent", later))
        await asyncio.sleep(0.1)
        assert TaskFiles.of_process(tmp_path, child.process.pid).read_notice() == evicted
        child.start()
        await watch.notify(Replacement(NoticeKind.PREEMPTION, "it counts", later))
        return TaskFiles.of_process(tmp_path, child.process.pid).read_notice()

    assert watched(child, tmp_path, tell) == Notice(NoticeKind.PREEMPTION, "it counts", later)


def test_peers_notice_does_not_reach_task_being_ended(make: Make, tmp_path: Path) -> None:
    child = make(SLEEP)

    async def tell_late(watch: TaskWatch) -> Notice | None:
        ending = asyncio.ensure_future(watch.end("enough"))
        await asyncio.sleep(0)
        watch.hear(NOTICE)
        notice = TaskFiles.of_process(tmp_path, child.process.pid).read_notice()
        await ending
        return notice

    assert watched(child, tmp_path, started(child, tell_late)) is None


def test_host_knows_a_tasks_progress(make: Make, tmp_path: Path) -> None:
    child = make("import iris_ray\niris_ray.heartbeat()\nprint(1, flush=True)\nsys.stdin.readline()\n"
                 "iris_ray.heartbeat(12)\niris_ray.report_status('loss')\nprint(2, flush=True)\n" + SLEEP)  # fmt: skip

    async def look(watch: TaskWatch) -> list[Progress]:
        found = [watch.progress()]
        child.start()
        child.says("1")
        found.append(watch.progress())
        child.start()
        child.says("2")
        return [*found, watch.progress()]

    nothing, alive, further = watched(child, tmp_path, look)
    assert nothing == Progress(None, None)
    assert (alive.step, further.step) == (None, 12)
    assert (alive.status, further.status) == (None, "loss")
    assert 0 <= alive.age < 60
    assert 0 <= further.age < 60


@pytest.mark.parametrize(
    ("script", "where"),
    [
        (SLEEP, "in sleeper"),
        ("import re; re.match('(a+)+b', 'a' * 60)", "in sleeper"),  # in C, with the GIL, for ever
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.stderr = None; " + SLEEP, "in sleeper"),
    ],
    ids=["sleeps", "spins in C", "without sys.stderr"],
)
def test_stacks_of_hanging_process_include_its_threads(make: Make, tmp_path: Path, script: str, where: str) -> None:
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
        watch.signal(STACKS_SIGNAL)
        assert child.process.stderr is not None
        stacks = ""
        while where not in stacks:
            stacks += await asyncio.to_thread(child.process.stderr.readline)
        assert not watch.ended, "it only looks"
        return stacks

    stacks = watched(child, tmp_path, started(child, dump))
    assert "in waiter" in stacks
    assert "most recent call first" in stacks


# -- its end --------------------------------------------------------------------------------------------------------


UPLOAD = """
    sys.stdin.readline()
    time.sleep(0.7)
    Path(f"{files.prefix}.uploaded").touch()
"""
Ending = Callable[[TaskWatch], Coroutine[Any, Any, Any]]


async def ends_in_peace(watch: TaskWatch) -> None:
    await watch.end(None, exit_grace=PATIENCE_S)


async def ends_in_a_moment(watch: TaskWatch) -> None:
    await watch.end(None, exit_grace=0.1)


async def ends_in_a_hurry(watch: TaskWatch) -> None:
    peaceful = asyncio.ensure_future(ends_in_peace(watch))
    await asyncio.sleep(0.1)
    await asyncio.gather(watch.end("the job was cancelled"), peaceful)


@pytest.mark.parametrize(
    ("end", "uploads"), [(ends_in_peace, True), (ends_in_a_moment, False), (ends_in_a_hurry, False)]
)
def test_returned_task_gets_its_grace_unless_hurried(make: Make, tmp_path: Path, end: Ending, uploads: bool) -> None:
    child = make(UPLOAD)
    watched(child, tmp_path, started(child, end))
    assert bool(list(tmp_path.rglob("*.uploaded"))) is uploads


class ToldRunner(ChildRunner):
    """The way to a child whose task has ended in this way, and whose process waits until it may exit."""

    def __init__(self, child: Child, end: TaskEnd) -> None:
        super().__init__(child)
        self._end = end

    async def run(self, launch: TaskLaunch) -> TaskEnd | None:
        return self._end


@pytest.mark.parametrize(
    ("kind", "exit_grace", "uploads"),
    [
        (EndKind.RAISED, PATIENCE_S, True),
        (EndKind.EXITED, PATIENCE_S, True),
        (EndKind.RAISED, 0.1, False),
        (EndKind.RAISED, 0.0, False),
        (EndKind.RETURNED, PATIENCE_S, False),
    ],
)
def test_stopped_task_that_has_failed_gets_its_grace(
    make: Make, tmp_path: Path, kind: EndKind, exit_grace: float, uploads: bool
) -> None:
    child = make(UPLOAD)
    end = TaskEnd(kind, Moment.now(), None, "ValueError: 7")

    async def fails(watch: TaskWatch) -> TaskEnd:
        while not watch.has_started:
            await asyncio.sleep(0.01)
        assert await watch.run(cast(TaskLaunch, None)) == end
        await watch.end("another task ended", exit_grace)
        return await watch.how_it_ended()

    watched(child, tmp_path, started(child, fails), ToldRunner(child, end))
    assert bool(list(tmp_path.rglob("*.uploaded"))) is uploads


async def test_chips_are_free_once_all_processes_of_the_host_have_ended(
    make: Make, own_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share them. The first to end must not take the other one for a stranger that holds the chips."""
    soon_s = 0.5  # in place of RELEASE_S
    monkeypatch.setattr(task_watch, "wait_until_free", partial(wait_until_free, timeout_s=soon_s))
    chip = own_host / "accel0"
    chip.touch()
    hold = f"chip = open({str(chip)!r}); print('holds', flush=True); sys.stdin.readline()"
    children = [make(hold), make(f"{hold}; time.sleep({2 * soon_s})")]
    ledger, watches = ProcessLedger(own_host), list[TaskWatch]()
    for child in children:
        one, devices = tree(psutil.Process(child.process.pid)), Devices(own_host / "lock", (chip,))
        process = WatchedProcess(one.root)
        watches.append(TaskWatch(ChildRunner(child), process, one, ledger, devices, NoOutput(), lambda: watches))
        child.start()
        child.says("holds")
    assert await asyncio.gather(*(watch.end(None, exit_grace=PATIENCE_S) for watch in watches)) == [None, None]
    for child in children:
        child.end()


class KilledRunner(ChildRunner):
    """The way to a child whose exit code is known at once."""

    is_fork = True

    def exit_code(self) -> int | None:
        return -signal.SIGKILL


async def test_tasks_that_end_at_once_share_listings(
    nursery: Nursery, own_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of all processes takes a tenth of a second on a host with a thousand tasks."""
    looks, watches, ledger = counted_looks(monkeypatch), list[TaskWatch](), ProcessLedger(own_host)
    children = [nursery.sleeper() for _ in range(20)]
    for child in children:
        one = tree(child, f"{TOKEN}-{child.pid}")
        runner = KilledRunner(cast(Child, SimpleNamespace(process=child)))
        watches.append(TaskWatch(runner, WatchedProcess(one.root), one, ledger, None, NoOutput()))
    for child in children:
        child.kill()
    for child in children:
        nursery.reap(child)
    await asyncio.gather(*(watch.how_it_ended() for watch in watches))
    await asyncio.gather(*(watch.end("enough") for watch in watches))
    assert len(looks) <= 3 * len(children), "a few listings for all, not two for each"
    assert [*own_host.rglob("*.json")] == []


# -- its children ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False])
def test_children_of_crashed_task_are_ended(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    """Forked ones, and those with an environment of their own: they hold memory and chips, and carry no token."""
    monkeypatch.setattr(task_watch, "DESCENDANTS_S", 0.05 if noted else PATIENCE_S)
    search = ProcessTree.search

    def late_at_exit(
        tree: ProcessTree, just_ended: bool = False, listing: Listing | None = None
    ) -> list[ProcessIdentity]:
        time.sleep(0.2 * just_ended)  # a busy host
        return search(tree, just_ended, listing)

    monkeypatch.setattr(ProcessTree, "search", late_at_exit)
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
        child.start()  # only now: the watch has had its first look, and seen nobody
        assert child.process.stdout is not None
        children = [psutil.Process(int(pid)) for pid in child.process.stdout.readline().split()]
        record = tmp_path / "tasks" / f"{child.process.pid}.json"
        while noted and len(json.loads(record.read_text())["descendants"]) < len(children):
            await asyncio.sleep(0.01)
        child.process.kill()
        child.process.wait()
        await watch.how_it_ended()
        assert all(one.is_running() for one in children)
        await watch.end("another task ended")
        psutil.wait_procs(children[: 3 if noted else 2], timeout=PATIENCE_S)  # the kernel takes its time on a busy host
        left = [one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children]
        for one in children:
            if one.is_running():
                one.kill()
        return left

    left = watched(child, tmp_path, crash)
    assert left == [False, False, not noted], "who left the group at once, before anybody saw it, can't be known"


@pytest.mark.parametrize("exclusive", [True, False])
async def test_process_that_has_left_its_task_without_a_trace_is_ended(
    own_host: Path, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    """It has another parent, session and environment before anybody sees it. On a shared host it may be any task's."""
    monkeypatch.setattr(task_watch, "DESCENDANTS_S", PATIENCE_S)
    told = own_host / "daemon"

    def leave_daemon() -> None:
        import subprocess

        program = f"echo $$ > {told}.new; mv {told}.new {told}; exec sleep 60"
        subprocess.run(["env", "-i", "setsid", "--fork", "sh", "-c", program], check=True)
        while not told.exists():
            time.sleep(0.01)

    async with a_zygote() as zygote:
        process, ready = await waiting_fork(zygote, own_host)
        another, _ = await waiting_fork(zygote, own_host)
        root = ProcessIdentity(ready.pid, ready.started)
        devices = Devices(own_host / "lock", ()) if exclusive else None
        known, ledger = ProcessTree(root, ready.token), ProcessLedger(own_host, exclusive)
        watch = TaskWatch(process, WatchedProcess(root), known, ledger, devices, NoOutput())
        assert (await watch.run(launch_of(leave_daemon))).kind is EndKind.RETURNED
        daemon = identity_of(psutil.Process(int(told.read_text())))
        assert zygote.orphans() == [daemon]
        assert await watch.end(None, PATIENCE_S) is None
        assert daemon.runs() is not exclusive
        assert another.exit_code() is None, "it waits for its task"
        another.kill()
        another.close()
