"""The zygote with real processes: what it imports and refuses, how it fails, and with which variables it starts."""

import asyncio
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import cloudpickle

from iris_ray.actors.host import forks
from iris_ray.actors.host.forked_task import END, READY, Begin, end_of
from iris_ray.actors.host.forks import MOST_ASKED, Fork, ModuleFailed, ModuleUnfit, Zygote, ZygoteFailed
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.reaper import end_what_is_left
from iris_ray.framing import Frame
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.processes.tree import ProcessTree
from tests.support.forks import HERE, NOWHERE, a_zygote, ended, launch_of, run_in, started_zygote, until, waiting_fork
from tests.support.processes import identity_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# -- what it imports ---------------------------------------------------------------------------------------------------


async def test_task_collects_garbage_though_the_zygote_imports_without(tmp_path: Path) -> None:
    def look() -> tuple[bool, int]:
        import gc

        return gc.isenabled(), gc.get_freeze_count()

    async with a_zygote() as zygote:
        is_enabled, frozen = (await run_in(zygote, tmp_path, look)).result
    assert is_enabled
    assert frozen > 10_000


DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        time.sleep(600)
    os._exit(0)
os.wait()
"""
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='t').start()\n"
UNFIT = {
    "starts_thread": (THREAD, "starts threads ("),
    "starts_thread_after_fork": (
        f"import os\nos.register_at_fork(after_in_parent=lambda: exec({THREAD!r}))",
        "starts threads (",
    ),
    "opens_device": ("device = open('/dev/full', 'wb')", "opens /dev/full"),
    "starts_process": ("import subprocess\nchild = subprocess.Popen(['sleep', '600'])", "starts processes (sleep)"),
    "leaves_daemon": (DAEMON, "starts processes (iris_ray::zygot"),
}
FAILING = {
    "raises": ("raise ValueError('no licence')", "can't be imported: ValueError: no licence"),
    "raises_with_process": (f"{UNFIT['starts_process'][0]}\n1 / 0", "can't be imported: ZeroDivisionError"),
    "exits": ("import sys\nsys.exit(3)", "can't be imported: SystemExit: 3"),
    "no_such_module": (None, "can't be imported: ModuleNotFoundError"),
    "exits_at_once": ("import os\nos._exit(3)", "has ended"),
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "has ended"),
    "hangs": (f"{UNFIT['starts_process'][0]}\nimport time\ntime.sleep(600)", "has not ended within 1 s"),
}


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A directory with modules that have side effects."""
    directory = tmp_path / "modules"
    directory.mkdir()
    for name, (source, _) in (UNFIT | FAILING).items():
        if source is not None:
            (directory / f"{name}.py").write_text(source)
    (directory / "fine.py").write_text("import subprocess\nsubprocess.run(['true'])\nimported = True")
    return directory


class Impatient(Zygote):
    """Takes its time to start, and then one second for each module."""

    def _take(self, said: dict[str, Any]) -> None:
        forks.START_S = 1.0
        super()._take(said)


async def prepared(modules: Path, *preload: str, kind: type[Zygote] = Zygote) -> tuple[Zygote, Exception | None]:
    """Start a zygote. Return why it could not import its modules."""
    zygote = await started_zygote(kind=kind)
    try:
        await zygote.prepare([str(modules), *sys.path], preload)
    except ZygoteFailed as error:
        return zygote, error
    return zygote, None


async def nothing_left(zygote: Zygote) -> None:
    assert zygote.tree is not None
    tree = zygote.tree
    await until(lambda: not any(process.runs() for process in tree.search()))


@pytest.mark.parametrize("name", UNFIT)
async def test_module_that_no_fork_can_inherit_is_named(modules: Path, name: str) -> None:
    zygote, error = await prepared(modules, "fine", name, "fine")
    assert isinstance(error, ModuleUnfit)
    assert error.module == name
    assert UNFIT[name][1] in str(error)
    await nothing_left(zygote)


