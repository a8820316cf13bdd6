"""The cleaning of one machine: real directories, sockets and processes."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.cleaning.core import DAY_S, ClockReading, Limits
from iris_ray.cleaning.disk import (
    CORE_DUMPS,
    KEEP_ALL,
    OURS,
    OUTPUTS,
    SESSIONS,
    TPU_LOGS,
    WORKER_LOGS,
    Cleaned,
    Places,
    clean,
    read_clock,
)
from iris_ray.evidence.dumps import remember
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
from tests.support.core_dumps import core_dump

LIMITS = Limits(14, None)
OLD = 20
LOG = "tpu_driver.vm.root.log.INFO.20261101-002050.15720"
SESSION = "session_2026-11-01_00-21-14_974870_16410"
WORKER = "worker-0123456789abcdef-01000000-4711.out"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(
        tmp_path / "tpu_logs", tmp_path / "ray", tmp_path / "ray" / SESSION.replace("16410", "1"), tmp_path / "own"
    )
    for path in (tmp_path / "tpu_logs", found.session / "logs" / "old", found.own):
        path.mkdir(parents=True)
    return found


def written(path: Path, days: float = OLD, size: int = 5000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    aged(path, days)
    return path


def aged(path: Path, days: float = OLD) -> None:
    at = time.time() - days * DAY_S
    os.utime(path, (at, at), follow_symlinks=False)


def dead_session(places: Places, name: str = SESSION, days: float = OLD) -> Path:
    """A session whose processes have left sockets."""
    path = places.sessions / name
    written(path / "logs" / "raylet.out", days)
    (path / "sockets").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        directory = os.open(path / "sockets", os.O_RDONLY)
        left.bind(f"/proc/self/fd/{directory}/raylet")  # the path itself is too long
        os.close(directory)
    aged(path / "sockets" / "raylet", days)
    return path


@pytest.fixture
def sleeping() -> Iterator[Callable[..., None]]:
    """Starts processes that run ``code``, and waits until each says so."""
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str, *arguments: str, cwd: Path | None = None) -> None:
        code = f"{code}\nprint(flush=True); import time; time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, cwd=cwd)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_old_logs_of_libtpu_go_and_all_else_stays(places: Places) -> None:
    assert places.tpu_logs is not None
    old, new = written(places.tpu_logs / LOG), written(places.tpu_logs / f"{LOG}0", days=1)
    foreign, deeper = written(places.tpu_logs / "notes.txt"), written(places.tpu_logs / "more" / LOG)
    link = places.tpu_logs / f"{LOG}1"
    link.symlink_to(foreign)
    aged(link)
    cleaned = clean(places, LIMITS)
    assert not old.exists()
    assert all(path.exists() for path in (new, foreign, deeper, link))
    assert (cleaned.files, cleaned.problems) == ({TPU_LOGS: 1}, [])
    assert cleaned.bytes[TPU_LOGS] >= 5000


def test_a_log_that_a_process_has_open_stays_until_it_ends(places: Places) -> None:
    assert places.tpu_logs is not None
    log = written(places.tpu_logs / LOG)
    with log.open("a"):
        assert clean(places, LIMITS) == Cleaned({}, {}, [])
    assert clean(places, LIMITS).files == {TPU_LOGS: 1}


def test_a_log_that_is_only_read_goes(places: Places) -> None:
    """Ray's log monitor has logs open for as long as it runs."""
    assert places.tpu_logs is not None
    with written(places.tpu_logs / LOG).open():
        assert clean(places, LIMITS).files == {TPU_LOGS: 1}


def test_logs_behind_a_link_stay(places: Places, tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "elsewhere" / LOG)
    link = tmp_path / "link"
    link.symlink_to(elsewhere.parent)
    clean(Places(link, link, places.session, places.own), LIMITS)
    assert elsewhere.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_files_of_other_users_stay(places: Places) -> None:
    assert places.tpu_logs is not None
    log, session = written(places.tpu_logs / LOG), dead_session(places)
    os.chown(log, 12345, 12345)
    os.chown(session, 12345, 12345)
    assert clean(places, LIMITS).files == {}


