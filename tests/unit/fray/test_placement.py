"""What a job of Fray's asks of its hosts is what iris_ray places."""

from typing import Any

import pytest

from iris_ray.errors import InvalidJobError, InvalidRequestError, UnknownTPUTypeError
from iris_ray.fray.job_request import fray_placement, size_in_bytes
from iris_ray.model.constraints import Constraint, ConstraintOp
from iris_ray.model.workers import TPU_TOPOLOGY

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "size"),
    [("4g", 4 * GIB), ("4GB", 4 * GIB), ("4 GiB", 4 * GIB), ("1.5k", 1536), ("512m", GIB / 2), ("1t", 1024 * GIB)],
)
def test_units_of_memory_are_binary(text: str, size: float) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "g", "4 giga", "-4g", "4g4g", 4])
def test_invalid_amount_of_memory_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="'512m'"):
        size_in_bytes(text)


def resources(tpu: str | None = None, **asked: Any) -> Any:
    types = pytest.importorskip("fray.types", reason="needs Fray: make marin")
    config = types.ResourceConfig
    return config(**asked) if tpu is None else config.with_tpu(tpu, **{"cpu": 2, "ram": "1g", **asked})


def test_tasks_without_tpu_are_placed_singly_by_cpu_and_memory() -> None:
    placed = fray_placement(resources(cpu=3, ram="2g"), 5, gang=True)
    assert (placed.replicas, placed.coscheduling, placed.device) == (5, None, None)
    assert placed.resources == {"CPU": 3.0, "memory": 2.0 * GIB}


@pytest.mark.parametrize(
    ("tpu", "slice_count", "gang", "tasks_of_a_slice", "slices"),
    [
        ("v4-16", 1, True, 2, (1,)),
        ("v4-16", 3, True, 2, (3,)),
        ("v4-16", 3, False, 2, (3,)),
        ("v4-8", 2, True, 1, (2,)),
        ("v4-8", 1, True, 1, None),
        ("v4-8", 2, False, 2, None),
    ],
)
def test_slice_tasks_are_a_gang_unless_separable(
    tpu: str, slice_count: int, gang: bool, tasks_of_a_slice: int, slices: tuple[int, ...] | None
) -> None:
    asked = resources(tpu, slice_count=slice_count)
    placed = fray_placement(asked, asked.replicas, gang=gang)
    assert placed.replicas == tasks_of_a_slice
    assert (placed.coscheduling.num_groups if placed.coscheduling else None) == slices
    assert placed.resources == {"TPU": 4.0, "CPU": 2.0, "memory": 1.0 * GIB}
    assert placed.constraints == (Constraint(TPU_TOPOLOGY, ConstraintOp.IN, [tpu]),)


def test_same_shape_alternatives_become_one_constraint() -> None:
    types = pytest.importorskip("fray.types", reason="needs Fray: make marin")
    asked = types.ResourceConfig.with_tpu(["v5p-16", "v4-16"], cpu=1)
    assert fray_placement(asked, 2, True).constraints == (
        Constraint(TPU_TOPOLOGY, ConstraintOp.IN, ["v5p-16", "v4-16"]),
    )
    shaped = types.ResourceConfig(device=types.TpuConfig("v4-16", topology="2x2x2"))
    assert fray_placement(shaped, 2, True).constraints[1] == Constraint("ray.io/tpu-topology", ConstraintOp.EQ, "2x2x2")


GPU_TYPE = "ray.io/accelerator-type"


@pytest.mark.parametrize(
    ("gpu", "replicas", "gang", "group_by"),
    [("H100", 2, True, GPU_TYPE), ("auto", 2, True, GPU_TYPE), ("H100", 1, True, None), ("H100", 2, False, None)],
)
def test_tasks_with_gpus_are_a_gang_on_hosts_of_one_type(
    gpu: str, replicas: int, gang: bool, group_by: str | None
) -> None:
    types = pytest.importorskip("fray.types", reason="needs Fray: make marin")
    placed = fray_placement(types.ResourceConfig.with_gpu(gpu, count=8), replicas, gang)
    assert (placed.resources["GPU"], placed.replicas) == (8.0, replicas)
    assert (placed.coscheduling.group_by if placed.coscheduling else None) == group_by
    assert placed.constraints == (() if gpu == "auto" else (Constraint(GPU_TYPE, ConstraintOp.IN, ["H100"]),))


def test_gpu_with_size_of_its_memory_matches_rays_label_without() -> None:
    types = pytest.importorskip("fray.types", reason="needs Fray: make marin")
    placed = fray_placement(types.ResourceConfig.with_gpu("A100-80G"), 1, True)
    assert placed.constraints == (Constraint(GPU_TYPE, ConstraintOp.IN, ["A100-80G", "A100"]),)
    assert placed.preferences[0] == Constraint(GPU_TYPE, ConstraintOp.IN, ["A100-80G"])


def test_unpreemptible_job_prefers_staying_hosts() -> None:
    """Marin's coordinators ask for them, and most clusters do not say it of their hosts."""
    stays = Constraint("preemptible", ConstraintOp.EQ, False)
    assert stays in fray_placement(resources(preemptible=False), 1, True).preferences
    assert stays not in fray_placement(resources(), 1, True).preferences


def test_region_and_zone_are_constraints() -> None:
    placed = fray_placement(resources(regions=["a", "b"], zone="a-1"), 1, True)
    assert placed.constraints == (
        Constraint("region", ConstraintOp.IN, ["a", "b"]),
        Constraint("zone", ConstraintOp.EQ, "a-1"),
    )
    assert fray_placement(resources(regions=["*"]), 1, True).constraints == ()


@pytest.mark.parametrize(
    ("asked", "where"),
    [
        ({}, Constraint("region", ConstraintOp.IN, ["here"])),
        ({"regions": ["there"]}, Constraint("region", ConstraintOp.IN, ["there"])),
        ({"zone": "there-a"}, Constraint("zone", ConstraintOp.EQ, "there-a")),
        ({"regions": ["*"]}, None),
    ],
    ids=str,
)
def test_job_goes_to_region_of_its_parent_unless_it_says(asked: dict[str, Any], where: Constraint | None) -> None:
    placed = fray_placement(resources(**asked), 1, gang=True, region="here")
    assert placed.constraints == ((where,) if where else ())


@pytest.mark.parametrize(
    ("asked", "replicas", "error", "said"),
    [
        ({"tpu": "v4-16"}, 3, InvalidJobError, "every v4-16 slice has 2 VMs.*with_tpu"),
        ({"tpu": "v4-16"}, 1, InvalidJobError, "multiple of 2"),
        ({"tpu": "v4-16", "device_alternatives": ["v4-32"]}, 2, InvalidJobError, "v4-16, v4-32 can't stand in"),
        ({"tpu": "v4-16", "device_alternatives": ["v9-1"]}, 2, UnknownTPUTypeError, "v9"),
        ({"ram": "much"}, 1, InvalidRequestError, "'much'"),
        ({"cpu": -1}, 1, InvalidRequestError, "cpu is -1"),
        ({"regions": ["*", "a"]}, 1, InvalidRequestError, "alone for any"),
    ],
    ids=str,
)
def test_impossible_placement_is_refused(
    asked: dict[str, Any], replicas: int, error: type[Exception], said: str
) -> None:
    made = resources(**{option: value for option, value in asked.items() if option != "device_alternatives"})
    made.device_alternatives = asked.get("device_alternatives")
    with pytest.raises(error, match=said):
        fray_placement(made, replicas, gang=True)
