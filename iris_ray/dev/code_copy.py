"""The copy of a person's directory on a held host: only changed files are sent, and files of programs stay."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from iris_ray.actors.protocol.task_files import write_whole
from iris_ray.dev.code_directory import CodeFile


@dataclass(frozen=True, slots=True)
class _Written:
    """A file as it was written. If a program has changed it since, it is written again."""

    digest: str
    mtime_ns: int
    size: int


class CodeCopy:
    """A copy of a directory.

    Args:
        directory: holds the copy, and a record of its files.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "code"
        self._record = directory / "code.json"
        self._known: dict[str, _Written] = {}
        self.path.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._known = {name: _Written(*one) for name, one in json.loads(self._record.read_text()).items()}

    def missing(self, wanted: Sequence[CodeFile]) -> list[str]:
        """Return the digests of the contents that this copy lacks, each once."""
        return list(dict.fromkeys(file.digest for file in self._differing(wanted) if file.link is None))

    def update(self, wanted: Sequence[CodeFile], contents: Mapping[str, bytes]) -> None:
        """Make this copy that of a directory.

        Args:
            wanted: all files of the directory.
            contents: the contents for the digests that `missing` returned.

        Raises:
            OSError: a file can't be written.
            ValueError: a path leaves the copy.
        """
        for file in wanted:
            if PurePosixPath(file.path).is_absolute() or ".." in PurePosixPath(file.path).parts:
                raise ValueError(f"{file.path} points outside the directory")
        differing = self._differing(wanted)
        gone = self._known.keys() - {file.path for file in wanted}
        if differing:  # a file that this process leaves half written, or doesn't name any more, is still the person's
            self._known |= dict.fromkeys((file.path for file in differing), _Written("", 0, 0))
            self._write_record()
        for name in sorted(gone, reverse=True):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):  # the program's doing
                (self.path / name).unlink()
            with contextlib.suppress(OSError):
                for parent in PurePosixPath(name).parents[:-1]:
                    (self.path / parent).rmdir()  # stops at the first that is not empty
            del self._known[name]
        for file in differing:
            self._known[file.path] = self._write(file, contents.get(file.digest, b""))
        if gone or differing:
            self._write_record()

    def _write_record(self) -> None:
        facts = {name: [one.digest, one.mtime_ns, one.size] for name, one in self._known.items()}
        write_whole(self._record, json.dumps(facts).encode())

    def _differing(self, wanted: Sequence[CodeFile]) -> list[CodeFile]:
        return [file for file in wanted if not self._is_here(file)]

    def _is_here(self, file: CodeFile) -> bool:
        known = self._known.get(file.path)
        if known is None or known.digest != file.digest:
            return False
        try:
            found = os.lstat(self.path / file.path)
        except OSError:
            return False
        as_written = (found.st_mtime_ns, found.st_size) == (known.mtime_ns, known.size)
        return as_written and (file.link is not None or bool(found.st_mode & 0o100) == file.executable)

    def _write(self, file: CodeFile, content: bytes) -> _Written:
        full = self.path / file.path
        for parent in reversed(PurePosixPath(file.path).parents[:-1]):
            if (self.path / parent).is_symlink() or (self.path / parent).is_file():
                (self.path / parent).unlink()
        full.parent.mkdir(parents=True, exist_ok=True)
        if full.is_dir() and not full.is_symlink():
            shutil.rmtree(full)
        full.unlink(missing_ok=True)  # a link would be written through
        digest = file.digest
        if file.link is not None:
            full.symlink_to(file.link)
        else:
            full.write_bytes(content)
            full.chmod(0o755 if file.executable else 0o644)
            digest = hashlib.sha256(content).hexdigest()  # it may have been edited while it was sent
            for compiled in full.parent.glob(f"__pycache__/{full.stem}.*.pyc"):
                compiled.unlink()  # Python would take it for up to date, within the same second
        found = os.lstat(full)
        return _Written(digest, found.st_mtime_ns, found.st_size)
