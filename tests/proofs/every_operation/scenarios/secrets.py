"""The cluster's store of secrets: one is set, replaced and removed."""

import contextlib
import os
from pathlib import Path
from typing import Any

from iris_ray.errors import IrisError
from iris_ray.secrets import store as store_module
from iris_ray.secrets.store import SecretStore
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario

OLD, NEW = b"old " * 3000, b"new " * 4000


def secrets() -> Scenario:
    return Scenario(
        "secrets",
        _prepare,
        _act,
        _judge,
        (IrisError,),
        {"written in place": _write_in_place, "reports too early": _report_too_early},
    )


def _store(place: Path) -> SecretStore:
    return SecretStore(lambda: place / "head")


def _prepare(place: Path) -> None:
    store = _store(place)
    for name in ("kept", "replaced", "removed"):
        store.put(name, OLD, (), (), "ann")


def _act(place: Path, said: Said, operations: Operations) -> None:
    store = _store(place)
    for name, begin in (("new", "puts"), ("replaced", "puts"), ("removed", "removes")):
        said(begin, name)
        if begin == "puts":
            store.put(name, NEW, (), (), "ann")
        else:
            store.remove(name)
        said(f"done: {begin}", name)
    assert store.value("kept", "ann", "") == OLD
    assert [one.name for one in store.listed()] == ["kept", "new", "replaced"]


def _judge(place: Path, said: list[list[Any]]) -> None:
    store = _store(place)
    found = {one.name: store.value(one.name, "ann", "") for one in store.listed() if not one.problem}
    assert not [one for one in store.listed() if one.problem], store.listed()
    begun, done = {tuple(one) for one in said}, {tuple(one) for one in said if one[0].startswith("done")}
    assert found["kept"] == OLD
    may = {
        "new": {NEW} if ("done: puts", "new") in done else {NEW, None} if ("puts", "new") in begun else {None},
        "replaced": {NEW}
        if ("done: puts", "replaced") in done
        else {NEW, OLD}
        if ("puts", "replaced") in begun
        else {OLD},
        "removed": {None}
        if ("done: removes", "removed") in done
        else {OLD, None}
        if ("removes", "removed") in begun
        else {OLD},
    }
    for name, values in may.items():
        assert found.get(name) in values, (name, found.get(name), said)
    later = os.stat(place / "head").st_mtime + 2 * store_module.UNFINISHED_S
    for path in (place / "head" / "secrets").glob(".*"):
        os.utime(path, (later - 4 * store_module.UNFINISHED_S,) * 2)
    store.put("kept", NEW, (), (), "ann")
    left = sorted(path.name for path in (place / "head").rglob("*") if path.is_file())
    assert left == sorted({"kept", *(found.keys())}), left


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _write_in_place() -> None:
    def write(directory: Path, name: str, data: bytes) -> None:
        file = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(file, "wb") as opened:
            opened.write(data)

    store_module._write_whole = write


def _report_too_early() -> None:
    remove = SecretStore.remove

    def hasty(store: SecretStore, name: str) -> None:
        with contextlib.suppress(IrisError):
            remove(store, name)

    SecretStore.remove = hasty  # type: ignore[method-assign, assignment]
