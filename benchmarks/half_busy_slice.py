"""Which slice Ray's own reservation of a slice chooses while a host of another one is busy.

    python benchmarks/half_busy_slice.py --tries 20

There are two slices of two hosts. An actor takes the chips of the second host of one of them, in turn. Then
`ray.util.tpu.slice_placement_group` reserves a slice, and gets `READY_S` to become ready. Two minutes.
"""

import argparse

import ray
from ray.util import tpu
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.testing import SimulatedCluster

READY_S = 10.0
"""A group on a free slice is ready in a fraction of a second."""
CHIPS_OF_A_HOST = 4
SLICE_NAME = "ray.io/tpu-slice-name"


class Holder:
    """Holds the chips of a host."""

    def is_there(self) -> bool:
        return True


def try_once(node_id: str) -> tuple[str, bool]:
    """Hold the chips of a host, and reserve a slice. Return the name of the slice, and whether it became ready."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote = ray.remote(num_cpus=0, resources={"TPU": CHIPS_OF_A_HOST})(Holder)
    holder = remote.options(scheduling_strategy=where).remote()
    ray.get(holder.is_there.remote())
    reserved = tpu.slice_placement_group(topology="2x2x2", accelerator_version="v4")
    try:
        is_ready = reserved.placement_group.wait(READY_S)
        return reserved.bundle_label_selector[0][SLICE_NAME], bool(is_ready)
    finally:
        reserved.shutdown()
        ray.kill(holder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20)
    chose_busy = busy_and_ready = free_and_ready = 0
    tries = parser.parse_args().tries
    with SimulatedCluster({"v4-16": 2}, quiet=True) as cluster:
        names = cluster.slice_names
        for number in range(tries):
            half_busy = names[number % len(names)]
            chosen, is_ready = try_once(cluster.node_id(half_busy, 1))
            print(f"{half_busy} is half busy; Ray chose {chosen}: {'ready' if is_ready else 'not ready'}", flush=True)
            chose_busy += chosen == half_busy
            busy_and_ready += chosen == half_busy and is_ready
            free_and_ready += chosen != half_busy and is_ready
    print(f"of {tries} tries, {chose_busy} chose the half-busy slice; {busy_and_ready} of these became ready, and")
    print(f"{free_and_ready} of the {tries - chose_busy} that chose the free slice")


if __name__ == "__main__":
    main()
