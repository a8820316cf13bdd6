"""What is drawn: fleets, and jobs for them."""

import math
from dataclasses import dataclass
from random import Random
from typing import Any

from iris_ray.model.constraints import Constraint, ConstraintOp, Scalar
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.options import EACH_SLICE, PriorityBand
from iris_ray.study.jobs import SimulatedJob, slice_spec, tasks_spec

OP = ConstraintOp
TPU_TYPES = ("v4-8", "v4-16", "v4-32", "v5litepod-16")
ATTRIBUTES: tuple[dict[str, Scalar], ...] = ({"zone": "us"}, {"zone": "eu", "generation": 4}, {"taint:spot": True})
CONSTRAINTS = (*[()] * 6, (Constraint("zone", OP.EQ, "us"),), (Constraint("generation", OP.GE, 4),))
RACKS = ("rack-1", "rack-2")
CPUS = 16.0


@dataclass(frozen=True)
class Fleet:
    """How many slices and hosts there are.

    Attributes:
        slices: TPU type and attributes, one for each slice.
        hosts: attributes, one for each host without chips.
    """

    slices: tuple[tuple[str, dict[str, Scalar]], ...]
    hosts: tuple[dict[str, Scalar], ...]

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tpu_type for tpu_type, _ in self.slices))


def draw_fleet(chance: Random) -> Fleet:
    types = chance.sample(TPU_TYPES, chance.randint(1, 2))
    slices = [(chance.choice(types), chance.choice(ATTRIBUTES)) for _ in range(chance.choice((2, 4, 4, 8, 16)))]
    racks: list[dict[str, Scalar]] = [{"rack": chance.choice(RACKS)} for _ in range(chance.choice((0, 2, 4, 6)))]
    return Fleet(tuple(slices), tuple(racks))


def draw_job(chance: Random, job_id: str, owner: str, fleet: Fleet) -> SimulatedJob:
    terms: dict[str, Any] = {
        "owner": owner,
        "user": chance.choice(("ann", "bob", "cy")),
        "priority": chance.choice(list(PriorityBand)),
        "preferences": chance.choice(CONSTRAINTS),
        "tolerations": chance.choice(((), ("spot",))),
        "max_retries_failure": chance.randint(0, 2),
        "max_retries_preemption": chance.choice((0, 2, 30)),
        "max_task_failures": chance.choice((None, None, 0, 2)),
        "scheduling_timeout": chance.choice((None, None, None, 60.0, 900.0)),
        "max_runtime": chance.choice((*[None] * 6, 30.0, 400.0)),
    }
    return SimulatedJob(
        spec=_draw_spec(chance, job_id, fleet, terms),
        run_s=chance.choice((0.0, 5.0, 60.0, 300.0, 1000.0)),
        save_every_s=chance.choice((30.0, math.inf)),
        heeds_notices=chance.random() < 0.7,
        save_s=chance.choice((1.0, 10.0, 50.0)),
        fails_after_s=chance.choice((*[math.inf] * 5, 1.0, 200.0)),
        crashes=chance.random() < 0.3,
        launch_fails=chance.random() < 0.05,
        keep_warm_s=chance.choice((0.0, 0.0, 60.0)),
    )


def _draw_spec(chance: Random, job_id: str, fleet: Fleet, terms: dict[str, Any]) -> JobSpec:
    constraints = chance.choice(CONSTRAINTS)
    match chance.choice(("slices", "slices", "slices", "tasks", "chips", "many tasks", "rack")):
        case "tasks":
            return tasks_spec(job_id, chance.randint(1, 4), chance.choice((0.5, 4.0, 15.0)), **terms)
        case "many tasks":
            return tasks_spec(job_id, chance.randint(5, 40), chance.choice((0.5, 4.0)), **terms)
        case "chips":
            terms |= {"resources": {"TPU": chance.choice((1.0, 4.0))}, "constraints": constraints}
            return tasks_spec(job_id, chance.randint(1, 3), **terms)
        case "rack":
            terms["coscheduling"] = CoschedulingConfig("rack", chance.choice((1, (1, 2))))
            return slice_spec(job_id, "v4-16", **terms, resources={"CPU": 8.0}, whole_groups=False, constraints=())
    tpu_type = chance.choice(fleet.types)
    if chance.random() < 0.2:  # each slice is a gang by itself
        terms |= {"failure_domain": EACH_SLICE, "whole_groups": chance.random() < 0.8}
        return slice_spec(job_id, tpu_type, chance.choice((1, 2, 3, 4)), **terms)
    slices = chance.choice((1, 1, 1, 2, 3, (1, 2), (1, 2, 3), (2, 4)))
    terms |= {
        "spares": chance.choice((0, 0, 0, 1, 2)),
        "grow_after": chance.choice((None, 0.0, 20.0, "auto")),
        "whole_groups": chance.random() < 0.5,
        "stop_without_progress": chance.choice((None, None, None, 1, 3)),
    }
    if chance.random() < 0.2:  # any slices with enough hosts, or parts of them
        terms |= {"whole_groups": False, "constraints": constraints}
        return slice_spec(job_id, chance.choice(("v4-8", "v4-16", tpu_type)), slices, **terms)
    return slice_spec(job_id, tpu_type, slices, **terms)
