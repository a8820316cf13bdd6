"""What a gang restores after any loss: processes die between any two writes, hosts are lost, the gang changes."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.checkpoint.gang import BARRIERS
from iris_ray.checkpoint.parts import CHECKED_BYTES
from iris_ray.checkpoint.store import DirectoryFiles
from iris_ray.errors import CheckpointTooLargeError, PeerFilesError
from tests.support.proofs import examples
from tests.support.state_gangs import FOLDER, Attempt, Layout, Program, content

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


# -- a partner that refuses, or is silent ------------------------------------------------------------------------------

BY_SLICE = Layout((8, 4), 0, None)
"""Each of two slices has a half that no other slice has."""


class Partner(DirectoryFiles):
    """The files of another host, of which some calls fail.

    Attributes:
        fails: the names of these calls.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fails: set[str] = set()

    def write(self, path: str, source: Path | memoryview) -> None:
        self._answer("write")
        super().write(path, source)

    def delete(self, path: str) -> None:
        self._answer("delete")
        super().delete(path)

    def _answer(self, call: str) -> None:
        if call in self.fails:
            raise PeerFilesError(f"10.0.0.7:9 did not answer {call}")


class Pair(Attempt):
    """Two slices of one host.

    Attributes:
        hosts: their directories.
        partners: of each process, the other one's host as it sees that.
    """

    def __init__(self, root: Path, attempt: int = 1, layouts: tuple[Layout, ...] = (BY_SLICE,)) -> None:
        self.hosts = [root / str(index) for index in range(2)]
        self.partners = [Partner(self.hosts[1 - index]) for index in range(2)]
        for host in self.hosts:
            host.mkdir(exist_ok=True)
        own = [DirectoryFiles(host) for host in self.hosts]
        super().__init__(layouts, self.hosts, 2, attempt, lambda i, at: own[i] if i == at else self.partners[i])

    @property
    def outlives(self) -> list[bool]:
        return [steps.outlives_a_slice for steps in self.steps]

    @property
    def copies(self) -> list[int]:
        """The number of copies on each host, whole or not."""
        return [len([*(host / FOLDER).glob("*.copy")]) for host in self.hosts]


def restored_from(root: Path, *hosts: int, layout: Layout = BY_SLICE, slices: int = 2) -> Any:
    """Return the step and the whole array that the next attempt restores from these hosts and new ones."""
    dirs = [root / str(host) if host in hosts else root / f"new {host}" for host in range(2)]
    for each in dirs:
        each.mkdir(exist_ok=True)
    attempt = Attempt([layout], dirs, slices, attempt=9)
    found = attempt.restore()
    for process in attempt.steps:
        process.finish()  # else it goes on in the background, beside the attempt that saves there
    if found == [None, None]:
        return None
    steps = {each[0] for each in found if each is not None}
    boxes = {box: part for each in found if each is not None for box, part in each[1][1].items()}
    return steps.pop(), np.concatenate([boxes[box] for box in sorted(boxes)])


