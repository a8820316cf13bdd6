"""The reference of the options of a run is what their table says."""

import pytest

from iris_ray import Constraint, ConstraintOp, PriorityBand, Secret
from iris_ray.model.options import OPTIONS
from tools.options_page import PAGE, options_page

NAMES = {one.__name__: one for one in (Constraint, ConstraintOp, PriorityBand, Secret)}


def test_page_of_options_is_made_from_the_table() -> None:
    assert PAGE.read_text() == options_page(), "write it anew: python -m tools.options_page"


@pytest.mark.parametrize("name", OPTIONS)
def test_example_of_an_option_is_accepted(name: str) -> None:
    assert OPTIONS[name].check.problem(eval(OPTIONS[name].example, dict(NAMES))) is None
