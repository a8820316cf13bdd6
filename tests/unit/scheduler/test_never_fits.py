"""What a group needs at least, against all that a cluster has."""

import pytest

from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.parts import part_attribute
from iris_ray.scheduler.never_fits import never_fits
from tests.support.worlds import World, add_slices, cpu_host, gang_spec, tasks_spec


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([gang_spec("a"), gang_spec("b")], None),
        ([gang_spec("a", slices=(1, 2)), gang_spec("b", slices=(1, 9))], None),
        ([gang_spec("a", whole_groups=True), gang_spec("b", whole_groups=True, slices=(2,))], "a and b need 3 slices"),
        ([gang_spec("a", "v4-32")], "a needs 4 hosts with chips at once, and the cluster has 0 that suits it"),
        ([gang_spec("a"), tasks_spec("b", 2), tasks_spec("c", 1)], "need 5 hosts with chips"),
        ([gang_spec("a", slices=(2,)), tasks_spec("b", 5, resources={"CPU": 8.0})], None),
        (
            [gang_spec("a"), tasks_spec("b", 6, resources={"CPU": 8.0})],
            "b needs 48 CPU at once",
        ),
        (
            [tasks_spec("b", 3, resources={"CPU": 8.0}), tasks_spec("c", 3, resources={"CPU": 8.0})],
            "b and c need 48",
        ),
        ([tasks_spec("b", 1, resources={"GPU": 1.0})], "b needs 1 GPU at once, and the cluster has 0"),
    ],
)
def test_group_is_impossible_only_if_it_needs_more_than_there_is(
    world: World, specs: list[JobSpec], why: str | None
) -> None:
    add_slices(world, "a", "b")
    world.do(cpu_host("c"))
    found = never_fits(specs, world.state.workers.values())
    assert found == why if why is None else why in (found or "")


def test_gang_on_a_part_needs_slices_that_have_it(world: World) -> None:
    add_slices(world, "a", tpu_type="v6e-16")
    half = CoschedulingConfig(part_attribute("2x4"))
    jobs = [gang_spec(name, "v6e-16", replicas=2, coscheduling=half) for name in "abc"]
    assert never_fits(jobs[:2], world.state.workers.values()) is None
    assert "a and b and c need 6 hosts with chips" in (never_fits(jobs, world.state.workers.values()) or "")
    part_of_larger = gang_spec("d", "v6e-64", replicas=2, coscheduling=half)
    assert "the cluster has 0 that suits it" in (never_fits([part_of_larger], world.state.workers.values()) or "")
