"""What the documents name in backticks exists: files, modules, classes, functions, variables; links lead somewhere."""

import ast
import builtins
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from iris_ray.evidence.core import FILES as EVIDENCE_FILES
from iris_ray.model.job_info import JobInfo
from tests.docs.pages import PAGES, REPOSITORY, anchors, inline_code, links

SOURCES = [
    path
    for folder in ("iris_ray", "tests", "benchmarks", "examples")
    for pattern in ("*.py", "*.pyi")
    for path in sorted((REPOSITORY / folder).rglob(pattern))
    if Path(__file__).parent not in path.parents
]
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
SUFFIXES = (".py", ".pyi", ".md", ".txt", ".toml", ".png", ".svg", "/")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
OBJECTS = {
    "run_on_pod_ray": "_RunOnPodRay",
    "notice": "PreemptionNotice",
    "job": "JobHandle",
    "client": "IrisClient",
    "cluster": "SimulatedCluster",
    "kubernetes": "KubernetesWorld",
    "state": "ControllerState",
    "controller": "Controller",
}
"""Names of variables in examples, and their classes."""
FOREIGN = {
    "concurrent",
    "emergency",
    "fray",
    "functools",
    "general",
    "jax",
    "levanter",
    "math",
    "os",
    "pickle",
    "ray",
    "sys",
}
"""Packages of others; and `general`, of the keys of GGUF."""
READERS = {".gitignore", ".rayignore", "dist/", "train.py", "prepare.py", ".venv", "lock/", "/tmp", *EVIDENCE_FILES}
"""Files of the reader's or of a host's, which are not in this repository."""
CAMEL = re.compile(r"(?:[A-Z]+[a-z0-9]+){2,}[A-Z]*")
CAPITALS = re.compile(r"IRIS_[A-Z_]+|[A-Z]+(?:_[A-Z]+)+")
OF_OTHERS = {"ReplicatorCheckpointManager", "StrEnum", "TrainerConfig", *vars(builtins)}
OF_A_TASK = {f"IRIS_{field.upper()}" for field in JobInfo.__dataclass_fields__}


@cache
def index() -> dict[str, set[str]]:
    """Modules and classes by their own names → the names defined in them. Names of other modules are imports."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        module = path.parent.name if path.stem == "__init__" else path.stem
        found[module] |= set(defined(ast.parse(path.read_text()).body, found))
    return found


def defined(body: list[ast.stmt], found: defaultdict[str, set[str]]) -> Iterator[str]:
    """The names that statements define; classes among them go into ``found``, with theirs."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield inner.attr  # self.name = …
        elif isinstance(node, ast.ClassDef):
            yield node.name
            found[node.name] |= set(defined(node.body, found))
            found[node.name] |= {name for base in node.bases for name in found.get(ast.unparse(base), ())}
        elif isinstance(node, ast.Assign):
            yield from (name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


@cache
def everything() -> str:
    """The text of all sources, for names that are strings in them."""
    return "\n".join(path.read_text() for path in SOURCES)


def file_exists(path: str, page: Path) -> bool:
    roots = (REPOSITORY, REPOSITORY / "iris_ray", REPOSITORY / "iris_ray" / "actors", page.parent)
    known = any((root / path).exists() for root in roots)
    return known or ("/" not in path and any(source.name == path for source in SOURCES))


def name_exists(dotted: str) -> bool:
    first, *rest = dotted.split(".")
    if first == "iris_ray" and rest:
        return leads_somewhere(dotted)
    if first in FOREIGN:
        return find_spec(first) is None or leads_somewhere(dotted)  # some are not installed everywhere
    for name in rest:
        if name not in index().get(OBJECTS.get(first, first), ()):
            modules = (root / Path(*dotted.split(".")) for root in (REPOSITORY / "iris_ray", REPOSITORY))
            return any(one.exists() or one.with_suffix(".py").exists() for one in modules)  # such as model.jobs
        first = name
    return True


def leads_somewhere(dotted: str) -> bool:
    """Whether importing and looking up attributes reaches the name."""
    parts = dotted.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for name in parts[i:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def wrong(code: str, page: Path) -> bool:
    """Whether a piece of code in backticks names something of ours that is not there."""
    if code in READERS or any(mark in code for mark in ("...", *"<>=…*:")):
        return False
    if PATH.fullmatch(code) and code.endswith(SUFFIXES):
        return not file_exists(code, page)
    called = code.partition("(")[0]
    if DOTTED.fullmatch(called):
        return not name_exists(called)
    if CAMEL.fullmatch(called):
        return called not in index() and called not in OF_OTHERS
    if CAPITALS.fullmatch(called):
        return called not in OF_A_TASK and called not in everything()
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_names_in_backticks_exist(page: Path) -> None:
    missing = sorted({code for code in inline_code(page) if wrong(code, page)})
    assert not missing, f"{page.relative_to(REPOSITORY)} names what does not exist: {', '.join(missing)}"


def test_guide_has_every_environment_variable() -> None:
    ours = [path for path in SOURCES if path.is_relative_to(REPOSITORY / "iris_ray")]
    literals = {name for path in ours for name in re.findall(r'"(IRIS_[A-Z_]+)"', path.read_text())}
    listed = set(inline_code(REPOSITORY / "docs" / "environment.md"))
    assert sorted((literals | OF_A_TASK) - listed) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        linked = page.parent / target if target else page
        assert linked.exists(), link
        assert not anchor or anchor in anchors(linked), link


@pytest.mark.parametrize(
    "code",
    [
        "actors/pool/no_such_file.py",
        "no_such_file.py",
        "docs/no-such-page.md",
        "SimulatedCluster.no_such_method",
        "job.no_such_method()",
        "iris_ray.no_such_name",
        "ray.no_such_name",
        "NoSuchClass",
        "NO_SUCH_CONSTANT",
        "IRIS_NO_SUCH_VARIABLE",
    ],
)
def test_a_name_that_does_not_exist_is_found(code: str) -> None:
    assert wrong(code, REPOSITORY / "README.md")
