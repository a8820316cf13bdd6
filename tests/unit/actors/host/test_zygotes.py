"""A host starts processes by fork: one zygote for each way to start them, anew when it has ended. Without a cluster."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import cloudpickle
from ray.exceptions import ActorDiedError

from iris_ray.actors.calls.ray_internals import ClusterToJoin
from iris_ray.actors.host import zygotes
from iris_ray.actors.host.forks import Zygote, ZygoteFailed, ZygoteStart
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.reaper import end_what_is_left
from iris_ray.actors.host.zygotes import MOST_IDLE, Zygotes
from iris_ray.actors.protocol.answers import SetupFailed, Unfit, Unreachable
from iris_ray.actors.protocol.messages import HostPlace, HostReady, ProcessSpec, ProcessStart
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.outcomes import EndKind
from iris_ray.processes.identity import ProcessIdentity, environ_of, stat_of
from iris_ray.processes.subtree import read_of_process
from iris_ray.processes.tree import TOKEN_VARIABLE
from tests.support.forks import NOWHERE, ended, launch_of, run_in, until
from tests.support.processes import counted_looks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def _no_cluster(own_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterToJoin, "of_this_process", lambda: NOWHERE)


class Host:
    """The actor of a host that tasks share."""

    def __init__(self) -> None:
        pool = SimpleNamespace(serve=SimpleNamespace(remote=lambda *_: None))
        self.actor = TPUHostActor(HostPlace("node-1", "127.0.0.1", "cpu-1", 0), False, cast(Any, pool))

    async def start(self, **how: Any) -> HostReady | Unreachable:
        return await self.actor.start_process(ProcessStart("cpu-1", ProcessSpec(**how), None, frozenset(), "01"))

    async def started(self, **how: Any) -> int:
        ready = await self.start(**how)
        assert isinstance(ready, HostReady), ready
        return ready.pid

    async def zygotes(self) -> list[Zygote]:
        return [(await starting)[0] for starting in self.actor._zygotes._started.values()]

    async def end(self) -> None:
        await self.actor.teardown("cpu-1")
        for zygote in await self.zygotes():
            await ended(zygote)


async def test_host_runs_tasks_in_forks_of_one_zygote(own_host: Path) -> None:
    host = Host()
    pids = await asyncio.gather(*(host.started() for _ in range(4)))
    (zygote,) = await host.zygotes()
    assert zygote.forked.keys() == set(pids)
    ends = await asyncio.gather(*(host.actor.run(pid, launch_of(os.getpid)) for pid in pids[:3]))
    assert [cloudpickle.loads(cast(bytes, end.payload)) for end in ends] == pids[:3]
    crash = await host.actor.run(pids[3], launch_of(lambda: os.kill(os.getpid(), signal.SIGABRT)))
    assert (crash.kind, crash.error) == (EndKind.CRASHED, "the task process was killed by SIGABRT")
    for pid in pids:
        await host.actor.stop(pid, None, 60.0)
    await until(lambda: not zygote.forked)
    await host.end()


def leave_daemon() -> int:
    """Leave a process with a session of its own. Return its pid."""
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


async def test_end_of_a_task_that_leaves_nothing_reads_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search reads files of all processes of the machine, and would cost a short task more than its fork."""
    host = Host()
    pids = [await host.started() for _ in range(3)]
    looks = counted_looks(monkeypatch)
    for function in os.getpid, lambda: sys.exit(3):
        await host.actor.run(pid := pids.pop(), launch_of(function))
        assert await host.actor.stop(pid, None, 60.0) is not None
    assert looks == []
    end = await host.actor.run(pid := pids.pop(), launch_of(leave_daemon))
    daemon = stat_of(cloudpickle.loads(cast(bytes, end.payload)))
    assert daemon is not None
    await host.actor.stop(pid, None, 60.0)
    assert looks
    assert not daemon.identity.runs()
    await host.end()


async def test_process_that_only_carries_the_token_ends_with_a_task_that_leaves_nothing(own_host: Path) -> None:
    """Such as a command of `iris-ray exec`."""
    host = Host()
    pid = await host.started()
    watch = host.actor._watches[pid]
    watch.files.expect_members()
    with subprocess.Popen(["sleep", "60"], env={TOKEN_VARIABLE: str(watch._tree.token)}) as carrier:
        await host.actor.run(pid, launch_of(os.getpid))
        await host.actor.stop(pid, None, 60.0)
        assert await asyncio.to_thread(carrier.wait) == -signal.SIGKILL
    await host.end()


