"""The files of a person's directory that travel: all that git does not ignore, except secrets and data."""

import contextlib
import fnmatch
import hashlib
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from iris_ray.errors import InvalidRequestError

MOST_FILE_BYTES = 64_000_000
"""The limit for a file. A larger one is data, which belongs into a bucket, and is left out."""
MOST_BYTES = 512_000_000
"""Limit for the whole directory; Ray takes packages of 2 ** 29."""
MOST_FILES = 20_000
SECRETS = (
    "*.env", ".env[.-]*", "*.env.local", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".boto",
    ".s3cfg", ".dockercfg", ".git-credentials", "credentials", "credentials.json",
    "application_default_credentials.json", "client_secret*.json", "service[-_]account*.json", "*[-_]key.json",
    "secrets.*", "token.txt", "*[-_.]token", "*[-_]token.txt", "kubeconfig", "kaggle.json",
)  # fmt: skip
"""Names of files that hold secrets, in small letters."""
HARMLESS = ("*.example", "*.sample", "*.template", "*example.env", "*sample.env", "*template.env", "*.py")
SECRET_DIRECTORIES = frozenset({".ssh", ".aws", ".gnupg", ".kube"})
NEVER = frozenset({
    ".git", "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache",
    ".ruff_cache",
})  # fmt: skip
"""Directories that are made again wherever they are needed."""
_OLDEST = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """One file of the directory.

    Attributes:
        path: in the directory.
        digest: of its content, or of the target of its link.
        size: in bytes.
        executable: whether it may be run.
        link: the target, if it is a link.
    """

    path: str
    digest: str
    size: int
    executable: bool = False
    link: str | None = None


@dataclass(frozen=True, slots=True)
class CodeDirectory:
    """The files of a directory that travel.

    Attributes:
        path: of the directory.
        files: which travel, by path.
        left_out: the others that git knows or would take, each with the reason; fit for a terminal.
    """

    path: Path
    files: Mapping[str, CodeFile]
    left_out: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    @staticmethod
    def look(
        path: Path,
        variables: str | Path | None = None,
        is_sent: bool = False,
        names: Iterable[str] | None = None,
    ) -> "CodeDirectory":
        """List a directory, and read the files that travel.

        Args:
            path: of the directory.
            variables: a file that stays here, as its variables travel apart; None: there is none.
            is_sent: whether the directory has been sent here. Then git ignores nothing in it outside of a checkout: it
                tracks some files although .gitignore names them, and the checkout that says so was not sent.
            names: its files that git tracks; None: git is asked.

        Raises:
            InvalidRequestError: it is too large; the message says what to do.
        """
        sizes: dict[str, int] = {}
        files: dict[str, CodeFile] = {}
        why_not: dict[str, str] = {}
        apart = None if variables is None else os.path.realpath(variables)
        listed = list(_listed(path, is_sent) if names is None else _kept(names))
        links = behind_links(path, listed)
        for name in listed:
            if os.path.dirname(name) in links:
                continue  # a link has taken the place of its directory
            with _noting(name, why_not):
                why, size = _why_not(path, name)
                if apart is not None and os.path.realpath(path / name) == apart:
                    why_not[name] = "its variables travel apart"
                elif why is None:
                    sizes[name] = size
                else:
                    why_not[name] = why
        _require_small(path, sizes)  # before they are read
        for name in sizes:
            with _noting(name, why_not):
                files[name] = _read(path, name)
        return CodeDirectory(path, files, tuple(f"{_printable(n)} ({why_not[n]})" for n in sorted(why_not)))

    def _packed(self) -> "CodeDirectory":
        """Return the directory without links to anything but its files: in a package, a link becomes a copy."""
        whole, files, links = os.path.realpath(self.path), dict(self.files), list[str]()
        for name, file in self.files.items():
            found = os.path.realpath(self.path / name)
            if os.path.isfile(found) and (file.link is None or os.path.relpath(found, whole) in self.files):
                continue
            del files[name]
            if file.link is not None:
                what = "a link to a directory" if os.path.isdir(found) else "a link to what is not sent"
                links.append(f"{_printable(name)} ({what})")
        return CodeDirectory(self.path, files, tuple(sorted((*self.left_out, *links))))

    @contextlib.contextmanager
    def package(self) -> Iterator[Path]:
        """Yield the path of a package that Ray sends and unpacks. The same files make the same one: it is sent once."""
        with tempfile.TemporaryDirectory(prefix="iris-ray-") as directory:
            path = Path(directory, "code.zip")
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
                for file in self._packed().files.values():
                    entry = zipfile.ZipInfo(file.path, _OLDEST)
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    entry.external_attr = (0o755 if file.executable else 0o644) << 16
                    package.writestr(entry, self.content(file))
            yield path

    def content(self, file: CodeFile) -> bytes:
        """Return the present content of a file."""
        return (self.path / file.path).read_bytes()

    def in_words(self, sent: int | None = None, sent_bytes: int = 0) -> str:
        """Return its size and the files that were left out, in a line.

        Args:
            sent: the number of files that had to be sent; None: all, in a package.
            sent_bytes: their size.
        """
        if sent is None and (packed := self._packed()) != self:
            return packed.in_words()
        count = len(self.files)
        files = f"{'' if sent is None else f'{sent} of '}{count} file{'s' * (count != 1)}"
        shown = [*self.left_out[:4], *([f"{len(self.left_out) - 4} more"] if self.left_out[4:] else [])]
        without = f"; left out: {', '.join(shown)}" if shown else ""
        return f"{files}, {in_bytes(self.size if sent is None else sent_bytes)}{without}"


