"""A checkout that travels with a job: its package, and the record of its code."""

import random
import subprocess
import zipfile
from pathlib import Path

import pytest

from iris_ray.dev.checkout import CUT, MOST_STORED_BYTES, Checkout, CodeRecord
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


def test_package_has_same_bytes_for_same_files(here: Path) -> None:
    (here / "link.py").symlink_to("train.py")
    (here / "library").symlink_to("lib")
    (here / "settings").symlink_to(".env")  # it stays here, and so does what it is called besides
    edit(here)
    found = Checkout.of(here)
    assert found is not None
    packages = []
    for _ in range(2):
        with found.package() as path:
            packages.append(Path(path).read_bytes())
            with zipfile.ZipFile(path) as package:
                names = {entry.filename: oct(entry.external_attr >> 16) for entry in package.infolist()}
                assert package.read("link.py") == b"a = 2\n"
    assert packages[0] == packages[1]
    assert set(names) == {".gitignore", "train.py", "new.py", "run.sh", "staged.py", "link.py"}
    assert names["run.sh"] == "0o755"


def test_directory_outside_of_checkout_is_none(here: Path, tmp_path: Path) -> None:
    assert Checkout.of(tmp_path) is None
    (here / "data").mkdir()
    assert Checkout.of(here / "data") is None  # git ignores it
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "--quiet")
    assert Checkout.of(tmp_path / "empty") is None  # no commit yet


def test_large_difference_is_cut_and_says_so() -> None:
    text = "\n".join(f"+{random.Random(n).random()}" for n in range(20_000))
    stored = CodeRecord("1" * 40, "main", text, "1 files").to_bytes()
    assert len(stored) <= MOST_STORED_BYTES
    found = CodeRecord.of_bytes(stored)
    assert found.difference.endswith(CUT)
    assert text.startswith(found.difference.removesuffix(CUT))