def test_a_dead_session_goes_whole_and_the_living_one_stays(places: Places, tmp_path: Path) -> None:
    dead = dead_session(places)
    outside = written(tmp_path / "outside")
    (dead / "link").symlink_to(outside.parent)
    latest = places.sessions / "session_latest"
    latest.symlink_to(dead)
    written(places.session / "logs" / "raylet.out")
    other = written(places.sessions / "mine" / "notes")
    aged(dead / "link")
    cleaned = clean(places, LIMITS)
    assert cleaned.files == {SESSIONS: 1}
    assert not dead.exists()
    assert all(path.exists() for path in (outside, places.session / "logs" / "raylet.out", other))
    assert latest.is_symlink()


def test_a_new_dead_session_stays(places: Places) -> None:
    session = dead_session(places, days=3)
    clean(places, LIMITS)
    assert session.exists()


def test_a_session_on_whose_socket_somebody_listens_stays(places: Places, sleeping: Callable[..., None]) -> None:
    session = dead_session(places)
    listens = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('store'); s.listen()"
    sleeping(f"{listens}; import os; os.chdir('/')", cwd=session / "sockets")
    aged(session / "sockets" / "store")
    assert clean(places, LIMITS).files == {}


def test_a_session_in_a_command_line_stays(places: Places, sleeping: Callable[..., None]) -> None:
    session = dead_session(places)
    sleeping("", f"--store_socket_name={session}/sockets/plasma_store")
    assert clean(places, LIMITS).files == {}
    assert session.exists()


def test_a_session_in_which_a_process_runs_stays(places: Places, sleeping: Callable[..., None]) -> None:
    session = dead_session(places)
    sleeping("", cwd=session / "logs")
    assert clean(places, LIMITS).files == {}


def test_a_session_with_an_open_file_stays(places: Places, sleeping: Callable[..., None]) -> None:
    session = dead_session(places)
    sleeping("import os; held = open('logs/raylet.out'); os.chdir('/')", cwd=session)
    assert clean(places, LIMITS).files == {}


def test_an_interrupted_removal_goes_on(places: Places) -> None:
    session = dead_session(places)
    written(session / "runtime_resources" / "pip" / "a")
    (session / "logs" / "raylet.out").unlink()  # the directory has changed just now
    assert clean(places, LIMITS).files == {SESSIONS: 1}


def test_logs_of_workers_that_have_ended_go_from_the_living_session(places: Places) -> None:
    logs = places.session / "logs"
    gone = [
        written(logs / WORKER),
        written(logs / "python-core-worker-0123abcd_4711.log"),
        written(logs / "old" / WORKER),
    ]
    kept = [
        written(logs / "gcs_server.out"),
        written(logs / f"{WORKER}.err", days=OLD),
        written(logs / WORKER.replace("4711", "1"), days=1),
    ]
    with written(logs / WORKER.replace("4711", "2")).open("a") as held:
        assert clean(places, LIMITS).files == {WORKER_LOGS: 3}
        assert Path(held.name).exists()
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)


def test_beyond_the_size_the_oldest_go(places: Places) -> None:
    assert places.tpu_logs is not None
    logs = [written(places.tpu_logs / f"{LOG}{n}", days=10 - n, size=100_000) for n in range(5)]
    assert clean(places, Limits(14, 300_000)).files == {TPU_LOGS: 3}
    assert [log.exists() for log in logs] == [False, False, False, True, True]


def dumped(places: Places, pid: int, days: float, size: int = 100_000) -> Path:
    """A core dump that its host has remembered."""
    path = written(places.own.parent / "cores" / f"core.{pid}", days)
    path.write_bytes(core_dump(size))
    aged(path, days)
    remember(places.own, [str(path)])
    return path


