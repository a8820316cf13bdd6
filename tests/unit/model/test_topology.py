"""TPU types: known facts, the spellings people type, and the refusal of what does not exist."""

import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.accelerators.tpu import (
    VALID_TPU_TOPOLOGY,
    get_num_chips_from_topology,
    get_num_tpu_visible_chips_per_host,
    infer_tpu_pod_type_from_topology,
)

from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.topology import TPU_GENERATIONS, TPUConfig, default_topology, get_tpu_config

# Written out from Google Cloud's pages: type, chips, physical hosts, VMs, chips a VM, default shape.
KNOWN_TYPES = [
    ("v2-8", 4, 1, 1, 4, "2x2"),
    ("v2-32", 16, 4, 4, 4, "4x4"),
    ("v2-512", 256, 64, 64, 4, "16x16"),
    ("v3-8", 4, 1, 1, 4, "2x2"),
    ("v3-32", 16, 4, 4, 4, "4x4"),
    ("v3-64", 32, 8, 8, 4, "4x8"),
    ("v3-2048", 1024, 256, 256, 4, "32x32"),
    ("v4-8", 4, 1, 1, 4, "2x2x1"),
    ("v4-16", 8, 2, 2, 4, "2x2x2"),
    ("v4-32", 16, 4, 4, 4, "2x2x4"),
    ("v4-64", 32, 8, 8, 4, "2x4x4"),
    ("v4-128", 64, 16, 16, 4, "4x4x4"),
    ("v4-4096", 2048, 512, 512, 4, "8x16x16"),
    ("v4-8192", 4096, 1024, 1024, 4, "16x16x16"),
    ("v5litepod-1", 1, 1, 1, 1, "1x1"),
    ("v5litepod-2", 2, 1, 1, 2, "1x2"),
    ("v5litepod-4", 4, 1, 1, 4, "2x2"),
    ("v5litepod-8", 8, 1, 1, 8, "2x4"),
    ("v5litepod-16", 16, 2, 4, 4, "4x4"),
    ("v5litepod-256", 256, 32, 64, 4, "16x16"),
    ("v5p-8", 4, 1, 1, 4, "2x2x1"),
    ("v5p-128", 64, 16, 16, 4, "4x4x4"),
    ("v5p-384", 192, 48, 48, 4, "4x4x12"),
    ("v5p-12288", 6144, 1536, 1536, 4, "16x16x24"),
    ("v5p-17920", 8960, 2240, 2240, 4, "16x20x28"),
    ("v6e-1", 1, 1, 1, 1, "1x1"),
    ("v6e-4", 4, 1, 1, 4, "2x2"),
    ("v6e-8", 8, 1, 1, 8, "2x4"),
    ("v6e-16", 16, 2, 4, 4, "4x4"),
    ("v6e-256", 256, 32, 64, 4, "16x16"),
    ("v7-512", 256, 64, 64, 4, "4x8x8"),
    ("v7x-2", 1, 1, 1, 1, "1x1x1"),
    ("v7x-8", 4, 1, 1, 4, "2x2x1"),
    ("v7x-256", 128, 32, 32, 4, "4x4x8"),
    ("v7x-18432", 9216, 2304, 2304, 4, "16x24x24"),
    ("v8t-64", 64, 16, 16, 4, "4x4x4"),
    ("v8i-64", 32, 8, 8, 4, "2x4x4"),
]

# An oracle of its own for every size, so that the rule is not tested against itself.
SIZES: dict[str, list[int]] = {
    "v2": [8, 32, 64, 128, 256, 512],
    "v3": [8, 32, 64, 128, 256, 512, 1024, 2048],
    "v4": list(range(8, 8193, 8)),
    "v5litepod": [1, 2, 4, 8, 16, 32, 64, 128, 256],
    "v5p": list(range(8, 17921, 8)),
    "v6e": [1, 4, 8, 16, 32, 64, 128, 256],
    "v7": [2, *range(8, 513, 8)],
    "v7x": [2, *range(8, 18433, 8)],
    "v8t": list(range(4, 9601, 4)),
    "v8i": list(range(8, 2305, 8)),
}
valid_types = st.sampled_from(list(SIZES)).flatmap(lambda g: st.sampled_from(SIZES[g]).map(lambda n: f"{g}-{n}"))


