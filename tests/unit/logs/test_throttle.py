"""Which lines of a task reach the driver's terminal."""

import pytest

from iris_ray.logs.throttle import LONGEST_LINE, LineThrottle
from iris_ray.terminal import printable


def throttle(rate: float = 10.0, burst: float = 20.0) -> LineThrottle:
    return LineThrottle(rate, burst, "the file")


def test_lines_pass_unchanged_with_partial_one_at_end() -> None:
    one = throttle()
    assert one.feed(b"a\nb", 0.0) == ["a"]
    assert one.feed(b"c\n\nd", 0.1) == ["bc", ""]
    assert one.holds_something
    assert one.flush(1.0) == ["d"]
    assert not one.holds_something


def test_repeats_are_folded_and_counted_at_next_line() -> None:
    one = throttle()
    assert one.feed(b"x\n" * 42 + b"y\n", 0.0) == ["x", "… repeated 41 times", "y"]
    assert one.feed(b"y\nz\n", 0.1) == ["y", "z"]
    assert one.feed(b"z\nz\n", 0.2) == []
    assert one.flush(1.0) == ["… repeated 2 times"]


def test_endless_repeats_are_counted_every_few_seconds() -> None:
    one = throttle()
    shown = [line for second in range(60) for line in one.feed(b"same\n", float(second))]
    assert shown[0] == "same"
    assert set(shown[1:]) == {"… repeated 5 times", "… repeated 4 times"}
    assert 10 <= len(shown) <= 13


def test_line_rate_is_bounded_and_omissions_are_counted() -> None:
    one = throttle(rate=10.0, burst=20.0)
    lines = b"".join(b"line %d\n" % n for n in range(1000))
    shown = one.feed(lines, 0.0)
    assert shown == [f"line {n}" for n in range(20)]
    assert one.feed(b"too soon\n", 0.5) == []
    assert one.feed(b"later\n", 3.0) == ["… 981 lines left out here; see the file", "later"]
    for second in range(100):
        shown += one.feed(lines, 3.0 + second)
    assert len(shown) < 20 + 100 * (10 + 1) + 20


NATIVE_REPORT = """\
F1123 04:46:21.393090   27545 client.h:80] Terminating process because the JAX distributed service failed.
*** Check failure stack trace: ***
    @     0x7f4789440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
    @     0x7f47ee8a71f5  (unknown)
*** SIGABRT received at time=1795409181 on cpu 0 ***
PC: @     0x7f47ee8a8eec  (unknown)  (unknown)
[2026-11-23 04:46:21,504 E 27199 27545] logging.cc:474: *** SIGABRT received at time=1795409181 on cpu 0 ***
[2026-11-23 04:46:21,509 E 27199 27545] logging.cc:474:     @     0x555a5caf3190  (unknown)  (unknown)
Fatal Python error: Aborted


Extension modules: msgpack._cmsgpack, google._upb._message (total: 2)
Current thread 0x00007f (most recent call first):
  File "train.py", line 7 in step
"""
"""What a process of JAX 0.10.2 prints, in a Ray worker, when another process of its gang is gone."""


SURVIVOR = """\
W1123 08:13:59.518435   20174 preemption_sync_manager.cc:147] Failed to retrieve preemption notice: UNAVAILABLE
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}. This is only expected if one is
E1123 08:13:59.518489   20174 preemption_sync_manager.cc:159] Failed to cancel preemption barrier
E1123 08:13:59.518546   20174 coordination_service_agent.cc:289] Polled an error from coordination service
"""
"""What it says before that report."""


def test_survivor_of_lost_slice_prints_one_line() -> None:
    one = throttle()
    assert one.feed(b"step 7\n" + SURVIVOR.encode(), 0.0) == ["step 7"]
    assert one.feed(NATIVE_REPORT.encode(), 0.1) == []
    (line,) = one.flush(0.6)
    assert line.startswith("F1123 04:46:21.393090   27545 client.h:80] Terminating process because")
    assert line.endswith(" … (17 more lines: the file)")
    assert not one.holds_something


