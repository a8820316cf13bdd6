"""Which entries of an output directory go: the oldest, until the rest fits."""

import random

import pytest

from iris_ray.outputs.core import ON_FULL_DISK, Entry, Kind, limit_on_disk, taken, to_remove


def entry(path: str, at: float, allocated: int = 1000, kind: Kind = Kind.FILE) -> Entry:
    return Entry(path, kind, allocated, allocated, at, (1, hash(path)), 1)


def paths(entries: list[Entry]) -> list[str]:
    return [one.path for one in entries]


def test_nothing_goes_within_the_limits() -> None:
    assert to_remove([entry("a", 1), entry("b", 2)], 2000) == []
    assert to_remove([entry("a", 1, 10**15)], None) == []


def test_oldest_files_go_first_and_no_more_than_needed() -> None:
    there = [entry("new", 3), entry("old", 1), entry("middle", 2)]
    assert paths(to_remove(there, 2999)) == ["old"]
    assert paths(to_remove(there, 1000)) == ["old", "middle"]
    assert paths(to_remove(there, 0)) == ["old", "middle", "new"]


def test_directories_go_only_if_there_are_too_many_names() -> None:
    there = [entry("d", 0, kind=Kind.DIRECTORY), entry("d/x", 1), entry("y", 2)]
    assert paths(to_remove(there, 1000)) == ["d/x", "y"]
    assert paths(to_remove(there, None, most_entries=2)) == ["d"]


def test_what_is_too_deep_to_be_measured_always_goes() -> None:
    assert paths(to_remove([entry("a/b", 5, 0, Kind.TOO_DEEP), entry("c", 1)], None)) == ["a/b"]


@pytest.mark.parametrize("seed", range(50))
def test_what_stays_fits_or_is_only_directories(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [Kind.FILE, Kind.LINK, Kind.OTHER, Kind.DIRECTORY]
    there = [
        entry(str(i), chance.random(), chance.randrange(2000), chance.choice(kinds))
        for i in range(chance.randrange(40))
    ]
    most_bytes, most = chance.randrange(20_000), chance.randrange(50)
    gone = to_remove(there, most_bytes, most)
    stays = [one for one in there if one not in gone]
    assert len(stays) <= most
    files = [one for one in stays if one.kind is not Kind.DIRECTORY]
    assert not files or sum(one.allocated for one in stays) <= most_bytes
    newest_gone = max((one.changed_at for one in gone), default=0.0)
    assert all(one.changed_at >= newest_gone for one in files)


def test_hard_links_of_one_file_take_its_space_once() -> None:
    """As in a directory of snapshots made by ``cp --link``."""
    first, second = entry("a", 1), entry("b", 1)
    there = [first, Entry("c", Kind.FILE, 1000, 1000, 1, first.inode, 2), second]
    assert taken(there) == 2000
    assert to_remove(there, 2000) == []
    assert paths(to_remove(there, 1000)) == ["a", "c"], "removing one of its links frees nothing"


def test_directories_that_are_older_than_their_files_go_after_them() -> None:
    there = [one for i in range(4) for one in (entry(f"{i}/x", 10 + i), entry(f"{i}", i, kind=Kind.DIRECTORY))]
    assert paths(to_remove(there, None, most_entries=4)) == ["0/x", "0", "1/x", "1"]


@pytest.mark.parametrize(
    ("most", "has", "lacking", "limit"),
    [
        (10 << 30, 9 << 30, -1, 10 << 30),
        (10 << 30, 9 << 30, 4 << 30, 5 << 30),
        (None, 9 << 30, 4 << 30, 5 << 30),
        (10 << 30, 1 << 30, 4 << 30, ON_FULL_DISK),
        (1000, 1 << 30, 4 << 30, 1000),
        (None, 1 << 40, 0, None),
    ],
)
def test_an_attempt_leaves_a_part_of_the_disk_free_as_far_as_it_can(
    most: int | None, has: int, lacking: int, limit: int | None
) -> None:
    assert limit_on_disk(most, has, lacking) == limit
