"""Writes docs/options.md, the reference of the options of a run, from their table: ``python -m tools.options_page``.

Which function takes an option is read from the functions' signatures.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from iris_ray import (
    IrisClient,
    run_docker_on_pod,
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from iris_ray.model.checks import Seconds
from iris_ray.model.options import OPTIONS, Option, PriorityBand

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "run_on_pod": run_on_pod,
    "run_on_pod_ray.remote": run_on_pod_ray.remote,
    "run_on_pod_resumable": run_on_pod_resumable,
    "run_on_pod_multislice": run_on_pod_multislice,
    "run_on_pod_multislice_resumable": run_on_pod_multislice_resumable,
    "run_docker_on_pod": run_docker_on_pod,
    "IrisClient.submit": IrisClient.submit,
}
HEAD = """# The options of a run

For users: every option of [`run_on_pod` and its kind](running.md), of `IrisClient.submit` and of the
[command line](command-line.md). This page is made from the table in `iris_ray/model/options.py`.

All go by name. Times are in seconds. A value that makes no sense is refused before anything is acquired. `iris-ray run`
and `iris-ray submit` take those that have a flag.
"""
_COLUMNS = ("| option | default | takes | what it does |", "|---|---|---|---|")


def options_page() -> str:
    """Return the page."""
    takers: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in OPTIONS:
        takers[tuple(f for f, call in FUNCTIONS.items() if name in inspect.signature(call).parameters)].append(name)
    parts = [HEAD]
    for functions, names in takers.items():
        parts += [f"## {_title(functions)}\n", *_COLUMNS, *(_row(name, OPTIONS[name]) for name in names), ""]
    parts += ["## Other defaults\n", "| option | default | of | why |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        for other in option.elsewhere:
            of = ", ".join(f"`{function}`" if " of " not in function else function for function in other.of)
            parts.append(f"| `{name}` | {_shown(option, other.value)} | {of} | {other.why} |")
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](\1)", "\n".join(parts)) + "\n"


def _title(functions: tuple[str, ...]) -> str:
    missing = [function for function in FUNCTIONS if function not in functions]
    if not missing:
        return "Everywhere"
    if len(missing) < len(functions):
        return f"Everywhere but in {_code(missing)}"
    return f"In {_code(functions)}"


def _code(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _row(name: str, option: Option) -> str:
    flag = f", `{option.flag}`" if option.flag else ""
    text = f"{option.help} {option.more}".strip()
    return f"| `{name}`{flag} | {_shown(option, option.default)} | {option.check.wanted} | {text} |"


def _shown(option: Option, value: object) -> str:
    """Return a default for people, times with their unit."""
    if isinstance(value, PriorityBand):
        return value.name
    if isinstance(option.check, Seconds) and isinstance(value, int | float):
        return f"{value:,.0f} s"
    return "none" if value == () else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    PAGE.write_text(options_page())
