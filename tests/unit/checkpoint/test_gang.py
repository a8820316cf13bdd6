"""From which hosts a process of a gang reads first."""

from pathlib import Path

import pytest

from iris_ray.checkpoint.gang import JaxGang, Talk
from iris_ray.checkpoint.shares import HeldArray, partner, share_out
from iris_ray.checkpoint.store import DirectoryFiles


@pytest.mark.parametrize(
    ("index", "host_of", "domains", "sliced", "near"),
    [
        (1, [0, 1, 2, 3], [0, 0, 1, 1], True, [1, 3, 2, 0]),
        (5, [0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2], True, [5, 1, 3, 0, 2, 4]),
        (2, [0, 1, 2, 3], [0, 1, 2, 3], False, [2, 3, 0, 1]),
        (3, [0, 0, 1, 1], [0, 0, 1, 1], True, [1, 0]),
        (0, [0], [0], False, [0]),
    ],
)
def test_process_reads_own_host_then_its_place_elsewhere(
    index: int, host_of: list[int], domains: list[int], sliced: bool, near: list[int], tmp_path: Path
) -> None:
    """So that each process of a new slice reads from another host."""
    own = DirectoryFiles(tmp_path)
    hosts = [own] * (max(host_of) + 1)
    talk = Talk(None, index, "state")
    gang = JaxGang(index, len(host_of), 1, hosts, host_of, own, "memory/state", domains, sliced, talk)
    assert gang.near == near


def test_each_slice_keeps_a_replica_and_processes_share_the_work() -> None:
    whole = ((0, 4),)
    arrays = [HeldArray(1, {whole: (0, 1, 2, 3)}) for _ in range(6)]
    kept = share_out(arrays, [0, 0, 1, 1], at_most=4)
    assert [len(own) for own in kept] == [3, 3, 3, 3]
    assert {each.leaf for each in kept[0] + kept[1]} == {each.leaf for each in kept[2] + kept[3]} == set(range(6))
    assert not any(each.alone for own in kept for each in own)


def test_shards_of_one_slice_alone_come_first_for_its_partner() -> None:
    arrays = [HeldArray(1, {((0, 4),): (0, 2)}), HeldArray(2, {((0, 2),): (0,), ((2, 4),): (2,)})]
    kept = share_out(arrays, [0, 0, 1, 1], at_most=4)
    assert [(each.leaf, each.size, each.alone) for each in kept[0]] == [(1, 4, True), (0, 4, False)]
    assert kept[1] == kept[3] == []
    assert [partner(process, [0, 0, 1, 1]) for process in range(4)] == [2, 3, 0, 1]
    assert partner(1, [0, 0]) is None
