"""The table of prices that an operator gives."""

import re

import pytest

from iris_ray.capacity.prices import read_prices
from iris_ray.capacity.provider import Market
from iris_ray.errors import InvalidRequestError
from iris_ray.model.topology import get_tpu_config
from tests.docs.pages import REPOSITORY

TABLE = """
currency = "EUR"
[v6e."us-east5-a"]
spot = 0.8
reserved = 1
[v6e."*"]
spot = 0.9
flex = 1.5
["v6e-256"."*"]
spot = 0.5
"""


@pytest.mark.parametrize(
    ("tpu_type", "zone", "market", "price"),
    [
        ("v6e-16", "us-east5-a", Market.SPOT, 0.8),
        ("v6e-16", "elsewhere", Market.SPOT, 0.9),
        ("v6e-256", "us-east5-a", Market.SPOT, 0.5),  # the type goes before the zone
        ("v6e-16", "us-east5-a", Market.RESERVED, 1.0),
        ("v6e-16", "us-east5-a", Market.FLEX, 1.5),
        ("v6e-16", "elsewhere", Market.ON_DEMAND, None),
        ("v5p-16", "us-east5-a", Market.SPOT, None),
    ],
)
def test_most_specific_price_counts(tpu_type: str, zone: str, market: Market, price: float | None) -> None:
    prices = read_prices(TABLE, "prices.toml")
    assert (prices.currency, prices.chip_hour(get_tpu_config(tpu_type), zone, market)) == ("EUR", price)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[v6e", "prices.toml: "),
        ('[v6f."*"]\nspot = 1', "'v6f' is not a TPU type"),
        ('[v6e."*"]\nspott = 1', r"v6e.\*: there is no market 'spott'; there are on-demand, spot, reserved, flex"),
        ('[v6e."*"]\nspot = -1', r"prices.toml: v6e.\*.spot is -1; give the price of a chip-hour"),
        ('[v6e."*"]\nspot = nan', "spot is nan"),
        ('[v6e."*"]\nspot = "1"', "spot is '1'"),
        ("[v6e]\nspot = 1", "v6e.spot is 1; give a table"),
        ("v6e = 1", "v6e is 1; give a table"),
        ("currency = 1", "currency is 1"),
    ],
)
def test_wrong_table_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_prices(text, "prices.toml")


def test_table_of_the_page_can_be_read() -> None:
    page = (REPOSITORY / "docs" / "provisioner.md").read_text()
    (table,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    prices = read_prices(table, "page")
    assert prices.chip_hour(get_tpu_config("v7x-16"), "us-central1-c", Market.FLEX) == 3.0
    assert prices.chip_hour(get_tpu_config("v6e-16"), "us-east5-a", Market.RESERVED) == 1.22
