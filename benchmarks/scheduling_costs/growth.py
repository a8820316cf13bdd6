"""How a cycle's cost grows with the fleet and with the queue, as a picture."""

import gc
from pathlib import Path

from scheduling_costs.cycles import new_requirement_s, steady_s
from scheduling_costs.worlds import bare, gang, submit

PICTURE = Path(__file__).parents[2] / "docs" / "scheduling-cost.png"
FLEETS = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
QUEUES = (10, 30, 100, 300, 1000, 3000)

Curves = dict[str, list[float]]


def measure_growth(worlds: list[tuple[int, int]], rounds: int) -> Curves:
    """Return the cost of one cycle, in ms, for each pair of a number of hosts and a number of gangs."""
    curves: Curves = {"steady": [], "new requirement": []}
    for hosts, gangs in worlds:
        gc.collect()
        state = bare(hosts)
        submit(state, [gang(i, f"job-{i}") for i in range(gangs)])
        curves["steady"].append(1000 * steady_s(state, rounds))
        curves["new requirement"].append(1000 * new_requirement_s(state, gang, gangs, rounds))
    return curves


def save_picture(rounds: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_fleet = measure_growth([(hosts, 100) for hosts in FLEETS], rounds)
    by_queue = measure_growth([(10_000, gangs) for gangs in QUEUES], rounds)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    panels = (
        (axes[0], FLEETS, by_fleet, "hosts in the fleet (100 gangs wait)"),
        (axes[1], QUEUES, by_queue, "gangs in the queue (10,000 hosts)"),
    )
    for axis, sizes, curves, label in panels:
        for (name, costs), colour, mark in zip(curves.items(), ("#2a78d6", "#c2510c"), "os", strict=True):
            axis.loglog(sizes, costs, color=colour, marker=mark, markersize=5, linewidth=2, label=name)
        axis.set_xlabel(label)
        axis.grid(which="major", color="#dddddd")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("one cycle, ms of CPU time")
    axes[0].legend(frameon=False, loc="upper left")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    print(f"\nSaved {PICTURE} ({PICTURE.stat().st_size / 1000:.0f} KB).")