def in_bytes(size: int) -> str:
    return f"{size:,} bytes" if size < 10_000 else f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


def _printable(name: str) -> str:
    """Return a file's name for a terminal: quoted if it has control characters, or is not Unicode."""
    return name if name.isprintable() else repr(name)


@contextlib.contextmanager
def _noting(name: str, why_not: dict[str, str]) -> Iterator[None]:
    """Note a file that can't be read."""
    try:
        yield
    except PermissionError:
        why_not[name] = "this account may not read it"
    except (FileNotFoundError, NotADirectoryError):
        pass  # git knows it, or knew it a moment ago


def behind_links(path: Path, names: Iterable[str]) -> set[str]:
    """Return the directories of files that lie behind a link: what is there belongs to another directory."""
    top = os.path.realpath(path)
    folders = {os.path.dirname(name) for name in names}
    return {one for one in folders if os.path.realpath(path / one) != os.path.normpath(os.path.join(top, one))}


def _require_small(path: Path, sizes: Mapping[str, int]) -> None:
    total = sum(sizes.values())
    if total <= MOST_BYTES and len(sizes) <= MOST_FILES:
        return
    by_top: dict[str, int] = {}
    for name, size in sizes.items():
        top = name.partition("/")[0]
        by_top[top] = by_top.get(top, 0) + size
    largest = sorted(by_top, key=by_top.__getitem__)[:-4:-1]
    parts = ", ".join(f"{_printable(name)} ({in_bytes(by_top[name])})" for name in largest)
    what = f"{in_bytes(total)}, and at most {in_bytes(MOST_BYTES)}"
    if total <= MOST_BYTES:
        what = f"{len(sizes):,} files, and at most {MOST_FILES:,}"
    raise InvalidRequestError(
        f"{path} has {what} travel, as far as its .gitignore lets them; the largest parts are {parts}. Name data in"
        " .gitignore, keep it in a bucket, or work in a smaller directory"
    )


def looks_secret(name: str) -> bool:
    """Return whether a file of this path has the name of one that holds secrets."""
    parts = name.lower().split("/")
    if SECRET_DIRECTORIES & {*parts}:
        return True
    fits = (any(fnmatch.fnmatchcase(parts[-1], pattern) for pattern in patterns) for patterns in (SECRETS, HARMLESS))
    return next(fits) and not next(fits)


def secrets_in_words(names: Sequence[str], travel: bool) -> str:
    """Return a line about files that look like secrets, fit for a terminal."""
    more = f" and {len(names) - 4} more" if names[4:] else ""
    how = "are sent as well" if travel else "are left out"
    return f"files that look like secrets {how}: {', '.join(map(_printable, sorted(names)[:4]))}{more}"


def _why_not(path: Path, name: str) -> tuple[str | None, int]:
    """Return why a file does not travel, or None, and its size."""
    found = os.lstat(path / name)
    if looks_secret(name):
        return "looks like a secret", 0
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8", 0
    if os.path.islink(path / name):
        target = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(path / name)))
        leaves = os.path.isabs(target) or target.split("/")[0] == ".."
        return ("a link that leaves the directory" if leaves else None), 0
    if not os.path.isfile(path / name):
        return "no file", 0
    return (in_bytes(found.st_size) if found.st_size > MOST_FILE_BYTES else None), found.st_size


def _read(path: Path, name: str) -> CodeFile:
    full = path / name
    if os.path.islink(full):
        link = os.readlink(full)
        return CodeFile(name, hashlib.sha256(os.fsencode(link)).hexdigest(), 0, link=link)
    with open(full, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        found = os.fstat(file.fileno())
    return CodeFile(name, digest.hexdigest(), found.st_size, bool(found.st_mode & 0o100))


# -- git ---------------------------------------------------------------------------------------------------------------


def git(path: Path, *words: str, **environ: str) -> bytes | None:
    """Return the output of git in a directory; None without git, or if it fails, as it does outside a checkout."""
    try:
        done = subprocess.run(["git", "-C", str(path), *words], capture_output=True, env={**os.environ, **environ})
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def git_says(path: Path, *words: str) -> str:
    """Return the line that git prints, such as a path; "" if `git` returns None."""
    return os.fsdecode(git(path, *words) or b"").removesuffix("\n")


def _listed(path: Path, is_sent: bool = False) -> Iterator[str]:
    """Yield the files of a directory that git tracks or would track, in a checkout or not. Without git: all files.

    ``is_sent`` is as for `CodeDirectory.look`.
    """
    words = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    found = git(path, *words)
    if is_sent:
        found = found or None
    elif not found:  # no checkout, or a directory that a checkout ignores as a whole
        with tempfile.TemporaryDirectory(prefix="iris-ray-") as empty:
            git(path, "init", "--quiet", empty)
            found = git(path, *words, GIT_DIR=f"{empty}/.git", GIT_WORK_TREE=str(path))
    names = _all(path) if found is None else [os.fsdecode(one) for one in found.split(b"\0") if one]
    for name in _kept(names):
        if os.path.isdir(path / name) and not os.path.islink(path / name):  # a checkout within this one
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _listed(path / name))
        else:
            yield name


def _kept(names: Iterable[str]) -> Iterator[str]:
    """Yield the names that are in none of the directories `NEVER`, in order."""
    return (name for name in sorted(names) if not NEVER & {*name.split("/")[:-1]})


def _all(path: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(path):
        folders[:] = {*folders} - NEVER
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (os.path.relpath(os.path.join(folder, name), path) for name in (*files, *links))


def as_wire(files: Sequence[CodeFile]) -> list[list[object]]:
    """Return files as they travel in facts."""
    return [[file.path, file.digest, file.executable, file.link] for file in files]
