"""Parts of slices: which shapes there are, and which hosts form each part."""

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.errors import InvalidRequestError, InvalidTopologyError
from iris_ray.model.parts import (
    hosts_of_shape,
    is_on_slices,
    part_attribute,
    part_of_host,
    part_shapes,
    require_shape,
    shape_of_attribute,
    shape_of_part,
    slice_of,
    split_by,
)
from iris_ray.model.topology import default_topology, get_tpu_config
from iris_ray.model.workers import TPU_NAME

TYPES = ["v2-32", "v3-256", "v4-32", "v4-128", "v4-512", "v5litepod-256", "v5p-24", "v5p-64", "v5p-256", "v6e-64"]


def parts(tpu_type: str, shape: str, told: str | None = None) -> dict[str, list[int]]:
    """The numbers of the hosts of each part."""
    hosts = get_tpu_config(tpu_type).vm_count
    found: dict[str, list[int]] = {}
    for i in range(hosts):
        name = part_of_host(tpu_type, told, hosts, i, shape)
        assert name is not None
        found.setdefault(name, []).append(i)
    return found


def chips(tpu_type: str, host: int) -> set[tuple[int, ...]]:
    """The coordinates of a host's chips: hosts of 2x2(x1) chips are numbered along x, y, z."""
    sides = tuple(map(int, default_topology(get_tpu_config(tpu_type)).split("x")))
    place, rest = [], host
    for side, own in zip(sides, (2, 2, 1), strict=False):
        rest, along = divmod(rest, side // own)
        place.append(range(along * own, (along + 1) * own))
    return set(product(*place))


@pytest.mark.parametrize(
    ("topology", "shapes"),
    [
        ("4x4", ("2x2", "2x4")),
        ("16x16", ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16")),
        ("2x2x4", ("2x2x1", "2x2x2")),
        ("2x4x4", ("2x2x1", "2x2x2", "2x2x4")),
        ("4x4x8", ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")),
        ("2x2x3", ("2x2x1",)),
        ("2x2", ()),
        ("1x1", ()),
        ("2x2x1", ()),
    ],
)
def test_shapes_of_parts_are_documented_ones_that_tile_the_slice(topology: str, shapes: tuple[str, ...]) -> None:
    assert part_shapes(topology) == shapes


def test_parts_of_v6e_16_are_its_columns() -> None:
    assert parts("v6e-16", "2x4") == {":2x4:0": [0, 2], ":2x4:1": [1, 3]}
    assert parts("v6e-16", "2x2") == {":2x2:0": [0], ":2x2:1": [2], ":2x2:2": [1], ":2x2:3": [3]}


def test_shape_that_hosts_have_told_counts_if_it_can_be_right() -> None:
    assert parts("v5p-64", "2x2x4", "2x2x8") == {":2x2x4:0": [0, 1, 2, 3], ":2x2x4:1": [4, 5, 6, 7]}
    for wrong in ("4x4", "2x2x2", "many", "0x4x8", ""):
        assert parts("v5p-64", "2x2x4", wrong) == parts("v5p-64", "2x2x4")


@pytest.mark.parametrize(
    ("hosts", "host", "shape"),
    [(4, 4, "2x4"), (2, 0, "2x4"), (4, 0, "4x4"), (4, 0, "4x2"), (4, 0, "2x2x1"), (4, 0, "nonsense")],
)
def test_host_without_such_a_part_has_none(hosts: int, host: int, shape: str) -> None:
    """The slice may also have other hosts than the rule says, such as hosts of eight chips."""
    assert part_of_host("v6e-16", None, hosts, host, shape) is None


@given(st.sampled_from(TYPES), st.data())
def test_every_part_is_a_full_box_and_the_parts_tile_the_slice(tpu_type: str, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(part_shapes(default_topology(get_tpu_config(tpu_type)))))
    found = parts(tpu_type, shape)
    assert sorted(i for hosts in found.values() for i in hosts) == list(range(get_tpu_config(tpu_type).vm_count))
    for hosts in found.values():
        covered = set().union(*(chips(tpu_type, i) for i in hosts))
        sides = tuple(max(axis) - min(axis) + 1 for axis in zip(*covered, strict=True))
        assert sides == tuple(map(int, shape.split("x")))
        assert len(covered) == prod(sides) == 4 * len(hosts)
        assert len(hosts) == hosts_of_shape(shape)


@given(st.sampled_from(TYPES), st.data())
def test_order_of_hosts_within_a_part_is_along_x_y_z(tpu_type: str, data: st.DataObject) -> None:
    """libtpu takes the processes of a part in this order, too."""
    shape = data.draw(st.sampled_from(part_shapes(default_topology(get_tpu_config(tpu_type)))))
    for hosts in parts(tpu_type, shape).values():
        corners = [min(chips(tpu_type, i)) for i in hosts]
        assert corners == sorted(corners, key=lambda corner: corner[::-1])


@given(st.sampled_from(TYPES), st.data())
def test_parts_of_a_larger_part_follow_each_other(tpu_type: str, data: st.DataObject) -> None:
    """Gangs that are placed in the order of names then split few larger parts."""
    shapes = part_shapes(default_topology(get_tpu_config(tpu_type)))
    small, large = sorted(data.draw(st.lists(st.sampled_from(shapes), min_size=2, max_size=2)), key=shapes.index)
    ordered = [set(hosts) for _, hosts in sorted(parts(tpu_type, small).items())]
    for hosts in map(set, parts(tpu_type, large).values()):
        inside = [number for number, part in enumerate(ordered) if part <= hosts]
        assert inside == list(range(inside[0], inside[0] + len(hosts) // len(ordered[0])))


def test_gang_on_a_part_splits_each_larger_part_that_contains_it() -> None:
    assert split_by("v6e-16", None, "2x4", 3) == (frozenset(range(4)),)
    assert split_by("v6e-16", None, "2x2", 3) == (frozenset(range(4)), frozenset({1, 3}))
    assert set(split_by("v6e-64", None, "2x2", 5)) == {
        frozenset(range(16)),
        frozenset({0, 1, 4, 5, 8, 9, 12, 13}),
        frozenset({0, 1, 4, 5}),
        frozenset({1, 5}),
    }


@pytest.mark.parametrize(
    ("tpu_type", "topology", "says"),
    [
        ("v6e-16", "3x3", "in these shapes: 2x2, 2x4"),
        ("v6e-16", "4x2", "in these shapes: 2x2, 2x4"),
        ("v6e-16", "4x4", "which is a whole v6e-16 slice; leave topology out, or ask for a part: 2x2, 2x4"),
        ("v6e-16", 24, "topology is 24"),
        ("v5p-64", "2x4", "in these shapes: 2x2x1, 2x2x2, 2x2x4"),
        ("v4-512", "4x4x16", "another shape than 4x8x8, the default; .* the constraint ray.io/tpu-topology=4x4x16"),
        ("v4-1024", "4x4x16", r"4x8x8 \(4x8x16 slices have such parts, but only those of the default shape"),
        ("v4-1024", "2x2x8", "in these shapes: .*4x8x8$"),
        (
            "v6e-8",
            "2x2",
            "a v6e-8 slice is one host with 8 chips and so has no parts, not even on GKE, where it may be two",
        ),
        ("v5litepod-8", "2x2", "no parts, not even on GKE, where it may be two hosts; leave topology out, or ask"),
        ("v6e-4", "2x2", "a v6e-4 slice is one host with 4 chips and so has no parts; leave topology out"),
        ("v6e-1", "1x1", "a v6e-1 slice is one host with 1 chip and so has no parts; leave topology out"),
        ("v4-8", "2x2x1", "a v4-8 slice is one host with 4 chips and so has no parts; leave topology out"),
        ("v7x-2", "1x1x1", "is one host with 1 chip and so has no parts"),
    ],
)
def test_shape_that_a_type_does_not_have_is_refused_with_those_that_it_has(
    tpu_type: str, topology: object, says: str
) -> None:
    with pytest.raises(InvalidTopologyError, match=says) as refused:
        require_shape(get_tpu_config(tpu_type), topology)
    assert isinstance(refused.value, InvalidRequestError)


def test_shape_is_read_as_people_write_it() -> None:
    assert require_shape(get_tpu_config("v6e-16"), " 2X4 ") == "2x4"


def test_names_tell_parts_from_slices() -> None:
    name = "v6e-16-0:2x4:1"
    assert (slice_of(name), shape_of_part(name)) == ("v6e-16-0", "2x4")
    assert (slice_of("v6e-16-0"), shape_of_part("v6e-16-0")) == ("v6e-16-0", None)
    assert shape_of_attribute(part_attribute("2x4")) == "2x4"
    assert (shape_of_attribute("rack"), shape_of_attribute(None)) == (None, None)
    assert [is_on_slices(one) for one in (TPU_NAME, part_attribute("2x4"), "rack", None)] == [True, True, False, False]
