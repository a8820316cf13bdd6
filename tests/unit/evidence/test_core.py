"""Which files and lines are evidence, and that no secret is among them."""

import pytest

from iris_ray.evidence.core import (
    LAST_LINES,
    CoreDump,
    crash_in_words,
    dump_directories,
    evidence_lines,
    is_dump,
    is_log_of_libtpu,
    masked,
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
        ("/cores/%h/core", "/home/ann", ("/cores",)),
        ("/core.%p", None, ("/",)),
    ],
)
def test_core_dumps_are_where_the_kernel_puts_them(pattern: str, directory: str | None, places: tuple[str]) -> None:
    assert dump_directories(pattern, directory) == places


def test_core_dumps_that_a_program_takes_are_where_it_puts_them() -> None:
    assert "/var/crash" in dump_directories("|/usr/share/apport/apport -p%p -s%s", None)
    assert "/var/lib/systemd/coredump" in dump_directories("|/usr/lib/systemd/systemd-coredump %P", "/home/ann")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("core", True),
        ("core.4711", True),
        ("core.python3.1000.0123456789abcdef.4711.1764475200000000.zst", True),
        ("_usr_bin_python3.11.0.crash", True),
        ("core.47110", False),
        ("core.14711", False),
        ("train.py", False),
    ],
)
def test_core_dumps_are_known_by_their_process(name: str, is_one: bool) -> None:
    assert is_dump(name, {4711}) is is_one


def test_lines_of_the_runtime_are_kept_beyond_the_last_ones() -> None:
    chatter = b"".join(b"step %d\n" % number for number in range(3 * LAST_LINES))
    lines = evidence_lines(b"MEGASCALE hang_detected on slice 1\n" + chatter).splitlines()
    assert lines[0] == b"MEGASCALE hang_detected on slice 1"
    assert lines[1:] == [b"step %d" % number for number in range(2 * LAST_LINES, 3 * LAST_LINES)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("HF_TOKEN=hf_abc,next", "HF_TOKEN=***,next"),
        ('{"api_key": "abc def", "steps": 3}', '{"api_key": ***, "steps": 3}'),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("password: 'a b'", "password: ***"),
        ("gs://me:word@bucket/x", "gs://***@bucket/x"),
        ("tokens: 4,096, tokens_per_s=1.5e+4", "tokens: 4,096, tokens_per_s=1.5e+4"),
        ("F1130 04:00:00 tpu.cc:12] Check failed: a == b", "F1130 04:00:00 tpu.cc:12] Check failed: a == b"),
    ],
)
def test_secrets_are_masked(text: str, said: str) -> None:
    assert masked(text) == said


def test_crash_is_told_with_the_command_that_fetches_its_files() -> None:
    dumps = [CoreDump("/cores/core.1", 2_100_000_000), CoreDump("/cores/core.2", 1)]
    assert crash_in_words(ATTEMPT, True, dumps, are_kept=True) == (
        "see the last lines of libtpu's logs and a core dump of 2,100 MB (/cores/core.1 on its host, and 1 more):"
        " iris-ray cp --output train-1a2b3c4d/3:iris-ray . --attempt 2"
    )
    assert crash_in_words(ATTEMPT, True, dumps[1:], are_kept=False) == (
        "see a core dump of 0 MB (/cores/core.2 on its host)"
    )
    assert crash_in_words(ATTEMPT, True, [], are_kept=False) == ""
    assert crash_in_words(ATTEMPT, False, [], are_kept=True) == ""
