"""A picture of what simulations show."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iris_ray.errors import InvalidSimulationError
from iris_ray.simulation.history import History
from iris_ray.simulation.report import Report

Outcomes = Mapping[str, tuple[History, Report]]
HOUR = 3600.0


def require_matplotlib() -> None:
    """Raise InvalidSimulationError if pictures can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidSimulationError(
            "pictures need matplotlib, which is not installed; pip install 'iris-ray[bench]', or leave out --picture"
        )


def draw(path: Path, outcomes: Outcomes) -> None:
    """Draw waits, what the hosts were used for, and shares, each by policy.

    Raises:
        InvalidSimulationError: the file can't be written, or its suffix names no format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (waits, use, shares) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    _draw_waits(waits, outcomes)
    _draw_use(use, outcomes)
    _draw_shares(shares, outcomes)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidSimulationError(f"the picture {path} can't be written: {error}") from None
    finally:
        pyplot.close(figure)


def _draw_waits(axes: Any, outcomes: Outcomes) -> None:
    for policy, (history, found) in outcomes.items():
        waited = sorted(job.waited_s(found.seconds) for job in history.jobs.values())
        parts = [(number + 1) / len(waited) for number in range(len(waited))]
        axes.plot([max(seconds, 1.0) / HOUR for seconds in waited], parts, label=policy)
    axes.set(xscale="log", xlabel="hours from submission to the first hosts", ylabel="part of the jobs", title="Waits")
    axes.legend()


def _draw_use(axes: Any, outcomes: Outcomes) -> None:
    below = [0.0] * len(outcomes)
    for part in ("useful", "lost", "starting", "spare", "idle"):
        amounts = [100 * getattr(found.use, part) for _, found in outcomes.values()]
        axes.bar(list(outcomes), amounts, bottom=below, label=part)
        below = [bottom + amount for bottom, amount in zip(below, amounts, strict=True)]
    axes.set(ylabel="percent of all hosts' time", title="What the hosts did")
    axes.legend()


def _draw_shares(axes: Any, outcomes: Outcomes) -> None:
    users = sorted({user for _, found in outcomes.values() for user in found.shares})
    width = 0.8 / len(outcomes)
    for number, (policy, (_, found)) in enumerate(outcomes.items()):
        places = [index + number * width for index in range(len(users))]
        axes.bar(places, [100 * found.shares.get(user, 0.0) for user in users], width, label=policy)
    axes.set_xticks([index + (len(outcomes) - 1) * width / 2 for index in range(len(users))], users, rotation=90)
    axes.set(ylabel="percent of what all users held", title="Shares")
    axes.legend()
