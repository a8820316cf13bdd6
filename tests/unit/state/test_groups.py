"""Groups by the value of an attribute: equal values are one group, and different ones are not confused."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_ray.model.constraints import AttributeValue, Scalar
from iris_ray.model.job_spec import CoschedulingConfig
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.state.events import JobCancelledEvent
from iris_ray.state.groups import group_name
from tests.support.worlds import World, cpu_host

TEXTS = ("True", "true", "1", "1.0", "'1'", '"1"', "inf", "1e-07", "1_0", " 1", "rack-1", "\u0661")
VALUES: tuple[Scalar, ...] = (*TEXTS, True, False, 0, 1, 1.0, 1.5, 1e-07, 10, 1e20, 10**20, math.inf, -0.0)


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(VALUES, 2)), ids=repr)
def test_only_equal_values_share_a_name(one: Scalar, other: Scalar) -> None:
    first, second = AttributeValue(one), AttributeValue(other)
    assert (group_name(first) == group_name(second)) == (first == second)


@given(
    st.lists(st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text()), max_size=5)
)
def test_only_equal_values_of_any_kind_share_a_name(found: list[Scalar]) -> None:
    values = [AttributeValue(value) for value in found]
    for one, other in itertools.combinations(values, 2):
        assert (group_name(one) == group_name(other)) == (one == other)


def test_unambiguous_text_and_numbers_name_themselves() -> None:
    assert [group_name(AttributeValue(value)) for value in ("rack-1", 7, 1.5)] == ["rack-1", "7", "1.5"]


def test_gang_is_not_split_over_similar_racks() -> None:
    world = World()
    racks: tuple[Scalar, ...] = (True, "True", 1, "1")
    for number, rack in enumerate(racks):
        world.do(cpu_host(f"host-{number}", rack=rack))
    assert len(list(world.state.fleet.grouping("rack"))) == 4
    world.do(cpu_host("host-5", rack=1.0))
    assert {len(group.workers) for group in world.state.fleet.grouping("rack").groups()} == {1, 2}


def test_attribute_groups_are_kept_while_a_job_names_them() -> None:
    world = World()
    for number in range(4):
        world.do(cpu_host(f"host-{number}", rack=number // 2))

    def submit(job_id: str) -> Job:
        by_rack = CoschedulingConfig("rack", 1)
        return world.submit_tasks(job_id, resources={"CPU": 8.0}, coscheduling=by_rack)

    first, second = submit("first"), submit("second")
    world.schedule()
    kept = world.state.fleet.grouping("rack")
    world.report_all(first, TaskState.SUCCEEDED)
    world.confirm(first)
    assert world.state.fleet.keeps("rack", kept)
    world.do(JobCancelledEvent("second", "enough"))
    assert not world.state.fleet.keeps("rack", kept)
    world.confirm(second)
    world.do(cpu_host("host-4", rack=1))
    world.lose("host-0")
    third = submit("third")
    world.schedule()
    assert third.gang.groups == ("1",), "what was evaluated before the groups were forgotten counts no more"
