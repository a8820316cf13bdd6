"""The evidence that a host finds, on a real disk and about real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InspectionFailedError
from iris_ray.evidence import files
from iris_ray.evidence.dumps import remembered
from iris_ray.evidence.files import ChipSample, Place, core_dumps, keep_crash, keep_hang, libtpu_logs, look_at
from iris_ray.inspection.chip_metrics import DUTY_CYCLE, MEMORY_TOTAL, MEMORY_USED, PORTS_VARIABLE
from iris_ray.inspection.host import NOT_PERMITTED
from iris_ray.logs.files import AttemptLog, LogWriter, logs_directory
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
from tests.support.core_dumps import core_dump
from tests.support.libtpu_metrics import metrics_service

ATTEMPT = TaskAttemptId("train-1a2b3c4d", 3, 2)
PID = 4711


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Where process `PID` has left a log of libtpu and a core dump, among files of others."""
    logs, cores = tmp_path / "tpu_logs", tmp_path / "cores"
    logs.mkdir()
    cores.mkdir()
    (logs / f"tpu_driver.host.root.log.FATAL.20261130-040000.{PID}").write_text("Check failed: x\nHF_TOKEN=hf_abc\n")
    (logs / "tpu_driver.host.root.log.FATAL.20261130-040000.5").write_text("of another process")
    (cores / f"core.{PID}").write_bytes(core_dump(36_000))
    (cores / "core.5").write_bytes(b"of another process")
    (tmp_path / "core_pattern").write_text(f"{cores}/core.%p\n")
    (tmp_path / "core_uses_pid").write_text("0\n")
    monkeypatch.setattr(files, "CORE_PATTERN", tmp_path / "core_pattern")
    monkeypatch.setattr(files, "CORE_USES_PID", tmp_path / "core_uses_pid")
    return Place(str(tmp_path), str(logs))


def kept(host: Path) -> dict[str, str]:
    directory = OutputDirectory.of(outputs_directory(host), ATTEMPT).path / "iris-ray"
    return {path.name: path.read_text() for path in directory.iterdir()} if directory.is_dir() else {}


def test_crash_leaves_the_end_of_libtpus_logs_and_the_names_of_core_dumps(place: Place, tmp_path: Path) -> None:
    said = keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), place)
    assert "a core dump of 0 MB" in said
    assert f"iris-ray cp --output {ATTEMPT.job_id}/3:iris-ray . --attempt 2" in said
    found = kept(tmp_path)
    assert set(found) == {"libtpu.txt", "core-dumps.txt"}
    assert "Check failed: x" in found["libtpu.txt"]
    assert "hf_abc" not in found["libtpu.txt"]
    assert "of another process" not in found["libtpu.txt"]
    assert found["core-dumps.txt"].split() == ["36,000", "bytes", repr(f"{tmp_path}/cores/core.{PID}")]


def test_core_dumps_are_remembered_if_their_names_tell_the_process(place: Place, tmp_path: Path) -> None:
    keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), place)
    assert [dump.path for dump in remembered(tmp_path)] == [f"{tmp_path}/cores/core.{PID}"]
    (tmp_path / "cores" / f"core.{PID}").write_bytes(b"something else")
    assert list(remembered(tmp_path)) == []
    (tmp_path / "core_pattern").write_text(f"{tmp_path}/cores/core.%e\n")
    assert "and 1 more" in keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), place)
    assert list(remembered(tmp_path)) == []


def test_all_core_dumps_of_a_crash_are_remembered_and_the_newest_are_named(place: Place, tmp_path: Path) -> None:
    """As of a program that has crashed with all the processes that it had started."""
    pids = range(1000, 1100)
    for pid in pids:
        (tmp_path / "cores" / f"core.{pid}").write_bytes(core_dump())
    assert f"and {files.MOST_DUMPS - 1} more" in keep_crash(tmp_path, ATTEMPT, pids, time.time(), place)
    assert len(kept(tmp_path)["core-dumps.txt"].splitlines()) == files.MOST_DUMPS
    assert len(list(remembered(tmp_path))) == len(pids)


def test_crash_without_such_files_leaves_nothing(place: Place, tmp_path: Path) -> None:
    assert keep_crash(tmp_path, ATTEMPT, {99}, time.time(), place) == ""
    assert keep_crash(tmp_path, ATTEMPT, {PID}, time.time() + 1000.0, place) == "", "of an earlier process"
    assert keep_crash(tmp_path, ATTEMPT, {99}, time.time(), Place(None, f"{tmp_path}/nothing")) == ""
    assert kept(tmp_path) == {}


