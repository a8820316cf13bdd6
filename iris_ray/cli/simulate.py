"""``iris-ray simulate``: a fleet and its jobs in virtual time, under several policies."""

import gc
import logging
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from iris_ray.actors.wire.json_values import as_json
from iris_ray.cli.options import FiniteRange, json_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.simulation.tables import print_reports
from iris_ray.errors import InvalidSimulationError
from iris_ray.model.checks import unknown
from iris_ray.simulation.description import read_study
from iris_ray.simulation.history import History
from iris_ray.simulation.report import Report, report
from iris_ray.simulation.study import Policy, Study

STEPS = 50
"""How often progress is shown."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy led to.

    Attributes:
        policy: its name.
        report: what happened.
        history: the same in full.
        cpu_s: what the simulation took, in seconds of CPU.
    """

    policy: str
    report: Report
    history: History
    cpu_s: float


@click.command()
@click.argument("fleet", metavar="FLEET.toml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--days", type=FiniteRange(0, min_open=True), help="So many days instead of those in FLEET.toml.")
@click.option("--seed", type=click.IntRange(0), help="Another seed: other jobs and losses of the same kind.")
@click.option("--policy", "chosen", multiple=True, metavar="NAME", help="Only this policy; may be repeated.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw waits, use and shares: a .png or .svg file.",
)
@json_option
def simulate(
    fleet: Path, days: float | None, seed: int | None, chosen: tuple[str, ...], picture: Path | None, as_json: bool
) -> None:
    """See in virtual time how long jobs would wait, what the hosts would do, and what a policy would change.

    \b
      iris-ray simulate examples/fleet.toml
      iris-ray simulate examples/fleet.toml --days 2 --policy "one spare" --json

    The Controller's own code decides who runs where. FLEET.toml describes hosts, losses, jobs and policies:
    docs/simulating.md explains it. No cluster is needed.
    """
    study = _read(fleet)
    study = replace(
        study,
        seconds=study.seconds if days is None else days * 86_400.0,
        seed=study.seed if seed is None else seed,
        policies=_chosen(study.policies, chosen),
    )
    if picture is not None:
        from iris_ray.cli.simulation.pictures import require_matplotlib

        require_matplotlib()
    outcomes = [_simulate(study, policy) for policy in study.policies]
    if as_json:
        print_json([_as_json(outcome) for outcome in outcomes])
    else:
        print_reports({outcome.policy: outcome.report for outcome in outcomes})
        for outcome in outcomes:
            click.echo(_speed(outcome), err=True)
    if picture is not None:
        from iris_ray.cli.simulation.pictures import draw

        draw(picture, {outcome.policy: (outcome.history, outcome.report) for outcome in outcomes})


def _read(path: Path) -> Study:
    try:
        description = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSimulationError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSimulationError(f"{path} is not valid TOML: {error}") from None

    def read_lines(name: str) -> list[str]:
        trace = path.parent / name
        try:
            return trace.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSimulationError(f"the trace {trace} can't be read: {error}") from None

    try:
        return read_study(description, read_lines)
    except InvalidSimulationError as error:
        raise InvalidSimulationError(f"{path}: {error}") from None


def _chosen(policies: Sequence[Policy], names: Sequence[str]) -> tuple[Policy, ...]:
    by_name = {policy.name: policy for policy in policies}
    for name in names:
        if name not in by_name:
            raise unknown("policy", name, by_name)
    return tuple(by_name[name] for name in names) or tuple(policies)


def _simulate(study: Study, policy: Policy) -> Outcome:
    with _quiet(), _progress(policy.name) as show:
        simulation = study.simulation(policy)
        gc.collect()
        gc.freeze()  # the fleet outlives every collection
        began = time.process_time()
        for step in range(1, STEPS + 1):
            simulation.run_until(study.seconds * step / STEPS)
            show(study.seconds * step / STEPS / 86_400.0)
        spent = time.process_time() - began
        gc.unfreeze()
    return Outcome(policy.name, report(simulation.history, study.seconds), simulation.history, spent)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the Controller would log: on a crowded fleet there is a line for every job that waits long."""
    logger = logging.getLogger("iris_ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _progress(policy: str) -> Iterator[Any]:
    """Show on a terminal how far a simulation is."""
    shown = sys.stderr.isatty()

    def show(days: float) -> None:
        if shown:
            click.echo(f"\r{policy}: day {days:.1f} ", nl=False, err=True)

    try:
        yield show
    finally:
        if shown:
            click.echo("\r\x1b[2K", nl=False, err=True)


def _speed(outcome: Outcome) -> str:
    found, cpu_s = outcome.report, max(outcome.cpu_s, 1e-9)
    return (
        f"{outcome.policy}: {found.seconds / 86_400:g} days in {cpu_s:.1f} s of CPU;"
        f" {found.decisions / cpu_s:,.0f} decisions and {found.events / cpu_s:,.0f} events a second"
    )


def _as_json(outcome: Outcome) -> dict[str, Any]:
    found, cpu_s = outcome.report, max(outcome.cpu_s, 1e-9)
    return {
        "policy": outcome.policy,
        **as_json(found),
        "cpu_s": round(outcome.cpu_s, 3),
        "decisions_per_s": round(found.decisions / cpu_s, 1),
        "events_per_s": round(found.events / cpu_s, 1),
    }