async def test_crash_is_explained_by_a_zygote_that_is_late(own_host: Path) -> None:
    host = Host()
    pid = await host.started()
    (zygote,) = await host.zygotes()
    assert zygote.tree is not None
    task = asyncio.ensure_future(host.actor.run(pid, launch_of(signal.pause)))
    await until(lambda: host.actor._watches[pid].has_started)
    zygote.tree.root.signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(1.5)
    zygote.tree.root.signal(signal.SIGCONT)
    end = await task
    assert (end.kind, end.error) == (EndKind.CRASHED, "the task process was killed by SIGKILL")
    await host.actor.stop(pid, None)
    await host.end()


async def test_killed_zygote_costs_its_tasks_and_no_launch_after_them(own_host: Path) -> None:
    host = Host()
    waiting, running = await host.started(), await host.started()
    (zygote,) = await host.zygotes()
    assert zygote.tree is not None
    task = asyncio.ensure_future(host.actor.run(running, launch_of(signal.pause)))
    await until(lambda: host.actor._watches[running].has_started)
    zygote.tree.root.signal(signal.SIGKILL)
    end = await task
    assert (end.kind, end.exit_code) == (EndKind.ZYGOTE_ENDED, 137)
    assert "had forked the task has ended" in end.error
    pids = await asyncio.gather(host.started(), host.started())
    assert len(await host.zygotes()) == 1
    for pid in (waiting, running, *pids):
        await host.actor.stop(pid, "enough")
    await host.end()


