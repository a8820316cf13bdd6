"""The store of secrets: its files, what two operators and a full disk leave, and what it refuses."""

import os
import stat
import threading
from pathlib import Path

import pytest

from iris_ray.errors import InvalidRequestError, NotPermittedError, SecretNotFoundError, SecretStoreError
from iris_ray.secrets import store as secret_store
from iris_ray.secrets.store import SecretStore

VALUE = b"s3cr3t\nvalue"


class Times:
    """A clock that goes on by a second with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> SecretStore:
    return SecretStore(lambda: tmp_path / "head", Times())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "head" / "secrets"


def put(store: SecretStore, name: str = "KEY", value: bytes = VALUE, user: str = "olga", **to: tuple[str, ...]) -> int:
    return store.put(name, value, to.get("users", ()), to.get("teams", ()), user)[0].revision


def value(store: SecretStore, name: str = "KEY") -> bytes:
    return store.value(name, "ann", "")


def test_another_store_finds_what_was_set(store: SecretStore, tmp_path: Path, directory: Path) -> None:
    assert store.listed() == []
    assert [put(store, value=each) for each in (b"old", VALUE)] == [1, 2]
    put(store, "Z.b-1_c", user="otto", users=("ann",))
    again = SecretStore(lambda: tmp_path / "head")
    assert value(again) == VALUE
    (first, second) = again.listed()
    assert (first.name, first.set_by, first.set_at, first.revision) == ("KEY", "olga", 2.0, 2)
    assert (second.name, second.set_by, second.users) == ("Z.b-1_c", "otto", ("ann",))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_removed_secret_is_gone_and_begins_anew(store: SecretStore) -> None:
    put(store, value=b"old")
    store.remove("KEY")
    for ask in (lambda: value(store), lambda: store.remove("KEY")):
        with pytest.raises(SecretNotFoundError, match=r"no secret 'KEY', nor any other secret\..*secrets set KEY"):
            ask()
    assert put(store) == 1


def test_unknown_secret_names_the_nearest(store: SecretStore) -> None:
    put(store, "WANDB_API_KEY")
    with pytest.raises(SecretNotFoundError, match="did you mean WANDB_API_KEY"):
        value(store, "WANDB_KEY")


def test_restricted_secret_is_for_jobs_of_its_teams(store: SecretStore) -> None:
    put(store, teams=("research",))
    assert store.value("KEY", "ann", "research/vision") == VALUE
    with pytest.raises(NotPermittedError, match="the secret KEY is for jobs of teams research only"):
        value(store)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "/etc/passwd", "a b", "1st", "a\n", "ü", "x" * 101])
def test_odd_name_is_refused_everywhere(store: SecretStore, directory: Path, name: str) -> None:
    for ask in (lambda: put(store, name), lambda: value(store, name), lambda: store.remove(name)):
        with pytest.raises(InvalidRequestError, match="is not a valid name for a secret"):
            ask()
    assert not directory.exists()


@pytest.mark.parametrize("bad", [{"value": b"\xff"}, {"value": b"\n"}, {"value": b"x" * 16_385}, {"users": ("a b",)},
                                 {"teams": ("",)}, {"users": ("a",) * 101}, {"users": ("a" * 400_000,)}])  # fmt: skip
def test_bad_value_or_audience_leaves_what_was_there(store: SecretStore, bad: dict) -> None:
    put(store)
    with pytest.raises(InvalidRequestError):
        put(store, **bad)
    assert (value(store), store.listed()[0].revision) == (VALUE, 1)


def test_full_store_takes_new_values_but_no_new_names(store: SecretStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_store, "MOST_SECRETS", 2)
    put(store, "A")
    put(store, "B")
    with pytest.raises(SecretStoreError, match=r"C was not set: the store has 2 secrets.*secrets rm NAME"):
        put(store, "C")
    assert put(store, "B") == 2


def test_two_operators_at_once_leave_one_whole_value(store: SecretStore) -> None:
    values = [bytes([65 + number]) * 16_000 for number in range(4)]

    def sets(each: bytes) -> None:
        for _ in range(10):
            put(store, value=each)

    threads = [threading.Thread(target=sets, args=(each,)) for each in values]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if store.listed():
            assert value(store) in values
    for thread in threads:
        thread.join()
    assert store.listed()[0].revision == 40


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_full_disk_leaves_what_was_there(store: SecretStore, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, value=b"old")
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(full))
        with pytest.raises(SecretStoreError, match="the secret KEY was not set: No space left on device; make room"):
            put(store)
    assert value(store) == b"old"
    assert os.listdir(directory) == ["KEY"]


def test_rest_of_killed_process_is_removed(store: SecretStore, directory: Path) -> None:
    put(store)
    for name, age in ((".0a1b", 3600), (".fresh", 0)):
        (directory / name).write_bytes(VALUE)
        then = (directory / name).stat().st_mtime - age
        os.utime(directory / name, (then, then))
    assert [one.name for one in store.listed()] == ["KEY"]
    put(store)
    assert sorted(os.listdir(directory)) == [".fresh", "KEY"]


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_directory_open_to_others_is_not_used(store: SecretStore, directory: Path, mode: int) -> None:
    put(store)
    directory.chmod(mode)
    for ask in (lambda: put(store), lambda: value(store), lambda: store.remove("KEY"), store.listed):
        with pytest.raises(SecretStoreError, match=f"open to other accounts .mode {mode:04o}.*chmod 700 {directory}"):
            ask()
    directory.chmod(0o700)
    assert value(store) == VALUE


def test_directory_that_is_a_link_or_file_is_not_used(store: SecretStore, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.parent.mkdir()
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecretStoreError, match="is not a directory; move it away"):
        put(store)
    directory.unlink()
    directory.write_text("")
    with pytest.raises(SecretStoreError, match="is not a directory; move it away"):
        put(store)
    assert not os.listdir(tmp_path / "elsewhere")


def test_bad_file_is_listed_with_the_reason_and_can_be_replaced(store: SecretStore, directory: Path) -> None:
    for name in ("OPEN", "BROKEN", "DIRECTORY", "FINE"):
        put(store, name)
    (directory / "OPEN").chmod(0o640)
    (directory / "BROKEN").write_bytes(b"s3cr3t")
    (directory / "DIRECTORY").unlink()
    (directory / "DIRECTORY").mkdir()
    problems = {one.name: one.problem for one in store.listed()}
    assert "open to other accounts (mode 0640)" in problems["OPEN"]
    assert "its file is damaged; set it again: iris-ray cluster secrets set BROKEN" in problems["BROKEN"]
    assert "is not a file" in problems["DIRECTORY"]
    assert problems["FINE"] == ""
    with pytest.raises(SecretStoreError, match="mode 0640"):
        value(store, "OPEN")
    assert [put(store, name) for name in ("OPEN", "BROKEN")] == [1, 1]
    store.remove("FINE")
    with pytest.raises(SecretStoreError, match="DIRECTORY was not removed: Is a directory"):
        store.remove("DIRECTORY")
    assert value(store, "OPEN") == value(store, "BROKEN") == VALUE


def test_cluster_without_a_place_has_no_store() -> None:
    store = SecretStore(lambda: None)
    for ask in (lambda: put(store), lambda: value(store), store.listed):
        with pytest.raises(SecretStoreError, match="head has no directory"):
            ask()


def test_head_directory_of_another_account_is_said(store: SecretStore) -> None:
    def refuse() -> Path:
        raise PermissionError("/tmp/ray/iris_ray belongs to another user; remove it")

    with pytest.raises(SecretStoreError, match="KEY was not set: /tmp/ray/iris_ray belongs to another user"):
        put(SecretStore(refuse))
