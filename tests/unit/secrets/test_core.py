"""Secrets: where they come from, what is refused, and that nothing shows them."""

import pickle
from pathlib import Path

import pytest

from iris_ray import Secret
from iris_ray.errors import InvalidRequestError, NotPermittedError
from iris_ray.model.options import OPTIONS
from iris_ray.model.secret import MOST_CHARACTERS, SecretValue, with_value
from iris_ray.secrets.core import StoredSecret, of_file, text_of, to_file

VALUE = "s3cr3t-value"
STORED = StoredSecret("KEY", "olga", 7.0, 3, ("ann",), ("research",))


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
        (lambda: Secret.from_file("/bin/true"), "not text"),
        (lambda: Secret.from_env("NO_SUCH_VARIABLE"), "not set"),
        (lambda: Secret.from_store(""), "'' is not a valid name for a secret"),
        (lambda: Secret.from_store("../key"), "'../key' is not a valid name for a secret; give a name of letters"),
        (lambda: Secret.from_store(VALUE * 9), "a text of 108 characters is not a valid name"),
        (lambda: Secret(VALUE, stored="KEY"), "give one of them"),
        (lambda: text_of(b"\xff\xfe"), "base64"),
        (lambda: text_of(b"\r\n"), "0 characters"),
        (lambda: text_of(b""), "0 characters"),
        (lambda: text_of(b"a\0b"), "NUL"),
        (lambda: text_of(b"x" * (MOST_CHARACTERS + 1)), "16,385"),
        (lambda: text_of(b"x" * 70_000), "16,384 characters at most"),
    ],
)
def test_secret_that_can_not_be_is_refused(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidRequestError, match=why):
        make()


@pytest.mark.parametrize("given", ["key", {"A": "value"}, {"A B": Secret("x")}, {3: Secret("x")}])
def test_what_is_no_mapping_of_secrets_is_refused(given: object) -> None:
    assert OPTIONS["secrets"].check.problem(given) is not None


# -- the store ---------------------------------------------------------------------------------------------------------


def test_value_of_store_ends_as_that_of_a_file() -> None:
    text = "two\nlines\r\n"
    assert with_value(Secret.from_store("KEY"), text) == SecretValue("two\nlines")
    assert with_value(Secret.from_store("KEY", as_file=True), text) == SecretValue(text, as_file=True)


@pytest.mark.parametrize("value", [b"x", b"two\nlines\n", "\u00fc".encode() * MOST_CHARACTERS])
def test_file_of_secret_is_read_as_it_was_written(value: bytes) -> None:
    assert of_file("KEY", to_file(STORED, value)) == (STORED, value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"null\nx", b"[]\nx", to_file(STORED, b""), to_file(STORED, b"x").replace(b": 1,", b": 9,", 1),
     to_file(STORED, b"x")[1:], b'{"format": 1, "name": "KEY"}\ns3cr3t'],
)  # fmt: skip
def test_damaged_file_is_refused_without_what_it_has(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^its file is damaged$"):
        of_file("KEY", data)
    with pytest.raises(ValueError, match=r"^its file is damaged$"):
        of_file("OTHER", to_file(STORED, b"x"))


@pytest.mark.parametrize(
    ("user", "team", "may"),
    [("ann", "", True), ("bob", "research", True), ("bob", "research/vision", True), ("bob", "researchers", False),
     ("bob", "", False)],
)  # fmt: skip
def test_restricted_secret_is_for_its_users_and_teams(user: str, team: str, may: bool) -> None:
    StoredSecret("KEY", "olga", 7.0).require_for(user, team)
    if may:
        STORED.require_for(user, team)
        return
    with pytest.raises(NotPermittedError, match=r"for jobs of users ann and teams research only.*ask olga"):
        STORED.require_for(user, team)
