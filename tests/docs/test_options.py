"""The reference of the options of a run is what their table says."""

from tools.options_page import PAGE, options_page


def test_page_of_options_is_made_from_the_table() -> None:
    assert PAGE.read_text() == options_page(), "write it anew: python -m tools.options_page"
