"""Calls of public functions on the pages have parameters that exist; a table of calls has their defaults."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, REPOSITORY, blocks, inline_code, tokens
from tests.docs.test_names import OBJECTS
from tools.public_names import public

PUBLIC = {name.rpartition(".")[2]: what for name, what in reversed(public().items())}


def callee(function: ast.expr) -> Any:
    """Return the public function, class or method that is called, or None."""
    if isinstance(function, ast.Name):
        return PUBLIC.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = PUBLIC.get(OBJECTS.get(function.value.id, function.value.id))
        return getattr(owner, function.attr, None) or (
            PUBLIC.get(function.attr) if function.value.id == "iris_ray" else None
        )
    return None


def calls(code: str) -> Iterator[tuple[ast.Call, inspect.Signature]]:
    """Yield the calls of public functions in a piece of code, with their signatures."""
    try:
        tree = ast.parse(code.replace("…", "..."))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and callable(called := callee(node.func)):
            yield node, inspect.signature(called)


def unknown(code: str) -> list[str]:
    """Return the keywords in a piece of code that no parameter has."""
    return [
        f"{ast.unparse(call.func)} takes no {keyword.arg}"
        for call, signature in calls(code)
        if not any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
        for keyword in call.keywords
        if keyword.arg is not None and keyword.arg not in signature.parameters
    ]


def tables_of_calls(page: Path) -> Iterator[str]:
    """Yield the code in the first column of tables that are headed "call"."""
    column, is_of_calls = 0, False
    for token in tokens(page):
        if token.type == "table_open":
            is_of_calls = False
        column = 0 if token.type == "tr_open" else column + (token.type in ("td_open", "th_open"))
        if token.type == "inline" and column == 1:
            is_of_calls |= token.content == "call"
            yield from (one.content for one in token.children or () if one.type == "code_inline" and is_of_calls)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_parameters_in_backticks_exist(page: Path) -> None:
    assert [wrong for code in inline_code(page) for wrong in unknown(code)] == []


@pytest.mark.parametrize("block", [*blocks("python"), *blocks("text", "py")], ids=str)
def test_parameters_in_blocks_exist(block: Any) -> None:
    assert unknown(block.text) == []


def other_than(code: str) -> list[str]:
    """Return how a signature that is written as a call, such as ``f(x, y=1)``, differs from the code's."""
    return [
        difference
        for call, signature in calls(code)
        if all(isinstance(argument, ast.Name) for argument in call.args if ast.unparse(argument) != "...")
        for difference in differences(call, signature)
    ]


def differences(call: ast.Call, signature: inspect.Signature) -> Iterator[str]:
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    for argument, parameter in zip(call.args, parameters, strict=False):
        if isinstance(argument, ast.Name) and argument.id != parameter.name:
            yield f"{argument.id} is called {parameter.name}"
    for keyword in call.keywords:
        default = (
            signature.parameters[keyword.arg].default if keyword.arg and keyword.arg in signature.parameters else ...
        )
        if isinstance(keyword.value, ast.Constant) and keyword.value.value not in (default, ...):
            yield f"{keyword.arg} is {default!r} by default"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_table_of_calls_has_the_names_and_defaults_of_the_code(page: Path) -> None:
    assert [wrong for code in tables_of_calls(page) for wrong in other_than(code)] == []


def test_parameter_that_does_not_exist_is_found() -> None:
    assert unknown("run_on_pod(train, 'v4-16', num_slice=2)") == ["run_on_pod takes no num_slice"]
    assert unknown("client.submit(train, no_such=1)") == ["client.submit takes no no_such"]


def test_other_names_and_defaults_are_found() -> None:
    assert other_than("run_on_pod(fn, tpu_type, num_slices=2)") == [
        "fn is called remote_fn",
        "num_slices is 1 by default",
    ]
    assert other_than("run_on_pod(train, 'v4-16', num_slices=2)") == []  # an example