def test_survivor_stopped_before_last_word_counts_omissions() -> None:
    one = throttle()
    one.feed(SURVIVOR.encode(), 0.0)
    one.leave_out(NATIVE_REPORT.encode())
    assert one.flush(0.5) == ["… 18 lines left out here; see the file"]


def test_library_warnings_without_last_word_are_shown() -> None:
    one = throttle()
    one.feed(SURVIVOR.encode(), 0.0)
    shown = one.feed(b"step 8\n", 0.1)
    assert [line[0] for line in shown] == ["…", "W", "E", "E", "s"]
    one.feed(SURVIVOR.encode()[:100], 0.2)
    assert one.flush(0.7)[-1].startswith("W1123")


def test_task_whose_child_aborted_is_shown_again() -> None:
    one = throttle()
    assert one.feed(b"F1123 04:46:21.393090   27545 client.h:80] bad\nlost\n", 0.0) == []
    shown = [line for n in range(30) for line in one.feed(b"step %d\n" % n, 0.1 * n)]
    assert shown[0].startswith("F1123")
    assert shown[1].startswith("step 2")
    assert len(shown) < 12


def test_native_stacks_are_counted_and_python_frames_shown() -> None:
    one = throttle()
    shown = one.feed(NATIVE_REPORT.partition("\n")[2].encode(), 0.0)
    assert [line.split(" ")[0] for line in shown] == ["…", "Fatal", "…", "Current", ""]
    assert [line for line in shown if line.startswith("…")] == [
        "… 7 lines left out here; see the file",
        "… 3 lines left out here; see the file",
    ]
    assert shown[-1] == '  File "train.py", line 7 in step'


def test_tasks_of_large_gang_share_terminal_rate() -> None:
    much = b"".join(b"%d\n" % n for n in range(1000))
    whole = sum(len(LineThrottle.for_task_of(256, "").feed(much, 0.0)) for _ in range(256))
    assert whole <= 256 * 20
    later = [LineThrottle.for_task_of(256, "") for _ in range(256)]
    for one in later:
        one.feed(much, 0.0)
    assert sum(len(one.feed(much, 10.0 + n)) for n in range(10) for one in later) <= 256 * 2 * 21 + 256 * 20 * 2


def test_endless_line_is_cut_and_takes_no_memory() -> None:
    one = throttle()
    for _ in range(100):
        assert one.feed(b"x" * 100_000, 0.0) == []
        assert len(one._rest) <= LONGEST_LINE
    (shown,) = one.feed(b"x\n", 0.1)
    assert shown == "x" * LONGEST_LINE + " … (cut)"
    assert one.feed(b"short\n", 0.2) == ["short"]
    (shown,) = one.feed(b"y" * 10_000 + b"\n", 0.3)
    assert shown.endswith("(cut)")


def test_binary_output_is_escaped() -> None:
    (shown,) = throttle().feed(b"\x00\xff\xfe \x07caf\xc3\xa9 \x1b[31mred\n", 0.0)
    assert shown == "\\x00\\xff\\xfe \\x07café \x1b[31mred"
    assert all(c.isprintable() or c == "\x1b" for c in shown)
    assert "\n" not in printable(bytes(range(256)))


@pytest.mark.parametrize(
    "sequence",
    [
        b"\x1b]52;c;cm0gLXJm\x07",
        b"\x1b]0;title\x07",
        b"\x1b[2J",
        b"\x1b[3A",
        b"\x1bc",
        b"\x1b[6n",
        b"\x9b2J",
        b"\x1b[31",
    ],
)
def test_sequence_that_controls_terminal_is_shown_but_not_sent(sequence: bytes) -> None:
    shown = printable(b"\x1b[1;31mred\x1b[0m " + sequence)
    assert shown.startswith("\x1b[1;31mred\x1b[0m ")
    assert shown.removeprefix("\x1b[1;31mred\x1b[0m ").isprintable()


def test_progress_bar_shows_its_last_state() -> None:
    one = throttle()
    assert one.feed(b"\r10%\r20%", 0.0) == []
    assert one.feed(b"\r30%", 0.1) == []
    assert one.flush(1.0) == ["30%"]
    assert one.feed(b"\r40%\r100%\r\ndone\r\n", 1.1) == ["100%", "done"]
