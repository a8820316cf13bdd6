"""What travels of a directory, what does not, and the copy on a host."""

import os
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from iris_ray.dev import code_directory
from iris_ray.dev.code_copy import CodeCopy
from iris_ray.dev.code_directory import CodeDirectory
from iris_ray.errors import InvalidRequestError


def git(path: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=path, check=True)


def write(path: Path, **files: str) -> None:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "here"
    path.mkdir()
    return path


@pytest.mark.parametrize("is_checkout", [True, False])
def test_directory_travels_without_what_git_ignores(here: Path, is_checkout: bool) -> None:
    write(here, **{"train.py": "1", "lib/a.py": "2", "data/big": "3", "lib/x.log": "4", ".gitignore": "data/\n"})
    write(here, **{"lib/.gitignore": "*.log\n", "gone.py": "5", "__pycache__/a.pyc": "6", "inner/b.py": "7"})
    if is_checkout:
        git(here, "init", "--quiet")
        git(here, "add", "train.py", "gone.py")
        git(here / "inner", "init", "--quiet")  # a checkout within, which git does not list
    (here / "gone.py").unlink()
    found = CodeDirectory.look(here)
    assert set(found.files) == {".gitignore", "train.py", "lib/a.py", "lib/.gitignore", "inner/b.py"}
    assert not found.left_out