def suggestions(error: UnknownTPUTypeError) -> list[str]:
    return re.findall(r"v\w+-\d+", str(error).rpartition(" Try ")[2])


@pytest.mark.parametrize(("name", "chips", "hosts", "vms", "chips_per_vm", "shape"), KNOWN_TYPES)
def test_get_tpu_config_known_type_gives_documented_counts(
    name: str, chips: int, hosts: int, vms: int, chips_per_vm: int, shape: str
) -> None:
    config = get_tpu_config(name)
    assert config == TPUConfig(name, chips, hosts, vms, chips_per_vm)
    assert config.generation == name.split("-")[0]
    assert default_topology(config) == shape


def test_tpu_generations_listing_is_complete() -> None:
    assert tuple(SIZES) == TPU_GENERATIONS


@pytest.mark.parametrize("generation", SIZES)
def test_get_tpu_config_accepts_exactly_existing_sizes(generation: str) -> None:
    accepted = []
    largest = max(SIZES[generation])
    for size in (*range(600), *range(largest - 40, largest + 600)):
        try:
            get_tpu_config(f"{generation}-{size}")
        except UnknownTPUTypeError:
            continue
        accepted.append(size)
    expected = [n for n in SIZES[generation] if n < 600 or n >= largest - 40]
    assert sorted(set(accepted)) == expected


@pytest.mark.parametrize(
    ("typed", "canonical"),
    [
        ("V4-32", "v4-32"),
        ("  v4-32\n", "v4-32"),
        ("v4_32", "v4-32"),
        ("v4 32", "v4-32"),
        ("TPU-v4-32", "v4-32"),
        ("tpu-v5p-8", "v5p-8"),
        ("TPU v5p-8", "v5p-8"),
        ("tpuv4-8", "v4-8"),
        ("v5e-16", "v5litepod-16"),
        ("V5E-16", "v5litepod-16"),
        ("v5lite-16", "v5litepod-16"),
        ("v5LitePod-16", "v5litepod-16"),
        ("v5litepod_16", "v5litepod-16"),
        ("tpu-v5e-16", "v5litepod-16"),
        ("v7x-8", "v7x-8"),
        ("tpu7x-8", "v7x-8"),
        ("TPU7x-8", "v7x-8"),
        ("tpu-7x-8", "v7x-8"),
        ("tpu7-8", "v7-8"),
        ("tpu8t-8", "v8t-8"),
        ("TPU-V8I-8", "v8i-8"),
        ("TPU-V7X-8", "v7x-8"),
    ],
)
def test_get_tpu_config_accepts_common_spellings(typed: str, canonical: str) -> None:
    assert get_tpu_config(typed).name == canonical


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("v4-31", ["v4-24", "v4-32"]),
        ("v4-4", ["v4-8"]),
        ("v4-0", ["v4-8"]),
        ("v4--8", ["v4-8"]),
        ("v4-99999999", ["v4-8192"]),
        ("v4-8193", ["v4-8192"]),
        ("v2-16", ["v2-8", "v2-32"]),
        ("v2-1024", ["v2-512"]),
        ("v3-48", ["v3-32", "v3-64"]),
        ("v6e-2", ["v6e-1", "v6e-4"]),
        ("v5litepod-512", ["v5litepod-256"]),
        ("v6e-12", ["v6e-8", "v6e-16"]),
        ("v7x-4", ["v7x-2", "v7x-8"]),
        ("tpu7x-20000", ["v7x-18432"]),
        ("v5-16", ["v5litepod-16", "v5p-16"]),
        ("v6-8", ["v6e-8"]),
        ("v9-8", [f"{generation}-8" for generation in SIZES]),
        ("v5p", ["v5p-8", "v5p-17920"]),
        ("v5p-", ["v5p-8", "v5p-17920"]),
        ("v4-8-8", ["v4-8", "v4-8192"]),
        ("v4-8.0", ["v4-8", "v4-8192"]),
        ("v4-2x2x4", ["v4-8", "v4-8192"]),
        ("v4-\N{ARABIC-INDIC DIGIT EIGHT}", ["v4-8", "v4-8192"]),
        ("v4-" + "9" * 5000, ["v4-8", "v4-8192"]),
    ],
)
def test_get_tpu_config_impossible_type_names_nearest(wrong: str, nearest: list[str]) -> None:
    with pytest.raises(UnknownTPUTypeError, match="is not a TPU type") as caught:
        get_tpu_config(wrong)
    assert suggestions(caught.value) == nearest
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("wrong", [None, 4, 4.0, True, b"v4-8", ["v4-8"], "", " ", "4-8", "tpu", "A100-8", "v"])
def test_get_tpu_config_no_type_at_all_is_refused_with_examples(wrong: object) -> None:
    with pytest.raises(UnknownTPUTypeError) as caught:
        get_tpu_config(wrong)  # type: ignore[arg-type]
    assert suggestions(caught.value) == [
        "v2-32", "v3-32", "v4-16", "v5litepod-16", "v5p-16", "v6e-16", "v7-16", "v7x-16", "v8t-8", "v8i-16"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("v4-31", "v4 sizes count TensorCores, 2 a chip: 8, then multiples of 8 from 16 to 8192"),
        ("v2-16", "v2 sizes count TensorCores, 2 a chip: 8, then powers of two from 32 to 512"),
        ("v5e-3", "v5litepod sizes count chips: 1, 2, 4, 8, then powers of two from 16 to 256"),
        ("v7x-4", "v7x sizes count TensorCores, 2 a chip: 2, 8, then multiples of 8 from 16 to 18432"),
        ("v9-8", "there is no generation 'v9', only v2, v3, v4, v5litepod, v5p, v6e, v7, v7x, v8t, v8i"),
        ("v5p", "the size is missing"),
        ("v4--8", "a hyphen and a whole number should follow the generation"),
        (None, "a string is needed, not NoneType"),
    ],
)
def test_get_tpu_config_impossible_type_says_why(wrong: str, reason: str) -> None:
    with pytest.raises(UnknownTPUTypeError, match=re.escape(reason)):
        get_tpu_config(wrong)