def test_crash_is_told_even_if_its_files_can_not_be_kept(place: Place, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("in the way")
    assert keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), place) == (
        f"see a core dump of 0 MB ({tmp_path}/cores/core.{PID} on its host)"
    )


def test_evidence_is_bounded(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOG_BYTES", 1000)
    for number in range(20):
        name = f"tpu_driver.host.root.log.INFO.20261130-0400{number:02d}.{PID}"
        Path(place.tpu_logs, name).write_bytes(b"x" * 100_000)
    assert len(libtpu_logs(place, {PID}, time.time())) == files.MOST_LOGS
    keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), place)
    assert len(kept(tmp_path)["libtpu.txt"]) < files.MOST_LOGS * 1200


def test_secret_whose_name_is_cut_off_is_left_out(place: Place, tmp_path: Path) -> None:
    path = Path(place.tpu_logs, f"tpu_driver.host.root.log.INFO.20261130-040000.{PID}")
    path.write_text("HF_TOKEN=abcdefgh\n" + "x\n" * ((files.LOG_BYTES - len("efgh\n")) // 2))
    log = AttemptLog(logs_directory(tmp_path), *ATTEMPT)
    writer = LogWriter(log)
    writer.write(b"HF_TOKEN=abcdefgh\n" + b"x\n" * ((files.OUTPUT_BYTES - len("efgh\n")) // 2))
    writer.close()
    keep_hang(tmp_path, ATTEMPT, [PID], time.time(), place, [])
    found = kept(tmp_path)
    assert "x\n" in found["libtpu.txt"]
    assert "efgh" not in found["libtpu.txt"] + found["output.txt"]


def test_secrets_of_the_task_are_masked_without_their_names(place: Place, tmp_path: Path) -> None:
    where = Place.of({"TPU_LOG_DIR": place.tpu_logs, "HF_TOKEN": "abcdefgh"})
    assert "abcdefgh" not in repr(where)
    Path(place.tpu_logs, f"tpu_driver.host.root.log.INFO.20261130-040001.{PID}").write_text("login as abcdefgh\n")
    keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), where)
    assert "login as ***" in kept(tmp_path)["libtpu.txt"]


def test_line_without_end_stops_no_other_thread(place: Place, tmp_path: Path) -> None:
    """Masking a megabyte without a space took hours, in which the host answered nobody."""
    Path(place.tpu_logs, f"tpu_driver.host.root.log.INFO.20261130-040002.{PID}").write_text("token" * 50_000)
    began = time.process_time()
    keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), place)
    assert time.process_time() - began < 10.0


def test_directory_of_logs_is_relative_to_that_of_the_task(tmp_path: Path) -> None:
    assert Place.of({"TPU_LOG_DIR": "logs"}, str(tmp_path)).tpu_logs == f"{tmp_path}/logs"
    assert Place.of({"TPU_LOG_DIR": "/logs"}, str(tmp_path)).tpu_logs == "/logs"


