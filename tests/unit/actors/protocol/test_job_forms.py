"""The forms of a job: which fields each has, and under which names."""

from collections import Counter

import pytest

from iris_ray.actors.protocol.status import JobFacts, fields_in, job_in, job_status
from tests.support.worlds import World

FORMS = {
    "row": {"priority": "band", "device": "type", "job_id": "id"},
    "history": {"priority": "band", "device": "type", "num_groups": "slices"},
    "goodput": {"attempt": "attempts"},
    "export": {"attempt": "attempts"},
}


@pytest.mark.parametrize("form", FORMS)
def test_form_has_values_of_status_under_its_own_names(form: str) -> None:
    world = World()
    for name in "ab":
        world.add_slice(name)
    facts = JobFacts(world.start(slices=(2,)), world.state, lambda at: at + 1000.0)
    status, names = job_status(facts), fields_in(form)
    assert names.items() >= FORMS[form].items()
    assert not [name for name, count in Counter(names.values()).items() if count > 1]
    assert job_in(form, facts) == {there: getattr(status, name) for name, there in names.items()}
    assert status.submitted_at == facts.job.submitted_at + 1000.0
    world.check()


def test_form_that_nobody_names_has_nothing() -> None:
    assert fields_in("postcard") == {}
