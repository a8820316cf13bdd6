"""What tasks print, for tests of logs."""


def lines(count: int) -> bytes:
    """Return so many numbered lines."""
    return b"".join(b"%d\n" % n for n in range(count))
