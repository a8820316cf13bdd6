"""A checkout that travels with a job, and the commit and difference that people see."""

import importlib.util
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from iris_ray.dev.code_directory import CodeDirectory, behind_links, git, git_says, looks_secret
from iris_ray.errors import InvalidMessageError

MOST_STORED_BYTES = 48 << 10
"""The limit for a compressed record, which lies in the memory of the cluster's GCS: a longer difference is cut."""
MOST_BYTES = 16 << 20
"""The limit for a record that was unpacked: a few bytes can be packed gigabytes."""
WHOLE = "all of --working-dir except what its .gitignore and .rayignore name, also files that look like secrets"
"""What `CodeRecord.sent` says of a directory that the user has named."""
CUT = "\n… cut here: the difference is too large to be kept\n"


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """Which code a job has run.

    Attributes:
        commit, branch: of the checkout; the branch is empty if none is checked out.
        difference: between the commit and the sent files, as ``git diff`` shows it, with files that git does not track
            yet. It has the content of binary files if the record has room for it; bytes that are not UTF-8 are
            surrogates, as ``surrogateescape`` makes them.
        sent: the number of sent files and the names of files that were left out, in words; or `WHOLE`.
    """

    commit: str
    branch: str
    difference: str
    sent: str

    def __str__(self) -> str:
        lines = [line for line in self.difference.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        branch = f" ({self.branch})" if self.branch else ""
        changed = f" and {len(lines)} changed line{'s' * (len(lines) != 1)}" if self.difference else ""
        return f"commit {self.commit[:12]}{branch}{changed}"

    def of_whole_directory(self) -> "CodeRecord":
        """Return the record of the same code in a directory that was sent as it is."""
        return replace(self, sent=WHOLE)

    def to_bytes(self) -> bytes:
        """Return it as it is stored, with as much of the difference as there is room for."""
        record = self
        while (stored := record._packed()) is None:
            kept = record.difference.removesuffix(CUT)
            record = replace(record, difference=kept[: len(kept) // 2] + CUT)
        return stored

    @property
    def fits(self) -> bool:
        """Whether it is stored whole."""
        return self._packed() is not None

    def _packed(self) -> bytes | None:
        text = json.dumps(asdict(self)).encode()
        stored = zlib.compress(text) if len(text) <= MOST_BYTES else None
        return None if stored is None or len(stored) > MOST_STORED_BYTES else stored

    @staticmethod
    def of_bytes(stored: bytes) -> "CodeRecord":
        """Return a record that was stored, by whomever.

        Raises:
            InvalidMessageError: it is no record.
        """
        try:
            found = json.loads(zlib.decompressobj().decompress(stored, MOST_BYTES))
            if not all(isinstance(value, str) for value in found.values()):
                raise TypeError("not all of it is text")
            return CodeRecord(**found)
        except (zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidMessageError(f"the record of the job's code can't be read: {error}") from None


@dataclass(frozen=True, slots=True)
class Checkout:
    """A directory of a checkout, and its record."""

    code: CodeDirectory
    record: CodeRecord

    @staticmethod
    def of(path: Path, variables: str | Path | None = None) -> "Checkout | None":
        """Return the checkout that a directory belongs to; None if it belongs to none, or that has no commit.

        Args:
            path, variables: as for `CodeDirectory.look`.

        Raises:
            InvalidRequestError: the directory is too large to travel.
        """
        commit = git(path, "rev-parse", "HEAD")
        if commit is None or git(path, "check-ignore", "--quiet", ".") is not None:
            return None
        code = CodeDirectory.look(path, variables)
        branch = git(path, "symbolic-ref", "--short", "HEAD") or b""
        difference = _difference(code, "--binary")
        record = CodeRecord(commit.decode().strip(), branch.decode().strip(), difference, code.in_words())
        return Checkout(code, record if record.fits else replace(record, difference=_difference(code)))


def is_unreadable(path: Path) -> bool:
    """Return whether a directory lies in a checkout that git can't read, as it refuses that of another account."""
    return git(path, "rev-parse", "--git-dir") is None and any((up / ".git").exists() for up in (path, *path.parents))


def _difference(code: CodeDirectory, *options: str) -> str:
    """Return the difference between the commit and the files that travel.

    ``options`` are more options of ``git diff``.

    Neither side has files that look like secrets. So a secret that was deleted is not shown as a removed file.
    """
    path = code.path
    changed = (git(path, "diff", "--relative", "--name-only", "-z", "HEAD", "--", ".") or b"").split(b"\0")
    new = (git(path, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")
    flagged = (git(path, "ls-files", "-v", "-z") or b"").split(b"\0")
    overlooked = (line[2:] for line in flagged if line[:1] == b"S" or line[:1].islower())  # as a person told git
    names = {name for name in map(os.fsdecode, (*changed, *new)) if name}
    names |= {name for name in map(os.fsdecode, overlooked) if name in code.files}
    links = behind_links(path, names)
    gone = [one for one in names if os.path.dirname(one) in links or not os.path.lexists(path / one)]
    gone = [one for one in gone if not looks_secret(one)]
    there = [one for one in names if one in code.files]
    if not there and not gone:
        return ""
    with SeparateIndex.of(path, "HEAD") as index:
        if index is None or (base := index.git("write-tree")) is None:
            return ""
        index.change("rm", "--cached", "--force", "--quiet", "--ignore-unmatch", names=gone)
        index.change("add", names=there)
        plain = "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3"
        words = ("--cached", *plain, base.decode().strip(), "--", ".")
        of_root = "-c", "diff.relative=false"
        return (index.git(*of_root, "diff", *options, *words) or b"").decode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class SeparateIndex:
    """An index for a directory of a checkout, in place of git's own. Git's index and objects stay as they are.

    Attributes:
        path: of the directory.
        own: a temporary directory, with the index and new objects.
        environ: environment variables for git.
    """

    path: Path
    own: Path
    environ: Mapping[str, str]

    @staticmethod
    @contextmanager
    def of(path: Path, commit: str) -> "Iterator[SeparateIndex | None]":
        """Yield an index of a commit's files, without those that look like secrets; None: there is no such commit."""
        objects = path / git_says(path, "rev-parse", "--git-path", "objects")
        with tempfile.TemporaryDirectory(prefix="iris-ray-") as own:
            environ = {
                "GIT_INDEX_FILE": f"{own}/index",
                "GIT_OBJECT_DIRECTORY": own,
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": _quoted(str(objects.resolve())),
            }
            index = SeparateIndex(path, Path(own), environ)
            if index.git("read-tree", "--end-of-options", commit) is None:
                yield None
                return
            index.change("rm", "--cached", "--force", "--quiet", names=list(filter(looks_secret, index.names())))
            yield index

    def git(self, *words: str, path: Path | None = None) -> bytes | None:
        """Return the output of git as `git` does, in this directory or another one of the checkout."""
        return git(path or self.path, *words, **self.environ)

    def names(self) -> list[str]:
        """Return the names of its files in the directory."""
        return [os.fsdecode(name) for name in (self.git("ls-files", "-z") or b"").split(b"\0") if name]

    def change(self, *words: str, names: Sequence[str]) -> None:
        """Have git change the index for some files, if there are any."""
        if not names:
            return
        given = self.own / "names"
        given.write_bytes(b"\0".join(map(os.fsencode, names)))
        no_question = "-c", "core.safecrlf=false"
        self.git(*no_question, "--literal-pathspecs", *words, "--pathspec-file-nul", f"--pathspec-from-file={given}")


def _quoted(path: str) -> str:
    """Return a path as git reads it in a list that colons separate."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


# -- the record of a directory that travels through the dashboard ------------------------------------------------------

_MODULE, _FILE = "iris_ray_sent_code", "record"


@contextmanager
def record_package(record: CodeRecord | None) -> Iterator[list[Path]]:
    """Yield packages that take a record to a job of Ray's job API; see `sent_record`."""
    with tempfile.TemporaryDirectory(prefix="iris-ray-") as directory:
        package = Path(directory, _MODULE)
        if record is not None:
            package.mkdir()
            (package / "__init__.py").touch()
            (package / _FILE).write_bytes(record.to_bytes())
        yield [] if record is None else [package]


def sent_record() -> CodeRecord | None:
    """Return the record that has come with this job of Ray's job API; None if none has."""
    found = importlib.util.find_spec(_MODULE)
    if found is None or found.origin is None:
        return None
    return CodeRecord.of_bytes(Path(found.origin).with_name(_FILE).read_bytes())


# -- records in the cluster --------------------------------------------------------------------------------------------


def keep_record(job_id: str, record: CodeRecord) -> None:
    """Keep the record of a job as long as the Controller knows the job. This process is in the cluster."""
    from iris_ray.actors.calls.names import code_key
    from iris_ray.actors.calls.ray_internals import ClusterStore

    ClusterStore().put(code_key(job_id), record.to_bytes())


def record_of(job_id: str) -> CodeRecord | None:
    """Return the record of a job; None if it was not submitted from a checkout."""
    from iris_ray.actors.calls.names import code_key
    from iris_ray.actors.calls.ray_internals import ClusterStore

    stored = ClusterStore().get(code_key(job_id))
    return None if stored is None else CodeRecord.of_bytes(stored)
