"""What has changed, for readers that look now and then."""

from iris_ray.state.instructions import ChangeLog


def test_reader_gets_changes_or_learns_it_was_away_too_long() -> None:
    log: ChangeLog[str] = ChangeLog()
    for what in "abc":
        log.note(what, most=4)
    seen = log.version
    log.note("d", most=4)
    assert log.since(seen) == ["d"]
    assert log.since(log.version) == []
    log.note("e", most=4)
    assert (log.version, log.since(seen), log.since(1)) == (5, ["d", "e"], None)
