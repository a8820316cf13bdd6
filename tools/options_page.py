"""Writes docs/options.md, the reference of the options of a run, from their table: ``python -m tools.options_page``.

Which function takes an option is read from the functions' signatures.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from iris_ray import (
    IrisClient,
    run_docker_on_pod,
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from iris_ray.cli.run import run as run_command
from iris_ray.cli.submit import submit as submit_command
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
HEAD = """# Options of a run

The options that [`run_on_pod` and the other run functions](running.md), `IrisClient.submit` and the
[command line](command-line.md) share. Their other arguments, such as `num_slices`, are on those pages. Below,
"all functions" are {functions}.
Pass options by name:

```text
run_on_pod(train, "v4-16", spares=1, preload=["jax"], max_retries_failure=0)
iris-ray submit train.py --tpu v4-16 --spares 1 --max-retries-failure 0
```

In Python, times are in seconds; flags also take units, such as `90s`, `15m` and `2h`. iris_ray refuses an invalid value
before it acquires anything. `iris-ray run` and `iris-ray submit` take the options that have a flag, and environment
variables of the tasks as `--env`. Only `submit` takes {only_submit}.
Only `run` takes {only_run}. `IrisClient.run` and `JobGroup.add` take the options of `IrisClient.submit`.

<!-- Generated from iris_ray/model/options.py by `python -m tools.options_page`. -->
"""


def options_page() -> str:
    """Return the page."""
    takers: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in OPTIONS:
        takers[tuple(f for f, call in FUNCTIONS.items() if name in inspect.signature(call).parameters)].append(name)
    run, submit = _flags(run_command), _flags(submit_command)
    only_run, only_submit = _code(sorted(run - submit)), _code(sorted(submit - run))
    head = HEAD.format(only_run=only_run, only_submit=only_submit, functions=_listed(FUNCTIONS))
    parts = [head, "| option | flag | default | effect |", "|---|---|---|---|"]
    parts += [
        f"| [`{name}`](#{name}) | {_flag(option)} | {_shown(option, option.default)} | {option.help} |"
        for name, option in OPTIONS.items()
    ]
    for functions, names in takers.items():
        parts += ["", f"## {_title(functions)}", *(_section(name, OPTIONS[name]) for name in names)]
    return re.sub(r"docs/([\w/-]+\.md)", _link, "\n".join(parts)) + "\n"


def _flags(command: click.Command) -> set[str]:
    """Return the flags of the options in the table that a command takes."""
    table = {option.flag for option in OPTIONS.values()}
    return table.intersection(flag for one in command.params for flag in one.opts)


def _section(name: str, option: Option) -> str:
    """Return the section of one option."""
    lines = [
        "",
        f"### `{name}`",
        "",
        f"{option.help} {option.more}".strip(),
        "",
        f"- Example: `{name}={option.example}`",
    ]
    if option.flag:
        lines.append(f"- Flag: {_flag(option)}")
    lines.append(f"- Default: {_shown(option, option.default)}")
    for other in option.elsewhere:
        of = ", ".join(f"`{function}`" if " of " not in function else function for function in other.of)
        lines.append(f"- Default in {of}: {_shown(option, other.value)} ({other.why})")
    return "\n".join([*lines, f"- Values: {option.check.wanted}"])


def _flag(option: Option) -> str:
    return f"`{option.flag}`" if option.flag else ""


def _link(found: re.Match[str]) -> str:
    """Return a link to a page of docs/, with its title."""
    title = (PAGE.parent / found[1]).read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}]({found[1]})"


def _title(functions: tuple[str, ...]) -> str:
    missing = [function for function in FUNCTIONS if function not in functions]
    if not missing:
        return "All functions"
    if len(missing) < len(functions):
        return f"All functions except {_code(missing)}"
    return f"Only {_code(functions)}"


def _code(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _listed(names: Iterable[str]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


def _shown(option: Option, value: object) -> str:
    """Return a default for people, times with their unit."""
    if isinstance(value, PriorityBand):
        return value.name
    if isinstance(option.check, Seconds) and isinstance(value, int | float):
        return f"{value:,.0f} s"
    return "none" if value == () else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    PAGE.write_text(options_page())
