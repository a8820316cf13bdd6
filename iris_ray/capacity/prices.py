"""The prices that an operator gives, and what slices cost by them. Pure.

The file is TOML: a table for each type or generation, in it one for each zone or ``"*"``, and in that the price of a
chip-hour for each market::

    currency = "USD"
    [v6e."us-east5-a"]
    spot = 0.81
    reserved = 1.22
    [v6e."*"]
    on-demand = 2.7
    flex = 1.35
    ["v6e-256"."*"]
    spot = 0.9
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from iris_ray.capacity.provider import Market
from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.checks import Holds, is_number, require, shown
from iris_ray.model.topology import TPU_GENERATIONS, TPUConfig, get_tpu_config

ANYWHERE = "*"
_MARKETS = ", ".join(market.value for market in Market)


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a chip-hour by (type or generation, zone or `ANYWHERE`, market)."""

    currency: str = "USD"
    table: Mapping[tuple[str, str, Market], float] = field(default_factory=dict)

    def chip_hour(self, config: TPUConfig, zone: str, market: Market) -> float | None:
        """Return the price of a chip-hour; the most specific entry counts, the type before the zone. None: unknown."""
        for device in (config.name, config.generation):
            for place in (zone, ANYWHERE):
                if (price := self.table.get((device, place, market))) is not None:
                    return price
        return None


def read_prices(text: str, name: str) -> Prices:
    """Return the prices in a TOML text.

    Args:
        text: the file's content.
        name: the file's, for messages.

    Raises:
        InvalidRequestError: the text is no TOML, or a type, market or price in it is not one; the message says where.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{name}: {error}") from None
    currency = raw.pop("currency", "USD")
    if not isinstance(currency, str):
        raise InvalidRequestError(f'{name}: currency is {shown(currency)}; give a name, such as "USD"')
    table: dict[tuple[str, str, Market], float] = {}
    for device, zones in raw.items():
        key = device if device in TPU_GENERATIONS else _type(device, name)
        for zone, prices in _table(zones, f"{name}: {device}").items():
            for market, price in _table(prices, f"{name}: {device}.{zone}").items():
                table[key, zone, _market(market, f"{name}: {device}.{zone}")] = _price(
                    price, f"{name}: {device}.{zone}.{market}"
                )
    return Prices(currency, table)


def _type(device: str, where: str) -> str:
    try:
        return get_tpu_config(device).name
    except UnknownTPUTypeError as error:
        raise InvalidRequestError(f"{where}: {error}") from None


def _table(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f'{where} is {shown(value)}; give a table for each zone or "*", such as [v6e."*"]')
    return value


def _market(text: str, where: str) -> Market:
    try:
        return Market(text)
    except ValueError:
        raise InvalidRequestError(f"{where}: there is no market {shown(text)}; there are {_MARKETS}") from None


def _price(value: Any, where: str) -> float:
    price = Holds(lambda value: is_number(value) and value >= 0, "the price of a chip-hour, such as 1.25")
    require(where, value, price)
    return float(value)