def test_core_dumps_of_tasks_go_by_age_and_size_but_not_the_newest(places: Places) -> None:
    too_old, older, old, newest = (dumped(places, pid, days) for pid, days in enumerate((20, 10, 9, 8)))
    foreign = written(older.parent / "core.77")
    log = written(places.tpu_logs / LOG, days=10) if places.tpu_logs else None
    assert clean(places, LIMITS).files == {CORE_DUMPS: 1}
    assert [path.exists() for path in (too_old, older, old)] == [False, True, True]
    assert clean(places, Limits(14, 50_000)).files == {CORE_DUMPS: 2}
    assert [path.exists() for path in (older, old, newest, foreign)] == [False, False, True, True]
    assert log is not None  # dumps do not count as logs
    assert log.exists()
    assert clean(places, Limits(7, None)).files == {CORE_DUMPS: 1, TPU_LOGS: 1}
    assert list((places.own / "core-dumps").iterdir()) != []
    clean(places, LIMITS)
    assert list((places.own / "core-dumps").iterdir()) == []


def test_newest_core_dump_goes_from_a_disk_that_is_nearly_full(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newest = dumped(places, 1, days=2), dumped(places, 2, days=1)
    real = os.statvfs(places.own)
    fields = list(real)
    fields[4] = real.f_blocks // 10 - (150 << 10) // real.f_frsize  # f_bavail: more than one of them is too little
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert clean(places, Limits(14, 1 << 40)).files == {CORE_DUMPS: 2}
    assert not older.exists()
    assert not newest.exists()


def test_newest_core_dump_beyond_the_limit_goes_from_a_disk_that_lacks_less_than_it_takes(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = dumped(places, 1, days=1)
    assert clean(places, Limits(14, 50_000)).files == {}
    real = os.statvfs(places.own)
    fields = list(real)
    fields[4] = real.f_blocks // 10 - (8 << 10) // real.f_frsize  # f_bavail: less than half of the dump is lacking
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    assert clean(places, Limits(14, 50_000)).files == {CORE_DUMPS: 1}
    assert not newest.exists()


def test_file_in_the_place_of_a_core_dump_stays(places: Places, tmp_path: Path) -> None:
    changed, replaced, linked = (dumped(places, pid, OLD) for pid in range(3))
    changed.write_bytes(b"mine now")
    aged(changed)
    replaced.unlink()
    written(replaced.parent / "other")
    (replaced.parent / "other").rename(replaced)
    linked.rename(tmp_path / "kept")
    linked.symlink_to(tmp_path / "kept")
    assert clean(places, LIMITS).files == {}
    assert all(path.exists() for path in (changed, replaced, linked, tmp_path / "kept"))


@pytest.mark.parametrize("place", ["core-dumps", "tpu_logs"])
def test_disk_that_fails_in_one_place_stops_no_other(
    places: Places, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert places.tpu_logs is not None
    dump, log, session = dumped(places, 1, OLD), written(places.tpu_logs / LOG), dead_session(places)
    broken = {"core-dumps": places.own / "core-dumps", "tpu_logs": places.tpu_logs}[place]
    listdir = os.listdir

    def fails(path: Any = ".") -> list[str]:
        where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        if where == str(broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", fails)
    cleaned = clean(places, LIMITS)
    assert [dump.exists(), log.exists(), session.exists()] == [place == "core-dumps", place == "tpu_logs", False]
    (problem,) = cleaned.problems
    assert problem.endswith("Input/output error")


def test_a_clock_that_jumps_ahead_removes_nothing(places: Places) -> None:
    assert places.tpu_logs is not None
    log, now = written(places.tpu_logs / LOG, days=1), read_clock()
    clean(places, LIMITS, now)
    ahead = type(now)(now.boot, now.wall + 400 * DAY_S, now.uptime + 60)
    assert clean(places, Limits(14, 0), ahead).files == {}
    assert log.exists()


def test_a_disk_that_takes_nothing_more_is_cleaned(places: Places) -> None:
    assert places.tpu_logs is not None
    log = written(places.tpu_logs / LOG)
    (places.own / "clock.json").mkdir()  # the reading of the clock can't be written
    assert clean(places, LIMITS).files == {TPU_LOGS: 1}
    assert not log.exists()


def test_directories_of_jobs_go_unless_a_process_has_locked_them(places: Places, sleeping: Callable[..., None]) -> None:
    local = LocalDirectories(places.own, None)
    abandoned = places.own / "jobs" / "abandoned"
    for path in (abandoned, places.own / "jobs" / "locked"):
        written(path / "files" / "shard")
        aged(path)
    sleeping(
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_SH)",
        str(places.own / "jobs" / "locked"),
    )
    cleaned = clean(places, LIMITS)
    assert [directory.path.name for directory in local.jobs()] == ["locked"]
    assert cleaned.files[OURS] >= 1


def test_nothing_goes_if_it_is_off(places: Places) -> None:
    assert places.tpu_logs is not None
    log = written(places.tpu_logs / LOG)
    assert clean(places, Limits(None, None)) == Cleaned({}, {}, [])
    assert log.exists()


def test_no_places_are_no_problem(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    (tmp_path / "own").mkdir()
    assert clean(Places(nowhere, nowhere, nowhere / "session", tmp_path / "own"), LIMITS).problems == []


# -- output directories --------------------------------------------------------------------------------------------


def output(places: Places, index: int, kilobytes: int = 100) -> OutputDirectory:
    made = OutputDirectory.of(outputs_directory(places.own), TaskAttemptId("job", index, 1))
    made.create()
    if kilobytes:
        (made.path / "x").write_bytes(os.urandom(kilobytes << 10))
    return made


def later(days: float) -> ClockReading:
    """The clocks after some days; no program can set the time by which output directories age."""
    now = read_clock()
    return ClockReading(now.boot, now.wall + days * DAY_S, now.uptime + days * DAY_S)


def test_output_directories_of_ended_attempts_go_after_their_days(places: Places) -> None:
    ended, unused, runs = output(places, 0), output(places, 1, kilobytes=0), output(places, 2)
    files = TaskFiles.of_process(places.own, os.getpid())
    StartedTask("job", 2, 1, 1, "label").write(files)
    kept = clean(places, KEEP_ALL, later(6.9), of_outputs=Limits(7, None))
    assert kept.files == {}
    assert ended.path.exists()
    assert not unused.path.exists()
    gone = clean(places, KEEP_ALL, later(7.1), of_outputs=Limits(7, None))
    assert gone.files == {OUTPUTS: 1}
    assert gone.bytes[OUTPUTS] >= 100 << 10
    assert not ended.path.exists()
    assert runs.path.exists()


def test_oldest_output_directories_go_beyond_the_size_of_the_host(places: Places) -> None:
    outputs = []
    for index in range(4):
        outputs.append(output(places, index))
        time.sleep(0.02)
    clean(places, KEEP_ALL, later(0.01), of_outputs=Limits(None, 250 << 10))
    assert all(one.path.exists() for one in outputs), "nothing that was changed within the last hour goes"
    clean(places, KEEP_ALL, later(0.1), of_outputs=Limits(None, 250 << 10))
    assert [one.path.exists() for one in outputs] == [False, False, True, True]


def test_output_directories_leave_a_tenth_of_the_disk_free(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = output(places, 0), output(places, 1)
    real = os.statvfs(places.own)
    fields = list(real)
    fields[4] = real.f_blocks // 10 - (50 << 10) // real.f_frsize  # f_bavail: 50 kB too little
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    clean(places, KEEP_ALL, later(0.1), of_outputs=Limits(None, 1 << 40))
    assert [first.path.exists(), second.path.exists()] == [False, True]


def test_limits_of_output_directories_and_of_other_files_are_apart(places: Places) -> None:
    assert places.tpu_logs is not None
    kept, log = output(places, 0), written(places.tpu_logs / LOG)
    clean(places, KEEP_ALL, later(8), of_outputs=Limits(30, None))
    assert log.exists()
    clean(places, Limits(14, None), later(8))
    assert not log.exists()
    assert kept.path.exists()
