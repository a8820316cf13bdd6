"""What the scheduling core costs: one cycle, one event, memory, and how they grow. Needs neither Ray nor TPUs.

    python benchmarks/scheduling.py            # the table; about a minute
    python benchmarks/scheduling.py --quick    # without the cycles at 100,000 hosts and the memory
    python benchmarks/scheduling.py --plot     # the table, and docs/scheduling-cost.png; pip install -e '.[bench]'
    python benchmarks/scheduling.py --marin    # only the cycles, beside marin-iris: make bench-marin
    python benchmarks/scheduling.py --count --before DIR  # instructions instead of times, beside another checkout

A cycle is measured in three states of the indexes:

- steady: as in a running Controller. Before each cycle 16 tasks come and go on the hosts of one slice, so the figure
  includes catching up with a change.
- new requirement: no job has had the jobs' requirement before, so every group is evaluated.
- from nothing: the hosts are registered, and a new scheduler makes its first plan, as after the Controller's start.

All figures are medians of CPU time with the garbage collector off. The hosts come in slices of 16 and have nine
attributes each, one of them unique; the jobs have two EQ constraints.
"""

import argparse
import gc
from pathlib import Path

from scheduling_costs.counts import print_counts
from scheduling_costs.cycles import SCENARIOS, print_cycles
from scheduling_costs.events import print_event
from scheduling_costs.growth import save_picture
from scheduling_costs.large_jobs import print_large_job
from scheduling_costs.long_queues import print_crowds, print_waiting
from scheduling_costs.memory import print_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the cycles at 100,000 hosts and the memory")
    parser.add_argument("--plot", action="store_true", help="also measure how the cost grows, and save the picture")
    parser.add_argument("--marin", action="store_true", help="only the cycles, beside those of marin-iris")
    parser.add_argument("--rounds", type=int, default=9, help="cycles per figure (default: 9, at most 14)")
    parser.add_argument("--count", action="store_true", help="count instructions of Python instead; minutes")
    parser.add_argument("--before", type=Path, metavar="DIR", help="with --count: another checkout to compare with")
    options = parser.parse_args()
    if options.before and not options.count:
        parser.error("--before needs --count")
    gc.disable()
    if options.count:
        print_counts(options.before)
        return
    if options.marin:
        from scheduling_costs.marin import print_beside_marin

        print_beside_marin((s for s in SCENARIOS if s.hosts <= 10_000), options.rounds)
        return
    print_cycles(tuple(s for s in SCENARIOS if not options.quick or s.hosts <= 10_000), options.rounds)
    print_event(50)
    print_large_job(50)
    print_crowds()
    print_waiting(options.rounds)
    if not options.quick:
        print_memory()
    if options.plot:
        save_picture(options.rounds)


if __name__ == "__main__":
    main()