def test_step_whose_copy_is_refused_outlives_no_slice(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.partners[0].fails = {"write"}
    assert pair.save(7) == [False, False]
    assert pair.outlives == [False, False]
    assert restored_from(tmp_path, 1) is None
    pair.partners[0].fails = set()
    assert pair.save(7) == [True, True], "it is tried again"
    assert pair.outlives == [True, True]
    step, array = restored_from(tmp_path, 1)
    assert step == 7
    np.testing.assert_array_equal(array, content([BY_SLICE], 1, 7)[0])


@pytest.mark.parametrize("silent", [0, 1])
def test_partner_that_is_silent_at_a_delete_ends_nothing(tmp_path: Path, silent: int) -> None:
    pair = Pair(tmp_path)
    assert pair.save(1) == [True, True]
    pair.partners[silent].fails = {"delete"}
    assert pair.save(2) == [True, True]
    assert pair.save(3) == [False, False], "two copies at a time is the most"
    pair.partners[silent].fails = set()
    assert pair.save(4) == [True, True]
    assert pair.copies == [1, 1]


def test_copies_do_not_pile_up_while_steps_are_not_whole(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.save(1)
    pair.partners[0].fails = {"write"}
    for step in range(2, 12):
        assert pair.save(step) == [False, False]
        assert max(pair.copies) <= 2
    assert restored_from(tmp_path, 1)[0] == 1


def test_copies_go_once_each_slice_has_everything(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.save(1)
    pair.layouts = [Layout((8, 4), None, None)]
    assert pair.save(2) == [True, True]
    assert pair.copies == [0, 0]


# -- one number, several saves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_memory", [False, True])
def test_step_that_is_saved_again_after_a_rollback_replaces_the_first(tmp_path: Path, from_memory: bool) -> None:
    pair = Pair(tmp_path)
    assert pair.save(10) == pair.save(20) == [True, True]
    if from_memory:
        pair.restore()
    assert pair.save(10, seed=2) == pair.save(20, seed=2) == [True, True]
    step, array = restored_from(tmp_path, 0, 1)
    assert step == 20
    np.testing.assert_array_equal(array, content([BY_SLICE], 2, 20)[0])


def test_parts_of_two_saves_of_one_step_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first save, only process 0 has its part, and of the second only process 1."""
    pair = Pair(tmp_path)

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "bad disk")

    for index in (1, 0):
        with monkeypatch.context() as patch:
            patch.setattr(pair.gangs[index].own, "write", broken)
            assert pair.save(20, seed=index) == [False, False]
    assert restored_from(tmp_path, 0, 1) is None


def test_second_checkpointer_of_a_name_goes_on_with_the_files_of_the_first(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for step in range(1, 6):
        pair.save(step)
    pair.again()
    assert [found and found[0] for found in pair.restore()] == [5, 5]
    for step in (5, 6, 7):
        assert pair.save(step, seed=2) == [True, True]
        assert [found and found[0] for found in pair.restore()] == [step, step]
    assert len([*(pair.hosts[0] / FOLDER).glob("*.data")]) == 2
    np.testing.assert_array_equal(restored_from(tmp_path, 0)[1], content([BY_SLICE], 2, 7)[0])


# -- bytes, memory, JAX's service --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, CHECKED_BYTES // 16])
def test_bytes_that_have_changed_are_found_in_any_piece_of_a_shard(tmp_path: Path, rows: int) -> None:
    """A gang of one slice takes pieces of the shards of two; a shard of the larger array has two checksums."""
    saved, wanted = Layout((rows, 4), 0, None), Layout((rows, 4), None, 1)
    pair = Pair(tmp_path, layouts=(saved,))
    pair.save(1)
    for path in tmp_path.glob(f"0/{FOLDER}/*.data"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - 100)
            file.write(bytes(8))
    for path in tmp_path.glob(f"1/{FOLDER}/*.copy"):
        path.unlink()
    assert restored_from(tmp_path, 0, 1, layout=wanted, slices=1) is None


def test_pieces_of_large_shards_are_put_together(tmp_path: Path) -> None:
    saved, wanted = Layout((CHECKED_BYTES // 16 + 10, 4), 0, None), Layout((CHECKED_BYTES // 16 + 10, 4), None, 0)
    Pair(tmp_path, layouts=(saved,)).save(1)
    (tmp_path / "new 1").mkdir()
    dirs = [tmp_path / "0", tmp_path / "1", tmp_path / "new 1"]
    for found in Attempt([wanted], dirs, 1, attempt=9).restore():
        assert found is not None
        ((box, part),) = found[1][1].items()
        np.testing.assert_array_equal(part, content([saved], 1, 1)[0][slice(*box[0])])


@pytest.mark.parametrize("full", ["posix_fallocate", "write"])
def test_full_disk_keeps_nothing_of_a_file_that_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def half_written(path: Path, content: bytes) -> None:
        path.write_text("half")
        no_room()

    files = DirectoryFiles(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    monkeypatch.setattr(Path, "write_bytes", half_written)
    calls: dict[str, Callable[[], object]] = {
        "posix_fallocate": lambda: files.grow("a", 1000),
        "write": lambda: files.write("a", memoryview(b"content")),
    }
    with pytest.raises(OSError, match="No space"):
        calls[full]()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


def test_step_is_whole_also_if_a_process_has_no_thread_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, start = Pair(tmp_path), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "iris_ray.checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert pair.save(1) == [True, True]
    assert restored_from(tmp_path, 1)[0] == 1


def test_process_whose_save_fails_at_once_stays_in_step_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)

    def no_room(*_: Any) -> Any:
        raise CheckpointTooLargeError("no room")

    pair.save(1)
    pair.layouts = [Layout((80, 4), 0, None)]
    with monkeypatch.context() as patch:
        patch.setattr(pair.gangs[1].own, "grow", no_room)
        with pytest.raises(CheckpointTooLargeError):
            pair.save(2)
    assert [steps.is_whole for steps in pair.steps] == [False, False]
    assert pair.save(3) == [True, True]
    assert restored_from(tmp_path, 1, layout=pair.layouts[0])[0] == 3


def test_room_that_one_process_can_not_see_is_a_refusal_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError(errno.EIO, "bad disk")

    pair = Pair(tmp_path)

    def refused(index: int) -> None:
        with pytest.raises(CheckpointTooLargeError, match=r"room on process 1's host is not known: .*bad disk"):
            pair.steps[index].save(1, [])

    with monkeypatch.context() as patch:
        patch.setattr(pair.gangs[1].own, "list", broken)
        pair.on_all(refused)
    assert pair.save(2) == [True, True]


def test_service_of_jax_keeps_little_however_often_a_gang_saves(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for step in range(1, 4 * BARRIERS):
        pair.partners[0].fails = {"write"} if step % 3 else set()
        pair.save(step)
        pair.restore()
    assert len(pair.service.arrived) <= 3 * BARRIERS
    assert len(pair.service.values) <= 2
