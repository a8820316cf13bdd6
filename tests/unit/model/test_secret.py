"""Secrets: where they come from, what is refused, and that nothing shows them."""

import pickle
from pathlib import Path

import pytest

from iris_ray import Secret
from iris_ray.errors import InvalidRequestError
from iris_ray.model.options import OPTIONS
from iris_ray.model.secret import MOST_CHARACTERS

VALUE = "s3cr3t-value"


def test_secrets_come_from_files_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text(f"{VALUE}\n")
    monkeypatch.setenv("KEY", VALUE)
    assert Secret.from_file("~/key") == Secret.from_env("KEY") == Secret(VALUE)
    assert Secret.from_file(tmp_path / "key", as_file=True) == Secret(f"{VALUE}\n", as_file=True)
    assert pickle.loads(pickle.dumps(Secret(VALUE))).value == VALUE


def test_secret_shows_itself_nowhere() -> None:
    secret = Secret(VALUE)
    wrong = OPTIONS["secrets"].check.problem({"A": VALUE, "B": secret})
    assert VALUE not in f"{secret} {secret!r} {wrong}"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Secret(""), "1 to"),
        (lambda: Secret("a\0b"), "NUL"),
        (lambda: Secret("x" * (MOST_CHARACTERS + 1)), "16,385"),
        (lambda: Secret(b"bytes"), "a str"),  # type: ignore[arg-type]
        (lambda: Secret.from_file("/no/such/file"), "can't be read: No such file"),
        (lambda: Secret.from_file("/bin/true"), "no text"),
        (lambda: Secret.from_env("NO_SUCH_VARIABLE"), "not set"),
    ],
)
def test_secret_that_can_not_be_is_refused(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidRequestError, match=why):
        make()


@pytest.mark.parametrize("given", ["key", {"A": "value"}, {"A B": Secret("x")}, {3: Secret("x")}])
def test_what_is_no_mapping_of_secrets_is_refused(given: object) -> None:
    assert OPTIONS["secrets"].check.problem(given) is not None
