"""Which files and lines are evidence, and that no secret is among them."""

import tracemalloc

import pytest

from iris_ray.evidence.core import (
    LAST_LINES,
    CoreDump,
    crash_in_words,
    dump_directories,
    evidence_lines,
    is_dump,
    is_log_of_libtpu,
)
from iris_ray.model.lifecycle import TaskAttemptId

ATTEMPT = TaskAttemptId("train-1a2b3c4d", 3, 2)


def test_logs_of_libtpu_are_known_by_their_process() -> None:
    assert is_log_of_libtpu("tpu_driver.t1v-n-0.root.log.FATAL.20261130-040000.4711", {4711})
    assert not is_log_of_libtpu("tpu_driver.t1v-n-0.root.log.FATAL.20261130-040000.4711", {711, 47})
    assert not is_log_of_libtpu("tpu_driver.INFO", {4711})


@pytest.mark.parametrize(
    ("pattern", "directory", "places"),
    [
        ("core", "/home/ann", ("/home/ann",)),
        ("core", None, ()),
        ("dumps/core.%p", "/home/ann", ("/home/ann/dumps",)),
        ("/cores/core.%e.%p", None, ("/cores",)),
        ("/cores/%h/core", "/home/ann", ()),
        ("/core.%p", None, ("/",)),
    ],
)
def test_core_dumps_are_where_the_kernel_puts_them(pattern: str, directory: str | None, places: tuple[str]) -> None:
    assert dump_directories(pattern, directory) == places


def test_core_dumps_that_a_program_takes_are_where_it_puts_them() -> None:
    assert "/var/crash" in dump_directories("|/usr/share/apport/apport -p%p -s%s", None)
    assert "/var/lib/systemd/coredump" in dump_directories("|/usr/lib/systemd/systemd-coredump %P", "/home/ann")


@pytest.mark.parametrize(
    ("pattern", "uses_pid", "name", "is_one"),
    [
        ("core", False, "core", True),
        ("core", False, "core.4711", False),
        ("core", True, "core.4711", True),
        ("core", False, "checkpoint-4711.npz", False),
        ("core", True, "checkpoint-4711.npz", False),
        ("/cores/core.%e.%p", True, "core.python 3.x.4711", True),
        ("/cores/core.%e.%p", True, "core.python.47110", False),
        ("/cores/core.%e.%p", True, "core.python.4711.txt", False),
        ("/cores/%%.%u.%p.%t", False, "%.1000.4711.1764475200", True),
        ("/cores/%%.%u.%p.%t", False, "%.4711.1000.4711", False),
        ("/cores/core.%e.%h", False, "core.python.host", True),
        ("core.%", False, "core.", True),
        (
            "|/systemd-coredump %P",
            False,
            "core.python3.1000.0123456789abcdef0123456789abcdef.4711.1764475200.zst",
            True,
        ),
        ("|/systemd %P", False, "core.python3.4711.0123456789abcdef0123456789abcdef.11.1764475200.zst", False),
        ("|/apport -p%p", False, "_usr_bin_python3.11.0.crash", True),
        ("|/apport -p%p", False, "4711.txt", False),
    ],
)
def test_core_dumps_have_the_names_that_the_kernel_gives(pattern: str, uses_pid: bool, name: str, is_one: bool) -> None:
    assert is_dump(name, {4711}, pattern, uses_pid) is is_one


def test_lines_of_the_runtime_are_kept_beyond_the_last_ones() -> None:
    chatter = b"".join(b"step %d\n" % number for number in range(3 * LAST_LINES))
    lines = evidence_lines(b"MEGASCALE hang_detected on slice 1\n" + chatter).splitlines()
    assert lines[0] == b"MEGASCALE hang_detected on slice 1"
    assert lines[1:] == [b"step %d" % number for number in range(2 * LAST_LINES, 3 * LAST_LINES)]


def test_millions_of_lines_take_little_memory() -> None:
    tracemalloc.start()
    try:
        evidence_lines(b"ab\n" * 300_000)
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_crash_is_told_with_the_command_that_fetches_its_files() -> None:
    dumps = [CoreDump("/cores/core.1", 2_100_000_000), CoreDump("/cores/core.2", 1)]
    assert crash_in_words(ATTEMPT, True, dumps, are_kept=True) == (
        "see the last lines of libtpu's logs and a core dump of 2,100 MB (/cores/core.1 on its host, and 1 more):"
        " iris-ray cp --output train-1a2b3c4d/3:iris-ray . --attempt 2"
    )
    assert crash_in_words(ATTEMPT, True, dumps[1:], are_kept=False) == (
        "see a core dump of 0 MB (/cores/core.2 on its host)"
    )
    assert "\n" not in crash_in_words(ATTEMPT, True, [CoreDump("/cores/\n\x1b[2J", 1)], are_kept=True)
    assert "\x1b" not in crash_in_words(ATTEMPT, True, [CoreDump("/cores/\n\x1b[2J", 1)], are_kept=True)
    assert crash_in_words(ATTEMPT, True, [], are_kept=False) == ""
    assert crash_in_words(ATTEMPT, False, [], are_kept=True) == ""