async def test_unfit_module_is_left_out_once_and_broken_one_fails_the_start(
    own_host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (own_host / "opens_device.py").write_text("device = open('/dev/full', 'wb')")
    (own_host / "fine_module.py").write_text("")
    (own_host / "broken.py").write_text("raise ValueError('no licence')")
    monkeypatch.syspath_prepend(own_host)
    host = Host()
    for more in ({}, {"runtime_env": {"env_vars": {"LC_ALL": "C"}}}):
        pid = await host.started(preload=("opens_device", "fine_module"), **more)
        end = await host.actor.run(pid, launch_of(lambda: {"opens_device", "fine_module"} & sys.modules.keys()))
        assert cloudpickle.loads(cast(bytes, end.payload)) == {"fine_module"}
    assert caplog.text.count("preload='opens_device' is left to each task to import: it opens /dev/full") == 1
    failed = await host.start(preload=("broken",))
    assert isinstance(failed, SetupFailed)
    assert failed.reason == "cpu-1 host 0: preload='broken' can't be imported: ValueError: no licence"
    host.actor._zygotes._started = {
        key: one for key, one in host.actor._zygotes._started.items() if one.exception() is None
    }
    await host.end()


@pytest.mark.parametrize("refuses", ["record", "fork"])
async def test_host_that_cannot_start_a_process_says_so_and_leaves_none(
    own_host: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    host = Host()
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: object) -> None:
        raise error

    async def fail_later(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*((ProcessLedger, "record", fail) if refuses == "record" else (Zygote, "fork", fail_later)))
        before: set[str] | None = None
        for _ in range(3):
            unfit = await host.start()
            assert isinstance(unfit, Unfit)
            assert unfit.why == "no task can start there: [Errno 28] No space left on device"
            before = before or set(os.listdir("/proc/self/fd"))
        assert set(os.listdir("/proc/self/fd")) == before
    (zygote,) = await host.zygotes()
    await until(lambda: not zygote.forked)
    await host.started()
    await host.end()


@pytest.mark.parametrize(("of_raylet", "seen"), [({}, None), ({"OMP_NUM_THREADS": "1"}, b"1")])
async def test_number_of_threads_that_ray_sets_for_the_host_is_not_the_tasks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_raylet: dict[str, str], seen: bytes | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(zygotes, "raylet_environment", lambda: of_raylet)
    host = Zygotes("cpu-1", lambda: ProcessLedger(tmp_path))
    zygote, _ = await host.ready(ProcessSpec(), None)
    assert zygote.tree is not None
    variables = dict(line.split(b"=", 1) for line in environ_of(zygote.tree.root) if line)
    await ended(zygote)
    assert variables.get(b"OMP_NUM_THREADS") == seen


async def test_idle_zygotes_beyond_a_few_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(zygotes, "MOST_IDLE", 1)
    assert MOST_IDLE > 1
    host, made = Zygotes("cpu-1", lambda: ProcessLedger(tmp_path)), []
    for number in range(3):
        spec = ProcessSpec({"env_vars": {"LC_ALL": f"C.{number}"}})
        made.append((await host.ready(spec, None))[0])
        await host.record(made[-1])
        if number == 0:
            process, zygote, _ = await host.fork(spec, None)
            assert zygote is made[0]
    assert [zygote.ended for zygote in made] == [False, False, False], "the first has a fork, two are idle or in use"
    process.close()
    await until(lambda: not made[0].forked)
    await host.ready(ProcessSpec({"env_vars": {"LC_ALL": "C.3"}}), None)
    assert [zygote.ended for zygote in made] == [True, True, False]
    for starting in host._started.values():
        await ended((await starting)[0])


async def test_zygote_that_hangs_in_an_import_ends_when_its_host_is_killed(tmp_path: Path) -> None:
    """It does not see the end of its connection. The reaper finds it in the host's record."""
    (tmp_path / "hangs.py").write_text("import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)")
    ledger = ProcessLedger(tmp_path)
    host = Zygotes("cpu-1", lambda: ledger)
    host.may_record()
    spec = ProcessSpec({"env_vars": {"PYTHONPATH": str(tmp_path)}}, preload=("hangs",))
    starting = asyncio.ensure_future(host.ready(spec, None))
    await until(lambda: len(list(ledger._entries([]))) == 1 or starting.done())
    (tree,) = ledger._entries([])
    await until(lambda: any(b"sleep" in read_of_process(one.pid, "cmdline") for one in tree.search()))
    await asyncio.to_thread(end_what_is_left, ledger, ProcessIdentity.of_this_process())
    assert not any(one.runs() for one in tree.search())
    with pytest.raises(ZygoteFailed, match="has ended"):
        await starting


# -- in an environment of Ray's ----------------------------------------------------------------------------------------


class Environment:
    """Stands for an `EnvironmentActor` in a process of another environment."""

    def __init__(self, start: Callable[[ZygoteStart, str], Any]) -> None:
        self._start = start
        self.versions, self.start = (SimpleNamespace(remote=one) for one in (self._versions, self._started))

    async def _versions(self) -> dict[str, Any]:
        return versions_here()

    async def _started(self, how: ZygoteStart, address: str) -> Any:
        return await asyncio.to_thread(self._start, how, address)


async def test_zygote_of_an_environment_is_taken_from_its_actor(tmp_path: Path) -> None:
    (tmp_path / "of_environment.py").write_text("")

    def start(how: ZygoteStart, address: str) -> Any:
        assert how.variables == {}, "Ray has set them"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.connect(address)
            how.start(channel)
        return [str(tmp_path), *sys.path], {"working_dir": "gcs://a.zip"}

    host = Zygotes("cpu-1", lambda: ProcessLedger(tmp_path))
    spec = ProcessSpec({"pip": ["x"], "env_vars": {"LC_ALL": "C"}}, preload=("of_environment",))
    zygote, cluster = await host.ready(spec, cast(Any, Environment(start)))
    assert cluster.runtime_env == {"working_dir": "gcs://a.zip"}
    assert (await run_in(zygote, tmp_path, lambda: "of_environment" in sys.modules)).result is True
    await ended(zygote)


async def test_environment_that_dies_fails_the_start(tmp_path: Path) -> None:
    def start(how: ZygoteStart, address: str) -> Any:
        raise ActorDiedError

    host = Zygotes("cpu-1", lambda: ProcessLedger(tmp_path))
    with pytest.raises(ZygoteFailed, match="can't be started: The actor died"):
        await host.ready(ProcessSpec({"pip": ["x"]}), cast(Any, Environment(start)))


async def test_environment_that_ends_with_its_job_costs_no_other_job(tmp_path: Path) -> None:
    """Both wait for one start. The job whose actor was to start the zygote is cancelled."""
    began, ends = threading.Event(), threading.Event()

    def dies(how: ZygoteStart, address: str) -> Any:
        began.set()
        ends.wait(60.0)
        raise ActorDiedError

    def starts(how: ZygoteStart, address: str) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.connect(address)
            how.start(channel)
        return sys.path, {}

    host, spec = Zygotes("cpu-1", lambda: ProcessLedger(tmp_path)), ProcessSpec({"pip": ["x"]})
    first = asyncio.ensure_future(host.ready(spec, cast(Any, Environment(dies))))
    await until(began.is_set)
    second = asyncio.ensure_future(host.ready(spec, cast(Any, Environment(starts))))
    await asyncio.sleep(0.1)
    ends.set()
    with pytest.raises(ZygoteFailed):
        await first
    zygote, _ = await second
    await ended(zygote)


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.3])
async def test_place_given_back_while_its_process_starts_leaves_none(own_host: Path, pause_s: float) -> None:
    """Its job was cancelled. Nobody else would ever end the process, which waits for a task on a shared host."""
    host = Host()
    pid = await host.started()
    starting = asyncio.ensure_future(host.start())
    await asyncio.sleep(pause_s)
    await host.actor.teardown("cpu-1")
    ready = await starting
    assert isinstance(ready, HostReady) or type(ready) is Unreachable
    assert not host.actor._watches
    assert not host.actor._starting
    (zygote,) = await host.zygotes()
    await until(lambda: not zygote.forked)
    assert pid not in host.actor._places
    await host.end()