@given(valid_types)
def test_get_tpu_config_any_valid_type_is_consistent(name: str) -> None:
    config = get_tpu_config(name)
    assert config.chip_count == config.vm_count * config.chips_per_vm
    assert 1 <= config.host_count <= config.vm_count
    assert config.name == name
    assert get_tpu_config(config.accelerator_type) == config
    assert pickle.loads(pickle.dumps(config)) == config


@given(valid_types)
def test_default_topology_any_valid_type_holds_all_chips(name: str) -> None:
    config = get_tpu_config(name)
    sides = [int(side) for side in default_topology(config).split("x")]
    product = 1
    for side in sides:
        product *= side
    assert product == config.chip_count
    assert len(sides) == (2 if config.generation in ("v2", "v3", "v5litepod", "v6e") else 3)
    assert product <= 2 or sum(side % 2 == 0 for side in sides) >= 2, "hosts are 2x2 blocks"


@given(
    st.one_of(
        st.text(),
        st.builds(
            "{}{}{}".format,
            st.sampled_from([*SIZES, "v5e", "tpu7x", "v5", "v8"]),
            st.sampled_from("-_ x"),
            st.integers(),
        ),
    )
)
def test_get_tpu_config_understands_or_suggests_for_any_text(text: str) -> None:
    try:
        config = get_tpu_config(text)
    except UnknownTPUTypeError as error:
        names = suggestions(error)
    else:
        names = [config.name]
    assert names
    assert [get_tpu_config(name).name for name in names] == names


@pytest.mark.parametrize(
    ("name", "expected"), [("v7x-8", "tpu7x-8"), ("tpu8t-8", "tpu8t-8"), ("v5e-16", "v5litepod-16"), ("v4-32", "v4-32")]
)
def test_accelerator_type_is_spelled_as_googles(name: str, expected: str) -> None:
    assert get_tpu_config(name).accelerator_type == expected


@pytest.mark.parametrize(
    ("name", "chips_per_host", "vms"), [("v5e-8", 4, 2), ("v6e-8", 4, 2), ("v5e-8", 8, 1), ("v4-32", 4.0, 4)]
)
def test_with_live_hosts_observed_count_wins_over_the_rule(name: str, chips_per_host: float, vms: int) -> None:
    rule = get_tpu_config(name)
    live = rule.with_live_hosts(chips_per_host)
    assert (live.vm_count, live.chips_per_vm) == (vms, chips_per_host)
    assert (live.name, live.chip_count, live.host_count) == (rule.name, rule.chip_count, rule.host_count)


