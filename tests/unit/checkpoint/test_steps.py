"""What a gang restores after any loss: processes die between any two writes, hosts are lost, the gang changes."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.proofs import examples
from tests.support.state_gangs import FOLDER, Layout, Program

AXES = st.none() | st.integers(0, 1)
LAYOUTS = st.lists(
    st.builds(Layout, st.lists(st.integers(0, 5), max_size=3).map(tuple), AXES, AXES), min_size=1, max_size=3
)
REFUSED = st.sets(st.integers(1, 4))
"""Steps of which no host takes a copy."""
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2))
"""Slices, and hosts of each."""


@given(st.data())
@settings(max_examples=examples(25))
def test_any_loss_restores_newest_whole_step_or_none(data: st.DataObject) -> None:
    layouts = data.draw(LAYOUTS)
    with tempfile.TemporaryDirectory() as root:
        program, left = Program(layouts, Path(root)), list[Path]()
        for _ in range(3):
            slices, size = data.draw(SIZES)
            survivors = data.draw(st.permutations(left))[: slices * size]
            hosts = [*survivors, *(program.new_host() for _ in range(slices * size - len(survivors)))]
            hosts = data.draw(st.permutations(hosts))
            expected = program.expected(hosts)
            dies = data.draw(st.none() | st.integers(0, len(hosts) - 1))
            steps, at_write = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 30))
            restored = program.run(hosts, slices, steps, dies, at_write, data.draw(REFUSED))
            program.check(restored, expected)
            lost = data.draw(st.sets(st.sampled_from(hosts), max_size=1 + len(hosts) // 2))
            left = [host for host in hosts if host not in lost]


@given(LAYOUTS, st.tuples(st.integers(2, 3), st.integers(1, 2)), st.data())
@settings(max_examples=examples(25))
def test_loss_of_a_slice_costs_at_most_one_interval(
    layouts: list[Layout], size: tuple[int, int], data: st.DataObject
) -> None:
    slices, a_slice = size
    with tempfile.TemporaryDirectory() as root:
        program = Program(layouts, Path(root))
        hosts = [program.new_host() for _ in range(slices * a_slice)]
        dies = data.draw(st.integers(0, len(hosts) - 1))
        program.run(hosts, slices, 5, dies, data.draw(st.integers(0, 60)), data.draw(REFUSED))
        lost = dies // a_slice
        hosts[lost * a_slice : (lost + 1) * a_slice] = [program.new_host() for _ in range(a_slice)]
        expected = program.expected(hosts)
        assert (expected or (0, 0)) >= (program.settled or (0, 0))
        program.check(program.run(hosts, slices, 1), expected)


OVER_ALL = Layout((8, 4), 0, 1)
OVER_HOSTS = Layout((8, 4), None, 0)


@pytest.mark.parametrize(("layout", "bytes_a_host"), [(OVER_HOSTS, 2 * 128), (OVER_ALL, 2 * 64 + 64)])
def test_memory_holds_two_shares_and_copy_of_unshared_shards(layout: Layout, bytes_a_host: int, tmp_path: Path) -> None:
    program = Program([layout], tmp_path)
    hosts = [program.new_host() for _ in range(4)]
    for _ in range(3):
        program.run(hosts, 2, 5)
        for host in hosts:
            sizes = [path.stat().st_size for path in (host / FOLDER).iterdir() if path.suffix != ".json"]
            assert sum(sizes) == bytes_a_host


def test_older_attempt_stays_until_every_process_has_saved(tmp_path: Path) -> None:
    program = Program([OVER_ALL], tmp_path)
    hosts = [program.new_host() for _ in range(4)]
    program.run(hosts, 2, 3)
    program.check(program.run(hosts, 2, 1, dies=3, at_write=0), (1, 3))
    assert program.expected(hosts) == (1, 3)
    program.check(program.run(hosts, 2, 1), (1, 3))
    assert program.expected(hosts) == (3, 1)
    assert not [path for host in hosts for path in (host / FOLDER).iterdir() if not path.name.startswith("3-")]


@pytest.mark.parametrize("at_write", range(24))
def test_half_overwritten_step_is_never_chosen(at_write: int, tmp_path: Path) -> None:
    """No host takes the copies of step 2, so that step 3 is written over it, while a process dies at any write."""
    program = Program([OVER_ALL], tmp_path)
    hosts = [program.new_host() for _ in range(4)]
    program.run(hosts, 2, 3, dies=1, at_write=at_write, refused={2})
    program.check(program.run(hosts, 2, 0), program.expected(hosts))
