"""A checkout that travels with a job: its package, and the record of its code."""

import os
import random
import shutil
import subprocess
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from iris_ray.dev.checkout import CUT, MOST_STORED_BYTES, Checkout, CodeRecord
from iris_ray.dev.code import TravellingCode, restored
from iris_ray.dev.code_directory import MOST_FILE_BYTES
from iris_ray.errors import InvalidMessageError, InvalidRequestError
from iris_ray.settings import CODE
from tests.unit.dev.test_code_directory import git, write


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A checkout with one commit, on the branch "work"."""
    path = tmp_path / "here"
    path.mkdir()
    git(path, "init", "--quiet", "--initial-branch", "work")
    write(path, **{"train.py": "a = 1\n", "lib/gone.py": "b\n", "run.sh": "echo\n", ".gitignore": "data\n"})
    (path / "run.sh").chmod(0o755)
    git(path, "add", ".")
    git(path, "commit", "--quiet", "-m", "first")
    return path


def edit(path: Path) -> None:
    write(path, **{"train.py": "a = 2\n", "new.py": "c\n", "data": "d\n", ".env": "KEY=s3cr3t\n", "staged.py": "e\n"})
    git(path, "add", "staged.py")
    (path / "lib/gone.py").unlink()


def test_record_tells_commit_and_what_differs(here: Path) -> None:
    found = Checkout.of(here)
    assert found is not None
    assert (found.record.difference, found.record.branch) == ("", "work")
    edit(here)
    before = subprocess.check_output(["git", "status", "--porcelain"], cwd=here)
    found = Checkout.of(here)
    assert found is not None
    assert str(found.record) == f"commit {found.record.commit[:12]} (work) and 5 changed lines"
    assert "s3cr3t" not in found.record.difference
    assert subprocess.check_output(["git", "status", "--porcelain"], cwd=here) == before
    assert found.record.sent.endswith("left out: .env (looks like a secret)")


def test_difference_makes_commit_what_was_sent(here: Path, tmp_path: Path) -> None:
    edit(here)
    found = Checkout.of(here)
    assert found is not None
    git(tmp_path, "clone", "--quiet", str(here), "again")
    subprocess.run(["git", "apply"], cwd=tmp_path / "again", input=found.record.difference.encode(), check=True)
    again = Checkout.of(tmp_path / "again")
    assert again is not None
    assert again.code.files == found.code.files


@pytest.mark.parametrize("setting", ["diff.noprefix=true", "diff.relative=true", "diff.context=0"])
def test_difference_is_a_patch_whatever_a_persons_git_shows(
    here: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    write(here, **{"lib/deep.py": "1\n2\n3\n4\n5\n"})
    git(here, "add", ".")
    git(here, "commit", "--quiet", "-m", "second")
    write(here, **{"lib/deep.py": "1\n2\nchanged\n4\n5\n"})
    git(here, "config", *setting.split("="))
    monkeypatch.chdir(here / "lib")
    found = Checkout.of(Path.cwd())
    assert found is not None
    with restored(found.record) as code:
        assert Path(code.path, "deep.py").read_text() == "1\n2\nchanged\n4\n5\n"


def test_binary_files_and_other_encodings_are_in_difference(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    (here / "model.bin").write_bytes(bytes(range(256)) * 3)
    (here / "lib/gone.py").write_bytes("# caf\xe9\n".encode("latin-1"))
    found = Checkout.of(here)
    assert found is not None
    with restored(CodeRecord.of_bytes(found.record.to_bytes())) as code:
        assert Path(code.path, "model.bin").read_bytes() == bytes(range(256)) * 3
        assert Path(code.path, "lib/gone.py").read_bytes() == b"# caf\xe9\n"


def test_code_of_subdirectory_is_restored_with_its_difference(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, **{"lib/deep/kept.py": "k\n"})
    git(here, "add", ".")
    git(here, "commit", "--quiet", "-m", "second")
    edit(here)
    write(here, **{"lib/deep/kept.py": "changed\n", "lib/deep/new.py": "n\n"})
    monkeypatch.chdir(here / "lib/deep")
    found = Checkout.of(Path.cwd())
    assert found is not None
    with restored(found.record) as code:
        texts = {path.name: path.read_text() for path in code.path.iterdir()}
        assert texts == {"kept.py": "changed\n", "new.py": "n\n"}


def _link_outside(here: Path, _: pytest.MonkeyPatch) -> None:
    (here / "scratch").symlink_to("/tmp")
    (here / "again.py").symlink_to("train.py")


def _attributes(here: Path, _: pytest.MonkeyPatch) -> None:
    write(here, **{".gitattributes": "lib export-ignore\n*.txt export-subst\n", "version.txt": "$Format:%H$\n"})


def _tracked_and_ignored(here: Path, _: pytest.MonkeyPatch) -> None:
    write(here, **{"data": "vocabulary\n", ".rayignore": "lib\n", "node_modules/a.js": "x\n"})
    git(here, "add", "--force", "data")


def _large(here: Path, _: pytest.MonkeyPatch) -> None:
    with open(here / "large.bin", "wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)


def _temporary_files_in_checkout(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "data").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(here / "data"))


def _path_with_a_colon(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here.rename(here.with_name('a:b"c\\')))


def _overlooked_changes(here: Path, _: pytest.MonkeyPatch) -> None:
    git(here, "update-index", "--skip-worktree", "train.py")
    git(here, "update-index", "--assume-unchanged", "run.sh")
    git(here, "config", "core.safecrlf", "true")
    write(here, **{"run.sh": "echo again\n"})


def _file_in_place_of_directory(here: Path, _: pytest.MonkeyPatch) -> None:
    write(here, **{"lib2/a.py": "1\n", "lib3/b.py": "1\n", "lib4/c.py": "1\n"})
    git(here, "add", ".")
    git(here, "commit", "--quiet", "-m", "directories")
    for name in ("lib2", "lib3", "lib4"):
        shutil.move(here / name, here.parent / name)
    write(here, lib2="now a file\n")
    (here / "lib3").symlink_to("../lib3")
    (here / "lib4").symlink_to("lib")


@pytest.mark.parametrize(
    "prepare",
    [_link_outside, _attributes, _tracked_and_ignored, _large, _temporary_files_in_checkout, _path_with_a_colon,
     _overlooked_changes, _file_in_place_of_directory],
)  # fmt: skip
def test_restored_code_is_what_was_sent(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    monkeypatch.chdir(here)
    prepare(here, monkeypatch)
    here = Path.cwd()
    if prepare is not _file_in_place_of_directory:
        git(here, "add", ".")
        git(here, "commit", "--quiet", "--allow-empty", "-m", "second")
    write(here, **{"train.py": "a = 2\n", "new.py": "c\n", ".difference": "d\n"})
    found = Checkout.of(here)
    assert found is not None
    assert {".difference", "lib/gone.py", "new.py"} < found.code.files.keys()
    with restored(found.record) as code:
        assert code.checkout is not None
        assert code.checkout.code.files == found.code.files
    assert capsys.readouterr().err == ""


def test_restored_code_without_its_submodule_is_said_to_lack_it(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "--quiet")
    write(tmp_path / "other", **{"part.py": "p\n"})
    git(tmp_path / "other", "add", ".")
    git(tmp_path / "other", "commit", "--quiet", "-m", "first")
    git(here, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "other"), "part")
    found = Checkout.of(here)
    assert found is not None
    with restored(found.record) as code:
        assert not (code.path / "part/part.py").exists()
    said = capsys.readouterr().err
    assert "the job had 6 files, " in said
    assert "restored are 5 files, " in said


def test_commit_without_the_current_directory_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Checkout.of(here)
    assert found is not None
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    with pytest.raises(InvalidRequestError, match=r"of the job has no .*elsewhere; go to"), restored(found.record):
        pass


def test_binary_file_that_is_too_large_is_only_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    write(here, **{"train.py": "a = 2\n"})
    (here / "model.bin").write_bytes(random.Random(1).randbytes(100_000))
    found = Checkout.of(here)
    assert found is not None
    assert "+a = 2\n" in found.record.difference
    assert "Binary files /dev/null and b/model.bin differ" in found.record.difference
    with pytest.raises(InvalidRequestError, match="binary files were too large"), restored(found.record):
        pass


@pytest.mark.parametrize("how", ["deleted", "removed from index", "directory in its place"])
def test_deleted_secret_is_not_in_difference(here: Path, how: str) -> None:
    write(here, **{".env": "KEY=s3cr3t\n", "deploy/tls.key": "s3cr3t\n"})
    git(here, "add", "--force", ".")
    git(here, "commit", "--quiet", "-m", "a mistake")
    edit(here)
    (here / ".env").unlink()
    (here / "deploy/tls.key").unlink()
    if how == "removed from index":
        git(here, "rm", "--quiet", "--cached", ".env", "deploy/tls.key")
    elif how == "directory in its place":
        write(here, **{".env/local.py": "x = 1\n"})
    found = Checkout.of(here)
    assert found is not None
    assert "s3cr3t" not in found.record.difference
    assert "+a = 2" in found.record.difference
    assert ("+x = 1" in found.record.difference) == (how == "directory in its place")


def test_file_of_variables_stays_here_and_out_of_record(here: Path) -> None:
    write(here, **{"variables": "KEY=s3cr3t\n", "train.py": "a = 2\n"})
    (here / "link").symlink_to("variables")
    found = Checkout.of(here, here / "variables")
    assert found is not None
    assert not {"variables", "link"} & found.code.files.keys()
    assert "s3cr3t" not in found.record.difference
    assert "variables (its variables travel apart)" in found.record.sent


def test_directory_outside_of_checkout_is_none(here: Path, tmp_path: Path) -> None:
    assert Checkout.of(tmp_path) is None
    (here / "data").mkdir()
    assert Checkout.of(here / "data") is None  # git ignores it
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "--quiet")
    assert Checkout.of(tmp_path / "empty") is None  # no commit yet


def test_checkout_of_another_account_is_said_to_stay_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here / "lib")
    monkeypatch.delenv(CODE.name)
    assert TravellingCode.of(None).travels
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert not TravellingCode.of(None).travels
    assert "only the script travels: git can't read it; see: git status" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stored",
    [
        zlib.compress(b'{"commit": "' + bytes(100 << 20) + b'"}'),
        zlib.compress(b"[" * 50_000),
        zlib.compress(b'{"commit": 1, "branch": "", "difference": "", "sent": ""}'),
        zlib.compress(b"{}"),
        zlib.compress(b"3"),
        b"no zlib",
    ],
    ids=["a bomb", "deep", "a number", "empty", "no dict", "not compressed"],
)
def test_record_of_a_stranger_is_refused(stored: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessageError, match="can't be read"):
            CodeRecord.of_bytes(stored)
        assert tracemalloc.get_traced_memory()[1] < 90 << 20
    finally:
        tracemalloc.stop()


def test_difference_that_compresses_well_is_cut_as_well() -> None:
    stored = CodeRecord("1" * 40, "main", "+" * (20 << 20), "1 file").to_bytes()
    assert CodeRecord.of_bytes(stored).difference.endswith(CUT)


def test_large_difference_is_cut_and_says_so() -> None:
    text = "\n".join(f"+{random.Random(n).random()}" for n in range(20_000))
    stored = CodeRecord("1" * 40, "main", text, "1 file").to_bytes()
    assert len(stored) <= MOST_STORED_BYTES
    found = CodeRecord.of_bytes(stored)
    assert found.difference.endswith(CUT)
    assert text.startswith(found.difference.removesuffix(CUT))