@pytest.mark.parametrize(
    ("chips_per_host", "reason"),
    [
        (3, "can't be hosts of 3 chips"),
        (float("inf"), "whole number"),
        (float("nan"), "whole number"),
        (16, "RAY_TPU_RESOURCE_PER_CHIP"),
        (0, "positive"),
        (-4, "positive"),
        (True, "positive"),
        (4.5, "positive"),
        (None, "positive"),
    ],
)
def test_with_live_hosts_impossible_count_is_refused(chips_per_host: float, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        get_tpu_config("v7x-16").with_live_hosts(chips_per_host)


@pytest.mark.parametrize(
    ("name", "counted", "vms"), [("v7x-8", 8, 1), ("v7x-16", 8, 2), ("v7x-2", 2, 1), ("v2-8", 8, 1)]
)
def test_devices_of_chips_are_counted_as_chips(name: str, counted: float, vms: int) -> None:
    """With RAY_TPU_RESOURCE_PER_CHIP=2 Ray counts both devices of each chip."""
    rule = get_tpu_config(name)
    assert rule.with_live_hosts(counted) == rule
    assert rule.vm_count == vms


@pytest.mark.parametrize("name", ["v4-16", "v5p-16", "v6e-256"])
def test_joined_cores_are_never_counted_as_chips(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="RAY_TPU_RESOURCE_PER_CHIP"):
        get_tpu_config(name).with_live_hosts(16 if name == "v6e-256" else 8)


# -- what others say about the same types ------------------------------------------------------------------------------

FACTS = json.loads((Path(__file__).parents[2] / "data" / "tpu_types.json").read_text())
XPK = [
    (f"{generation}-{size}", *counts)
    for generation, rows in FACTS["xpk"]["generations"].items()
    for size, *counts in rows
]
RAY = [(kind, shape) for kind, shapes in VALID_TPU_TOPOLOGY.items() for shape in sorted(shapes)]


@pytest.mark.parametrize(("name", "chips", "vms"), [*XPK, *((n, *c) for n, c in FACTS["iris"]["types"].items())])
def test_type_has_chips_and_hosts_of_other_tables(name: str, chips: int, vms: int) -> None:
    config = get_tpu_config(name)
    if (config.chip_count, config.chips_per_vm) == (8, 8):  # GKE makes two VMs of it, as the live nodes say
        config = config.with_live_hosts(4)
    assert (config.chip_count, config.vm_count) == (chips, vms)


@pytest.mark.parametrize(("generation", "shape"), RAY)
def test_type_has_chips_and_hosts_as_in_ray(generation: str, shape: str) -> None:
    name = infer_tpu_pod_type_from_topology(shape, generation)
    config = get_tpu_config(str(name))
    each = get_num_tpu_visible_chips_per_host(str(name))
    assert (config.name, config.chip_count) == (name, get_num_chips_from_topology(shape))
    assert (config.chips_per_vm, config.vm_count) == (each, config.chip_count // each)


def test_single_chip_of_v7x_is_four_in_ray() -> None:
    """Ray has a default for all types that it does not list; Google and xpk have a machine type with one chip."""
    assert (get_num_tpu_visible_chips_per_host("v7x-2"), get_tpu_config("v7x-2").chips_per_vm) == (4, 1)


@pytest.mark.parametrize(("generation", "cores", "joined"), [(g, *c) for g, c in FACTS["jax"]["generations"].items()])
def test_type_counts_cores_as_jax_does(generation: str, cores: int, joined: bool) -> None:
    config = get_tpu_config(f"{generation}-8")
    assert config.chip_count * cores == 8
    devices = 1 if joined else cores
    assert config.devices_per_chip == devices
    most = 8 if config.generation in ("v5litepod", "v6e") else 4
    assert get_tpu_config(f"{generation}-64").with_live_hosts(most * devices).chips_per_vm == most


def test_unknown_type_error_survives_pickling() -> None:
    with pytest.raises(UnknownTPUTypeError) as caught:
        get_tpu_config("v4-31")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_configuration_of_a_type_is_computed_once() -> None:
    """A plan of a provisioner asks for it once for each job that waits."""
    assert get_tpu_config("v4-32") is get_tpu_config("v4-32")
