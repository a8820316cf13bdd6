"""Files and error lines of commands."""

import signal
import stat
from pathlib import Path

import click
import pytest

from iris_ray.cli.conventions import (
    MOST_SHOWN,
    TERMINATED,
    errors_as_lines,
    private_file,
    require_place,
    say_error,
    sigterm_interrupts,
)
from iris_ray.errors import InvalidRequestError


def test_private_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text("of yesterday")

    def fill_disk() -> None:
        with private_file(path) as file:
            file.write("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fill_disk()
    assert path.read_text() == "of yesterday"
    with private_file(path) as file:
        file.write("whole")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("whole", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_device_is_written_to_and_not_replaced() -> None:
    with private_file(Path("/dev/null"), "wb") as file:
        file.write(b"gone")
    assert Path("/dev/null").is_char_device()


def test_file_that_can_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "none" / "x", "is not a directory"), ("x" * 5000, "")):
        with pytest.raises(InvalidRequestError, match=f"--output.*{why}"):
            require_place(Path(path))


def test_error_line_is_short_and_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say_error("\x1b]52;c;eA==\x07" + "x" * 100_000 + "the end")
    said = capsys.readouterr().err
    assert len(said) < MOST_SHOWN + 100
    assert said.isprintable() or said[:-1].isprintable()
    assert said.endswith("the end\n")


@pytest.mark.parametrize("message", ["--a is not for --b", "--a is not for --b."])
def test_usage_error_is_a_sentence_before_the_way_to_help(capsys: pytest.CaptureFixture[str], message: str) -> None:
    with pytest.raises(click.exceptions.Exit), errors_as_lines():
        raise click.UsageError(message)
    assert capsys.readouterr().err == "iris-ray: --a is not for --b. See: iris-ray --help\n"


def test_sigterm_ends_command_with_its_code_and_handler_goes_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(click.exceptions.Exit) as end, errors_as_lines(), sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert end.value.exit_code == TERMINATED
    assert capsys.readouterr().err == "iris-ray: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before