@pytest.mark.parametrize("name", FAILING)
async def test_module_that_cannot_be_imported_is_named(
    modules: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(forks, "START_S", forks.START_S)  # restored at the end
    zygote, error = await prepared(modules, name, kind=Impatient if name == "hangs" else Zygote)
    assert isinstance(error, ModuleFailed)
    assert (error.module, FAILING[name][1] in str(error)) == (name, True), str(error)
    await nothing_left(zygote)


@pytest.mark.parametrize("characters", [140_000, 400_000])
async def test_module_is_named_however_long_its_error_is(modules: Path, characters: int) -> None:
    """The socket takes no longer message, and the host reads no longer one."""
    (modules / "verbose.py").write_text(f"raise ImportError('begins ' + '\U0001f4a5' * {characters} + ' ends')")
    zygote, error = await prepared(modules, "verbose")
    assert "can't be imported: ImportError: begins" in str(error)
    assert str(error).endswith(" ends")
    await nothing_left(zygote)


async def test_zygote_that_hangs_before_any_module_is_ended(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "START_S", 3.0)
    (modules / "ray.py").write_text("import time\ntime.sleep(600)")
    zygote, error = await prepared(modules)
    assert "has not started within 3 s" in str(error)
    await nothing_left(zygote)


async def test_task_has_preloaded_modules_and_none_of_their_unwritten_output(
    modules: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (modules / "talks.py").write_text("import sys\nsys.stdout.write('a banner')")
    async with a_zygote(["fine", "talks"], path=[modules], without=["PYTHONUNBUFFERED"]) as zygote:
        assert (await run_in(zygote, tmp_path, lambda: "fine" in sys.modules and "talks" in sys.modules)).result
        assert (await run_in(zygote, tmp_path, lambda: None)).code == 0
    assert capfd.readouterr().out.count("a banner") == 1


# -- its failures ------------------------------------------------------------------------------------------------------


async def test_killed_zygote_takes_forks_along_and_refuses_more(tmp_path: Path) -> None:
    async with a_zygote() as zygote:
        assert zygote.tree is not None
        process, ready = await waiting_fork(zygote, tmp_path)
        running = asyncio.ensure_future(process.run(launch_of(lambda: time.sleep(600))))
        await asyncio.sleep(0.1)
        zygote.tree.root.signal(signal.SIGKILL)
        assert await running is None
        await until(lambda: not ProcessIdentity(ready.pid, ready.started).exists())
        process.close()
        with pytest.raises(ZygoteFailed, match="has ended"):
            await zygote.fork()
        assert zygote.ended


async def test_zygote_that_does_not_answer_is_asked_no_more_and_its_tasks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may swap, or be throttled. A task that runs must not pay for that."""
    async with a_zygote() as zygote:
        assert zygote.tree is not None
        root, (process, _) = zygote.tree.root, await waiting_fork(zygote, tmp_path)
        monkeypatch.setattr(forks, "ANSWER_S", 0.5)
        root.signal(signal.SIGSTOP)
        asked = [asyncio.ensure_future(zygote.fork()) for _ in range(MOST_ASKED + 3)]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, ZygoteFailed)
        assert (zygote.is_retired, zygote.ended) == (True, False)
        assert len(zygote._asked) == MOST_ASKED, "those that waited for their turn do not ask"
        end = await process.run(launch_of(lambda: 7))
        assert end is not None
        assert cloudpickle.loads(end.payload) == 7
        process.let_exit()
        root.signal(signal.SIGCONT)
        await until(lambda: not root.exists())
        process.close()


async def test_zygote_that_is_stopped_for_good_ends_with_its_last_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't tell that its fork has ended. Nobody would ever end it on a host that goes on."""
    async with a_zygote() as zygote:
        assert zygote.tree is not None
        root, (process, ready) = zygote.tree.root, await waiting_fork(zygote, tmp_path)
        monkeypatch.setattr(forks, "ANSWER_S", 0.2)
        root.signal(signal.SIGSTOP)
        with pytest.raises(ZygoteFailed, match="has not answered"):
            await zygote.fork()
        process.kill()
        await until(lambda: not ProcessIdentity(ready.pid, ready.started).runs())
        process.close()
        await until(lambda: not root.exists())


async def test_module_that_reaps_children_keeps_no_exit_code_from_the_host(modules: Path, tmp_path: Path) -> None:
    """Without the codes, the host would wait for each, and remember each fork for ever. The task has the handler."""
    (modules / "ignores.py").write_text("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    async with a_zygote(["ignores"], path=[modules]) as zygote:
        assert (await run_in(zygote, tmp_path, lambda: os._exit(7))).code == 7
        done = await run_in(zygote, tmp_path, lambda: signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN)
        assert done.result is True


async def test_programs_of_a_task_do_not_have_its_connection(tmp_path: Path) -> None:
    """One of them could tell the host that the task has returned."""

    def sockets_of_a_program() -> str:
        return subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout

    async with a_zygote() as zygote:
        seen = (await run_in(zygote, tmp_path, sockets_of_a_program)).result
        assert "pipe:" in seen
        assert "socket:" not in seen


async def test_what_keeps_a_process_from_its_task_is_said(tmp_path: Path) -> None:
    async with a_zygote() as zygote:
        process = await zygote.fork()
        ready = await process.begin(Begin("203.0.113.7", frozenset(), tmp_path, {}, NOWHERE))
        assert "Cannot assign requested address" in (ready.error or "")
        process.kill()
        process.close()
        end = (await run_in(zygote, tmp_path, lambda: 7, ODD="a\ud800")).end
        assert end is not None
        assert "UnicodeEncodeError" in end.error


@pytest.mark.parametrize("said", ["[]", "7", '["x", 1, "", [], null]', '[1, 1, "", [], null]', "{", None])
async def test_fork_that_says_nonsense_before_its_task_fails(modules: Path, tmp_path: Path, said: str | None) -> None:
    """A module of `preload` runs code in each fork. It must not have the host watch, and end, another process."""
    frame = Frame(b"?" if said is None else READY, data=(said or "").encode()).packed()
    (modules / "talkative.py").write_text(f"""
import os, socket

def talk():
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if one.type == socket.SOCK_STREAM:
            one.send({frame!r})

os.register_at_fork(after_in_child=talk)
""")
    async with a_zygote(["talkative"], path=[modules]) as zygote:
        process = await zygote.fork()
        with pytest.raises(ZygoteFailed, match="the process that was to wait for a task has failed: "):
            await process.begin(Begin(HERE, frozenset(), tmp_path, {}, NOWHERE))
        process.kill()
        process.close()
        await until(lambda: not zygote.forked)


@pytest.mark.parametrize(
    "facts",
    [
        ["returned", 1.0, False, "", "", 0],
        ["raised", math.nan, False, "", "", 1],
        ["raised", 1.0, False, "", "", math.inf],
        ["raised", "now", False, "", "", 1],
        [],
    ],
)
def test_end_that_makes_no_sense_is_refused(facts: list[object]) -> None:
    """It would break the host, or the pool, which believe their hosts."""
    with pytest.raises(ValueError, match=r"."):
        end_of(Frame(END, data=json.dumps(facts).encode()), b"")


NAMES = {resource.RLIMIT_NPROC: "processes", resource.RLIMIT_NOFILE: "open files"}


@pytest.mark.parametrize("limit", NAMES, ids=NAMES.values())
async def test_refused_fork_is_told_and_leaves_others_alone(modules: Path, tmp_path: Path, limit: int) -> None:
    """The zygote may be at a limit that is its host's or its own. Its forks go on, and later it forks again."""
    (modules / "limited.py").write_text(
        f"""
import ctypes, os, resource, signal

def limit(*_):
    if os.getuid() == 0 and {limit} == resource.RLIMIT_NPROC:  # root has no such limit
        os.setresuid(54321, 54321, 54321)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self is another user's
    resource.setrlimit({limit}, (4 * ({limit} == resource.RLIMIT_NOFILE), resource.getrlimit({limit})[1]))

def lift(*_):
    hard = resource.getrlimit({limit})[1]
    resource.setrlimit({limit}, (hard, hard))

signal.signal(signal.SIGUSR1, limit)
signal.signal(signal.SIGUSR2, lift)
"""
    )
    async with a_zygote(["limited"], path=[modules]) as zygote:
        assert zygote.tree is not None
        process, _ = await waiting_fork(zygote, tmp_path)
        limits, name = Path(f"/proc/{zygote.tree.pid}/limits"), f"Max {NAMES[limit]} "

        def is_limited() -> bool:
            (soft,) = (line.removeprefix(name).split()[0] for line in limits.read_text().splitlines() if name in line)
            return soft in ("0", "4")

        zygote.tree.root.signal(signal.SIGUSR1)
        await until(is_limited)
        words = "Too many open files" if limit == resource.RLIMIT_NOFILE else "Resource temporarily unavailable"
        for _ in range(3):
            with pytest.raises(OSError, match=f"the host can't start a process now: {words}"):
                await zygote.fork()
        running = asyncio.ensure_future(process.run(launch_of(lambda: "goes on")))
        end = await running
        assert end is not None
        assert end.payload is not None
        process.let_exit()
        await until(lambda: not zygote.forked)
        process.close()
        zygote.tree.root.signal(signal.SIGUSR2)
        await until(lambda: not is_limited())
        (await zygote.fork()).close()


async def test_hundreds_of_forks_at_once_all_come(tmp_path: Path) -> None:
    async with a_zygote() as zygote:
        processes = await asyncio.gather(*(zygote.fork() for _ in range(400)))
        assert len({process.pid for process in processes}) == 400
        for process in processes:
            process.close()
        await until(lambda: not zygote.forked)
        assert {process.exit_code() for process in processes} == {1}, "how each has ended is known"


async def test_abandoned_fork_ends(tmp_path: Path) -> None:
    """Whoever has asked for it is gone when it comes."""
    async with a_zygote() as zygote:
        asked = asyncio.ensure_future(zygote.fork())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked.cancel()
        assert (await run_in(zygote, tmp_path, lambda: 7)).result == 7
        await until(lambda: not zygote.forked)


async def test_exit_code_is_never_that_of_an_earlier_process_with_the_same_pid(tmp_path: Path) -> None:
    """The kernel uses numbers again; the message about the later process is played."""
    async with a_zygote() as zygote:
        process, ready = await waiting_fork(zygote, tmp_path)
        process.kill()
        await until(lambda: process.exit_code() == -signal.SIGKILL)
        process.close()
        later: asyncio.Future[Fork] = asyncio.get_running_loop().create_future()
        zygote._asked.append(later)
        zygote._take({"forked": ready.pid})
        assert (later.result().code, process.exit_code()) == (None, -signal.SIGKILL)


# -- the end of its owner ----------------------------------------------------------------------------------------------

OWNER = """
import asyncio, signal, sys
from pathlib import Path
from tests.support.forks import launch_of, started_zygote, waiting_fork

names = sys.argv[2]

def leave_daemons():
    import os, signal
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.write(os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND), f"{os.getpid()}\\n".encode())
            while True:
                signal.pause()
    while True:
        signal.pause()

async def main():
    zygote = await started_zygote()
    await zygote.prepare(sys.path, ())
    waiting, first = await waiting_fork(zygote, Path(sys.argv[1]))
    process, second = await waiting_fork(zygote, Path(sys.argv[1]))
    running = asyncio.ensure_future(process.run(launch_of(leave_daemons)))
    print(zygote.tree.pid, zygote.tree.token, first.pid, second.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def owner(tmp_path: Path) -> Any:
    daemons = tmp_path / "daemons"
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), str(daemons)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    zygote, token, first, second = process.stdout.readline().split()
    while not daemons.exists() or len(found := daemons.read_text().split()) < 2:
        time.sleep(0.01)
    identities = [identity_of(psutil.Process(int(pid))) for pid in (zygote, first, second, *found)]
    yield process, identities, token
    process.kill()
    process.wait()
    process.stdout.close()
    for identity in identities:
        identity.signal(signal.SIGKILL)


async def test_all_forks_and_daemons_end_with_their_owner(owner: Any) -> None:
    process, identities, _ = owner
    process.kill()
    await until(lambda: not any(identity.runs() for identity in identities))


async def test_reaper_ends_a_stopped_zygote_and_the_daemons_of_a_killed_one(owner: Any, tmp_path: Path) -> None:
    """A stopped zygote hears nothing of its owner's end. It is in the host's record, with the token of its forks."""
    process, (zygote, *others), token = owner
    ledger = ProcessLedger(tmp_path)
    ledger.record(ProcessTree(zygote, token))
    zygote.signal(signal.SIGSTOP)
    process.kill()
    process.wait()
    await asyncio.sleep(0.2)
    assert all(identity.runs() for identity in (zygote, *others[1:])), "only the fork that waited ends by itself"
    await asyncio.to_thread(end_what_is_left, ledger, ProcessIdentity.of_this_process())
    assert not any(identity.runs() for identity in (zygote, *others))
    assert list(ledger._entries([])) == []


# -- its variables -----------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return dict(os.environ)


async def test_zygote_starts_with_variables_expanded_as_ray_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/host/lib")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("IRIS_NOT_THERE", raising=False)
    variables = {
        "LD_LIBRARY_PATH": "/mine/lib:$LD_LIBRARY_PATH:${LD_LIBRARY_PATH}",
        "MALLOC_ARENA_MAX": "${IRIS_NOT_THERE}2",
        "LD_DEBUG_OUTPUT": "$IRIS_NOT_THERE",
        "TZ": ":Europe/Berlin",
    }
    async with a_zygote(variables=variables, without=["OMP_NUM_THREADS"]) as zygote:
        found = (await run_in(zygote, tmp_path, environment)).result
        assert found["LD_LIBRARY_PATH"] == "/mine/lib:/host/lib:/host/lib"
        assert (found["MALLOC_ARENA_MAX"], found["LD_DEBUG_OUTPUT"]) == ("2", "$IRIS_NOT_THERE")
        assert (found["TZ"], "OMP_NUM_THREADS" in found) == (":Europe/Berlin", False)
        assert found["JE_ARROW_MALLOC_CONF"] == "background_thread:false", "else pyarrow starts a thread in the zygote"
        own = (await run_in(zygote, tmp_path, environment, OMP_NUM_THREADS="3")).result
        assert own["OMP_NUM_THREADS"] == "3"
    async with a_zygote(variables={"JE_ARROW_MALLOC_CONF": "narenas:1"}) as zygote:
        assert (await run_in(zygote, tmp_path, environment)).result["JE_ARROW_MALLOC_CONF"] == "narenas:1"


def imports() -> tuple[str, str]:
    """Return what a module is here, and in a Python program that a task starts."""
    from theirs import where  # type: ignore[import-not-found]

    return where, subprocess.check_output(
        [sys.executable, "-c", "print(__import__('theirs').where)"], text=True
    ).strip()


async def test_users_python_path_counts_in_task_and_in_programs_that_it_starts(tmp_path: Path) -> None:
    for name in ("users", "hosts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs.py").write_text(f"where = {name!r}")
    before = os.environ.get("PYTHONPATH", "")
    async with a_zygote(path=[tmp_path / "hosts"]) as zygote:
        found = await run_in(zygote, tmp_path, environment)
        assert found.result.get("PYTHONPATH", "") == before, "as in an actor: only what was set"
    variables = {"PYTHONPATH": f"{tmp_path / 'users'}:{before}"}
    async with a_zygote(path=[tmp_path / "hosts"], variables=variables) as zygote:
        assert (await run_in(zygote, tmp_path, imports)).result == ("users", "users")


async def test_zygote_does_not_inherit_blocked_signals(tmp_path: Path) -> None:
    """Ray blocks SIGINT in its workers. A program that a task starts could never be interrupted."""

    def interrupt() -> int:
        child = subprocess.Popen(["sleep", "600"])
        child.send_signal(signal.SIGINT)
        return child.wait(60)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        zygote = await started_zygote()
        await zygote.prepare(sys.path, ())
        assert (await run_in(zygote, tmp_path, interrupt)).result == -signal.SIGINT
        await ended(zygote)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
