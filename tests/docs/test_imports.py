"""Documents and examples import only what is public, from the modules that are for it."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, Block, blocks
from tools.public_names import PLACES, names_of

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
PLACES_TOO = {"iris_ray.client": {"IrisClient", "JobHandle"}}


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield each module of ours that a piece of code imports from, and the name; "": the module itself."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "iris_ray":
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "iris_ray")


def hidden(code: str) -> list[tuple[str, str]]:
    """Return what a piece of code imports that is not public."""
    return [
        (module, name)
        for module, name in imports(code)
        if name not in {"", *PLACES_TOO.get(module, ()), *(names_of(module) if module in PLACES else ())}
        or (not name and module not in PLACES)
    ]


@pytest.mark.parametrize("block", [block for block in blocks("python") if "docs/design/" not in str(block)], ids=str)
def test_block_imports_what_is_public(block: Block) -> None:
    assert hidden(textwrap.dedent(block.text)) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_imports_what_is_public(example: Path) -> None:
    assert hidden(example.read_text()) == []


def test_name_of_another_module_is_hidden() -> None:
    assert hidden("from iris_ray.model.topology import get_tpu_config") == [
        ("iris_ray.model.topology", "get_tpu_config")
    ]
