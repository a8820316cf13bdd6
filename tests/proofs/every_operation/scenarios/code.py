"""Code that travels: a held host's copy of a directory is brought up to date, twice."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from iris_ray.dev import code_copy
from iris_ray.dev.code_copy import CodeCopy
from iris_ray.dev.code_directory import CodeFile
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario

VERSIONS: list[dict[str, bytes]] = [
    {"train.py": b"a = 1\n", "lib/model.py": b"b = 1\n" * 3000, "old/gone.py": b"c = 1\n", "data": b"file"},
    {"train.py": b"a = 2\n", "lib/model.py": b"b = 2\n" * 3000, "lib/new.py": b"d = 2\n", "data/one": b"directory"},
    {"train.py": b"a = 1\n", "lib/model.py": b"b = 3\n" * 3000, "data": b"file"},
]
OWN = "lib/written_by_the_program.txt"


def code() -> Scenario:
    return Scenario(
        "code",
        _prepare,
        _act,
        _judge,
        (OSError,),
        {"record comes first": _record_first, "what can't be removed is forgotten": _forget_it},
    )


def _files(version: int) -> tuple[list[CodeFile], dict[str, bytes]]:
    contents = {hashlib.sha256(content).hexdigest(): content for content in VERSIONS[version].values()}
    files = [
        CodeFile(path, hashlib.sha256(content).hexdigest(), len(content)) for path, content in VERSIONS[version].items()
    ]
    return files, contents


def _update(copy: CodeCopy, version: int) -> None:
    """Bring a copy up to date as a held host does: with only those contents that it says it lacks."""
    files, contents = _files(version)
    copy.update(files, {digest: contents[digest] for digest in copy.missing(files)})


def _prepare(place: Path) -> None:
    (place / "held").mkdir()
    copy = CodeCopy(place / "held")
    _update(copy, 0)
    (copy.path / OWN).write_text("mine")


def _act(place: Path, said: Said, operations: Operations) -> None:
    try:
        copy = CodeCopy(place / "held")
        for version in (1, 2):
            _update(copy, version)
            said("done", version)
            _require(copy.path, version)
    finally:
        assert {one.name for one in (place / "held").iterdir()} <= {"code", "code.json"}


def _require(path: Path, version: int) -> None:
    found = {str(one.relative_to(path)): one for one in path.rglob("*") if one.is_file()}
    found.pop(OWN)
    assert found.keys() == VERSIONS[version].keys(), sorted(found)
    wrong = [name for name, content in VERSIONS[version].items() if found[name].read_bytes() != content]
    assert not wrong, f"not as version {version}: {wrong}"


def _judge(place: Path, said: list[list[Any]]) -> None:
    for version in (2, 1):
        copy = CodeCopy(place / "held")
        if said and version == 2 and said[-1] == ["done", 2]:
            _require(copy.path, 2)
        _update(copy, version)
        assert (copy.path / OWN).read_text() == "mine"
        _require(copy.path, version)


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _record_first() -> None:
    write = CodeCopy._write

    def written(copy: CodeCopy, file: CodeFile, content: bytes) -> Any:
        try:
            return write(copy, file, content)
        except OSError:
            return code_copy._Written(file.digest, 0, 0)

    def is_here(copy: CodeCopy, file: CodeFile) -> bool:
        known = copy._known.get(file.path)
        return known is not None and known.digest == file.digest

    CodeCopy._write = written  # type: ignore[method-assign, assignment]
    CodeCopy._is_here = is_here  # type: ignore[method-assign, assignment]


def _forget_it() -> None:
    unlink = Path.unlink

    def kept(path: Path, missing_ok: bool = False) -> None:
        with contextlib.suppress(OSError):
            unlink(path, missing_ok)

    Path.unlink = kept  # type: ignore[method-assign, assignment]