def test_stacks_that_py_spy_may_not_read_are_those_that_the_task_has_written(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(arguments: list[str], timeout_s: float) -> str:
        raise InspectionFailedError(NOT_PERMITTED)

    monkeypatch.setattr("iris_ray.inspection.host.py_spy", refuses)
    stacks = TaskFiles.of_process(tmp_path, PID).stacks
    stacks.parent.mkdir()
    stacks.write_text('Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in waits\n')
    keep_hang(tmp_path, ATTEMPT, [PID, 99], time.time(), place, [])
    text = kept(tmp_path)["stacks.txt"]
    assert NOT_PERMITTED in text
    assert "line 3 in waits" in text
    assert "Process 99: " in text


def test_many_processes_take_no_longer_than_their_pool_waits(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(arguments: list[str], timeout_s: float) -> str:
        time.sleep(min(0.2, timeout_s))
        return f"stacks of {arguments[-1]}"

    monkeypatch.setattr("iris_ray.inspection.host.py_spy", slow)
    monkeypatch.setattr(files, "ALL_STACKS_S", 0.5)
    keep_hang(tmp_path, ATTEMPT, list(range(PID, PID + 16)), time.time(), place, [])
    text = kept(tmp_path)["stacks.txt"]
    assert f"stacks of {PID}" in text
    assert f"Process {PID + 15}: no time was left" in text


def test_links_and_fifos_are_no_evidence(place: Place, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("another's")
    logs = Path(place.tpu_logs)
    (logs / f"tpu_driver.host.root.log.INFO.20261130-040001.{PID}").symlink_to(tmp_path / "secret")
    os.mkfifo(logs / f"tpu_driver.host.root.log.INFO.20261130-040002.{PID}")
    (tmp_path / "cores" / f"x.{PID}").symlink_to(tmp_path / "secret")
    assert len(libtpu_logs(place, {PID}, time.time())) == 1
    assert [Path(one.path).name for one in core_dumps(place, {PID}, time.time())] == [f"core.{PID}"]


def test_program_that_has_links_in_the_way_loses_no_other_file(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    directory = OutputDirectory.of(outputs_directory(tmp_path), ATTEMPT)
    directory.create()
    (directory.path / "iris-ray").mkdir()
    (directory.path / "iris-ray" / "libtpu.txt").symlink_to(other)
    os.link(other, directory.path / "iris-ray" / "core-dumps.txt")
    keep_crash(tmp_path, ATTEMPT, {PID}, time.time(), place)
    assert other.read_text() == "precious"
    assert "Check failed" in kept(tmp_path)["libtpu.txt"]


WAITS = """
import threading, time
from iris_ray.sessions.surroundings import keep_surroundings
keep_surroundings()
def pumps(): time.sleep(1000)
threading.Thread(target=pumps, daemon=True).start()
def waits_for_the_others(): time.sleep(1000)
print(flush=True)
waits_for_the_others()
"""


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    """A task's process with two threads."""
    with metrics_service({DUTY_CYCLE: {0: 0.0}, MEMORY_USED: {0: 5}, MEMORY_TOTAL: {0: 10}}) as port:
        environ = os.environ | {PORTS_VARIABLE: str(port), "TPU_LOG_DIR": "/logs of libtpu"}
        with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
            process.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="py-spy may look into processes of root's children only")
def test_hang_leaves_all_threads_the_last_output_and_the_chips_of_before(
    place: Place, tmp_path: Path, waiting: subprocess.Popen[str]
) -> None:
    log = AttemptLog(logs_directory(tmp_path), *ATTEMPT)
    writer = LogWriter(log)
    writer.write(b"MEGASCALE waits\n" + b"step\n" * 1000)
    writer.close()
    samples = [ChipSample(at, [{"device": 0, "duty_cycle": 0.0}]) for at in (1.0, 2.0)]
    keep_hang(tmp_path, ATTEMPT, [waiting.pid, PID], time.time(), place, samples)
    found = kept(tmp_path)
    assert set(found) == {"stacks.txt", "output.txt", "libtpu.txt", "chips.jsonl"}
    assert "pumps" in found["stacks.txt"]
    assert "waits_for_the_others" in found["stacks.txt"]
    assert f"Process {PID}: " in found["stacks.txt"], "a process that has just ended"
    assert found["output.txt"].splitlines() == ["MEGASCALE waits", *["step"] * 200]
    assert "Check failed" in found["libtpu.txt"]
    assert [json.loads(line)["at"] for line in found["chips.jsonl"].splitlines()] == [1.0, 2.0]


def test_running_tasks_tell_where_they_leave_files_and_how_they_use_their_chips(
    waiting: subprocess.Popen[str],
) -> None:
    places, sample = look_at([waiting.pid], 7.0)
    assert places == {waiting.pid: Place(os.getcwd(), "/logs of libtpu")}
    assert sample == ChipSample(7.0, [{"device": 0, "duty_cycle": 0.0, "memory_used": 5, "memory_total": 10}])
    assert look_at([os.getpid()], 7.0) == ({}, None), "it keeps no copy of its variables"


def test_damaged_copy_of_the_variables_is_none() -> None:
    """It must not stop the service, which keeps evidence of other tasks as well."""
    code = """
import json, os, time
os.write(os.memfd_create("iris-ray-surroundings"), json.dumps({"environ": ["x"], "python": "p"}).encode())
print(flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert look_at([process.pid], 7.0) == ({}, None)
        process.kill()


def test_the_real_libtpu_names_its_logs_as_we_expect(tmp_path: Path) -> None:
    if find_spec("libtpu") is None:
        pytest.skip("needs libtpu: pip install libtpu")
    code = "import jax, os, sys\ntry: jax.devices()\nexcept RuntimeError: print(os.getpid())"
    environ = os.environ | {"JAX_PLATFORMS": "tpu", "TPU_LOG_DIR": str(tmp_path), "TPU_SKIP_MDS_QUERY": "1"}
    began_at = time.time()
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    place = Place.of({"TPU_LOG_DIR": str(tmp_path)})
    assert libtpu_logs(place, {int(done.stdout)}, began_at)
    assert libtpu_logs(place, {1}, began_at) == []
