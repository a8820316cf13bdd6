"""How many processes the kernel has killed for lack of memory."""

from pathlib import Path

from iris_ray.actors.host.exit_status import LOOKS_KEPT, RecentOomKills, oom_kills


def test_oom_kills_of_all_files_are_added_up(tmp_path: Path) -> None:
    vmstat, events = tmp_path / "vmstat", tmp_path / "memory.events"
    vmstat.write_text("nr_free_pages 77\noom_kill 3\nnuma_hit 12\n")
    events.write_text("low 0\nhigh 9\nmax 8\noom 5\noom_kill 2\noom_group_kill 1\n")
    assert oom_kills((vmstat, events)) == 5
    assert oom_kills((vmstat,)) == 3
    vmstat.write_text("nr_free_pages 77\noom_kill 4\n")
    assert oom_kills((vmstat, events)) == 6


def test_oom_kills_are_none_where_kernel_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("nr_free_pages 77\n")
    (tmp_path / "empty").touch()
    assert oom_kills((tmp_path / "old", tmp_path / "empty", tmp_path / "missing", tmp_path)) == 0
    assert oom_kills(()) == 0


def test_oom_kills_of_this_machine_are_readable() -> None:
    assert oom_kills() >= 0


def test_old_oom_kill_explains_no_later_end() -> None:
    """A task may run for weeks, and somebody sends it SIGKILL in the end."""
    counts = [3]
    recent = RecentOomKills(lambda: counts[0])
    assert not recent.found()
    counts[0] = 4
    for _ in range(LOOKS_KEPT - 1):
        recent.look()
        assert recent.found()
    recent.look()
    assert not recent.found()