SECRET_NAMES = (
    ".env", ".env.local", "prod.env", "x/.envrc", "deploy/id_ed25519", "x/tls.KEY", "service-account-7.json",
    "gcp-key.json", ".npmrc", ".dockercfg", "hf_token", ".hf.token", "token.txt", "hf_token.txt",
    ".env-prod", "prod.env.local", "kaggle.json",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_file_that_looks_like_secret_stays_here(here: Path, name: str) -> None:
    harmless = {".env.example", "example.env", "x/sample.env", "secrets.py", "tokens.txt", "special_tokens_map.json"}
    write(here, **{name: "s3cr3t"}, **dict.fromkeys(harmless, "NAME="))
    found = CodeDirectory.look(here)
    assert set(found.files) == harmless
    assert found.left_out == (f"{name} (looks like a secret)",)
    assert name in found.in_words()


def test_large_file_and_link_that_leaves_stay_here(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_directory, "MOST_FILE_BYTES", 10)
    write(here, **{"data.bin": "x" * 11, "a.py": "1"})
    (here / "away").symlink_to("../../etc")
    (here / "root").symlink_to("/etc")
    (here / "within").symlink_to("a.py")
    os.mkfifo(here / "fifo")  # git does not list it
    found = CodeDirectory.look(here)
    assert {name: file.link for name, file in found.files.items()} == {"a.py": None, "within": "a.py"}
    leaves = "a link that leaves the directory"
    assert found.left_out == (f"away ({leaves})", "data.bin (11 bytes)", f"root ({leaves})")


@pytest.mark.parametrize(
    ("limit", "what"),
    [("MOST_BYTES", "has 101 bytes, and at most 100 bytes"), ("MOST_FILES", "has 202 files, and at most 100")],
)
def test_directory_too_large_is_refused_with_largest(
    here: Path, monkeypatch: pytest.MonkeyPatch, limit: str, what: str
) -> None:
    monkeypatch.setattr(code_directory, limit, 100)
    for number in range(101):
        write(here, **{f"data/{number}": "x", f"more{number % 3}/{number}": ""})
    with pytest.raises(InvalidRequestError, match=rf"{what}.*largest parts are data"):
        CodeDirectory.look(here)


def test_odd_names_travel_and_are_said_without_control_characters(here: Path) -> None:
    write(here, **{"two\nlines.py": "1", "\x1b[31mred.key": "2", "a b.py": "3"})
    Path(os.fsdecode(os.fsencode(here) + b"/\xff.py")).write_text("4")
    found = CodeDirectory.look(here)
    assert set(found.files) == {"two\nlines.py", "a b.py"}
    assert found.left_out == (r"'\x1b[31mred.key' (looks like a secret)", r"'\udcff.py' (its name is not UTF-8)")
    assert found.in_words().isprintable()


def test_package_has_what_travels_and_same_bytes_for_same_files(here: Path) -> None:
    names = {"train.py": "1", "lib/run.sh": "2", "tls (1).key": "s3cr3t", "w[1].pem": "s3cr3t", ".ssh/x": "s3cr3t"}
    write(here, **names)
    (here / "lib/run.sh").chmod(0o755)
    for link, to in {"link.py": "train.py", "plain": "w[1].pem", "again": ".", "more": ".ssh", "gone": "x"}.items():
        (here / link).symlink_to(to)
    (here / "chain").symlink_to("plain")
    packages = []
    for _ in range(2):
        with CodeDirectory.look(here).package() as path:
            packages.append(path.read_bytes())
            with zipfile.ZipFile(path) as package:
                assert {name: package.read(name) for name in package.namelist()} == {
                    "train.py": b"1", "lib/run.sh": b"2", "link.py": b"1"
                }  # fmt: skip
                assert oct(package.getinfo("lib/run.sh").external_attr >> 16) == "0o755"
        write(here, **names)  # only their times change
        (here / "lib/run.sh").chmod(0o755)
    assert packages[0] == packages[1]
    assert not path.exists()


def test_file_behind_a_link_in_place_of_its_directory_stays_here(here: Path, tmp_path: Path) -> None:
    write(here, **{"lib/a.py": "1", "part/b.py": "2", "train.py": "3"})
    git(here, "init", "--quiet")
    git(here, "add", ".")
    (here / "lib").rename(tmp_path / "elsewhere")
    (here / "lib").symlink_to(tmp_path / "elsewhere")
    (here / "part").rename(tmp_path / "part")
    write(here, part="now a file")
    found = CodeDirectory.look(here)
    assert set(found.files) == {"train.py", "part"}
    assert found.left_out == ("lib (a link that leaves the directory)",)


def test_links_that_no_package_holds_are_said(here: Path) -> None:
    write(here, **{"train.py": "1", "lib/data.txt": "2", ".env": "s3cr3t"})
    for link, to in {"link.py": "train.py", "again": "lib", "plain": ".env"}.items():
        (here / link).symlink_to(to)
    said = CodeDirectory.look(here).in_words()
    assert said.startswith("3 files, ")
    assert said.endswith(
        "; left out: .env (looks like a secret), again (a link to a directory), plain (a link to what is not sent)"
    )


def test_tracked_file_that_is_ignored_is_found_in_sent_directory(here: Path, tmp_path: Path) -> None:
    write(here, **{"train.py": "1", "data/vocabulary": "2", "data/big": "3", ".gitignore": "data/\n"})
    git(here, "init", "--quiet")
    git(here, "add", "--force", "data/vocabulary")
    there = tmp_path / "there"
    with CodeDirectory.look(here).package() as path, zipfile.ZipFile(path) as package:
        package.extractall(there)
    assert set(CodeDirectory.look(there, is_sent=True).files) == {"train.py", "data/vocabulary", ".gitignore"}
    git(there, "init", "--quiet")  # a clone that a script has made there
    assert set(CodeDirectory.look(there, is_sent=True).files) == {"train.py", ".gitignore"}


def test_ten_gigabytes_are_refused_before_they_are_read(here: Path) -> None:
    for number in range(170):
        with open(here / f"part-{number}", "wb") as file:
            file.truncate(60_000_000)
    with open(here / "whole", "wb") as file:
        file.truncate(10_000_000_000)
    with pytest.raises(InvalidRequestError, match=r"has 10,200.0 MB, and at most 512.0 MB travel.*parts are part-"):
        CodeDirectory.look(here)
    (here / ".gitignore").write_text("part-*\n")
    assert CodeDirectory.look(here).left_out == ("whole (10,000.0 MB)",)


class Travels:
    """A directory and its copy."""

    def __init__(self, here: Path, there: Path) -> None:
        self.here, self.there = here, there
        there.mkdir()

    def send(self) -> int:
        """Bring the copy up to date, as a new process does each time. Return how many files travelled."""
        code, copy = CodeDirectory.look(self.here), CodeCopy(self.there)
        wanted = list(code.files.values())
        missing = copy.missing(wanted)
        by_digest = {file.digest: file for file in wanted}
        copy.update(wanted, {digest: code.content(by_digest[digest]) for digest in missing})
        assert CodeCopy(self.there).missing(wanted) == []
        return len(missing)

    def copied(self) -> dict[str, str]:
        paths = (path for path in (self.there / "code").rglob("*") if path.is_file())
        return {str(path.relative_to(self.there / "code")): path.read_text() for path in paths}


@pytest.fixture
def travels(here: Path, tmp_path: Path) -> Travels:
    return Travels(here, tmp_path / "there")


def test_only_changed_files_travel_and_outputs_stay(travels: Travels) -> None:
    write(travels.here, **{"a.py": "1", "lib/b.py": "2", "lib/c.py": "2", "old/d.py": "3"})
    assert travels.send() == 3  # the same content travels once
    write(travels.there / "code", **{"lib/out.txt": "of the program", "a.py": "changed by the program"})
    write(travels.here, **{"lib/b.py": "4"})
    (travels.here / "old/d.py").unlink()
    (travels.here / "lib/c.py").chmod(0o755)
    assert travels.send() == 3
    assert travels.copied() == {"a.py": "1", "lib/b.py": "4", "lib/c.py": "2", "lib/out.txt": "of the program"}
    assert not (travels.there / "code/old").exists()
    assert os.access(travels.there / "code/lib/c.py", os.X_OK)
    assert travels.send() == 0


def test_file_directory_and_link_take_each_others_place(travels: Travels) -> None:
    write(travels.here, **{"a": "file", "b/c": "inner", "d": "1"})
    (travels.here / "e").symlink_to("d")
    travels.send()
    (travels.here / "a").unlink()
    write(travels.here, **{"a/x": "now a directory"})
    (travels.here / "b/c").unlink()
    (travels.here / "b").rmdir()
    (travels.here / "b").symlink_to("a")
    (travels.here / "e").unlink()
    write(travels.here, e="2")
    travels.send()
    assert travels.copied() == {"a/x": "now a directory", "d": "1", "e": "2"}
    assert os.readlink(travels.there / "code/b") == "a"


def test_what_python_has_compiled_is_never_stale(travels: Travels) -> None:
    write(travels.here, **{"m.py": "x = 1"})
    travels.send()
    module = travels.there / "code/m.py"
    py_compile.compile(str(module))
    before = module.stat().st_mtime
    write(travels.here, **{"m.py": "x = 2"})
    travels.send()
    os.utime(module, (before, before))  # within the same second, to Python
    done = subprocess.run(
        [sys.executable, "-c", "import m; print(m.x)"], cwd=module.parent, capture_output=True, text=True
    )
    assert done.stdout == "2\n"


def test_path_that_leaves_copy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="points outside"):
        CodeCopy(tmp_path).update([code_directory.CodeFile("../x", "0", 1)], {"0": b"x"})
