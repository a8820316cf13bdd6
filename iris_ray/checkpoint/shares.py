"""Which process of a gang keeps which shard, and which shards it also gives to another slice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from iris_ray.checkpoint.boxes import Box, volume


@dataclass(frozen=True, slots=True)
class Kept:
    """A shard that a process keeps.

    Attributes:
        leaf: number of the array in the state.
        box: which part of the array.
        size: bytes.
        alone: whether processes of only one domain have it.
    """

    leaf: int
    box: Box
    size: int
    alone: bool


@dataclass(frozen=True, slots=True)
class HeldArray:
    """An array as a gang holds it: bytes of an element, and the processes that hold each box, in ascending order."""

    item_size: int
    holders: Mapping[Box, Sequence[int]]


def share_out(arrays: Sequence[HeldArray], domains: Sequence[int], at_most: int) -> list[list[Kept]]:
    """Choose one process of each domain with a replica of a shard to keep it, so that all keep about as much.

    All processes come to one result.

    Args:
        domains: for each process, the number of its failure domain: its slice, or in a single slice its host.
        at_most: the number of domains that keep a shard at most.

    Returns:
        The shards that each process keeps, those first that are in no other domain.
    """
    kept: list[list[Kept]] = [[] for _ in domains]
    load = [0] * len(domains)
    for leaf, array in enumerate(arrays):
        for box, holders in sorted(array.holders.items()):
            if not (size := volume(box) * array.item_size):
                continue
            best: dict[int, int] = {}
            for process in holders:
                rival = best.setdefault(domains[process], process)
                if load[process] < load[rival]:
                    best[domains[process]] = process
            chosen = sorted(best.values(), key=lambda process: (load[process], process))[:at_most]
            for process in chosen:
                load[process] += size
                kept[process].append(Kept(leaf, box, size, alone=len(best) == 1))
    return [sorted(own, key=lambda each: not each.alone) for own in kept]


def partner(process: int, domains: Sequence[int]) -> int | None:
    """Return the process of the next slice that takes the copies of a process; None if there is only one slice."""
    slices = sorted(set(domains))
    if len(slices) == 1:
        return None
    mine = [other for other in range(len(domains)) if domains[other] == domains[process]]
    following = slices[(slices.index(domains[process]) + 1) % len(slices)]
    theirs = [other for other in range(len(domains)) if domains[other] == following]
    return theirs[mine.index(process) % len(theirs)]
